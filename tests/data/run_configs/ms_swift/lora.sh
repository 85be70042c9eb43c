n=4
CUDA_VISIBLE_DEVICES=0,1,2,3 NPROC_PER_NODE=$n swift sft \
  --model example/small-decoder --train_type lora --dataset 'example/data#500' \
  --max_length 1500 --quant_bits 4 --attn_impl flash_attn --packing true --lora_dtype bfloat16 \
  --per_device_train_batch_size 2
