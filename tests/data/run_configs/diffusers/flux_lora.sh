# Traps: a batch of prior preservation is twice as large; latents are not cached unless asked; one prompt is encoded once.
accelerate launch --mixed_precision bf16 --num_processes 1 train_dreambooth_lora_flux.py \
  --pretrained_model_name_or_path=example/flux-like --instance_data_dir=dog --instance_prompt="a photo of a dog" \
  --mixed_precision=bf16 --resolution=512 --train_batch_size=1 --with_prior_preservation --rank=8 \
  --lora_layers=attn.to_q,attn.to_v --use_8bit_adam --gradient_checkpointing --gradient_accumulation_steps=4
