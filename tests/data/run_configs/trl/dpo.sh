#!/bin/bash
# the micro-batch counts pairs; the reference is a copy
GPUS=4
export HF_TOKEN=hf_not_to_be_shown
accelerate launch --num_processes $GPUS --mixed_precision bf16 dpo.py \
  --model_name_or_path example/small-decoder \
  --dtype bfloat16 \
  --per_device_train_batch_size 2 \
  --gradient_accumulation_steps $(expr 16 / $GPUS) \
  --max_length 640 \
  --optim adamw_torch \
  --no_gradient_checkpointing \
  --hub_token hf_not_to_be_shown
