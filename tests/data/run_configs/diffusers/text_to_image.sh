# Traps: without mixed_precision all is fp32; captions are encoded in every step; the batch is 16 where nobody says.
python train_text_to_image.py --pretrained_model_name_or_path=example/sd-like --dataset_name=pictures --use_ema \
  --resolution=512 --enable_xformers_memory_efficient_attention --max_train_steps=15000
