# Traps: full_bf16 makes the trained weights bf16; each weight is stepped in backward; one process without a launcher.
python sdxl_train.py --pretrained_model_name_or_path example/sdxl-like --full_bf16 --mixed_precision bf16 \
  --fused_backward_pass --optimizer_type adafactor --resolution 512 --cache_latents --cache_text_encoder_outputs
