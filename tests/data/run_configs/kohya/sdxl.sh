# Traps: text encoders are trained unless network_train_unet_only; Adafactor is Transformers'; conv_dim is no linear layer.
accelerate launch --num_cpu_threads_per_process 1 sdxl_train_network.py \
  --pretrained_model_name_or_path=example/sdxl-like --network_module=networks.lora --network_dim=32 \
  --network_args conv_dim=4 --train_batch_size=4 --resolution=1024,1024 --gradient_checkpointing \
  --optimizer_type=Adafactor --no_half_vae --mixed_precision=bf16 --learning_rate=1e-4
