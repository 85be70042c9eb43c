deepspeed --include localhost:0,1,3 llava/train/train_mem.py \
  --deepspeed ./scripts/zero2.json \
  --lora_enable True --lora_r 128 --bits 4 --mm_projector_type mlp2x_gelu --vision_tower example/tower \
  --model_name_or_path example/small-decoder --bf16 True --per_device_train_batch_size 4 --model_max_length 1024
