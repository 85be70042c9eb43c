torchrun --nproc_per_node $N_GPUS train.py --model_name_or_path $MODEL --per_device_train_batch_size $BATCH --model_max_length 256 --fp16 True --output_dir out
