TASK=mnli
python run_glue.py --model_name_or_path example/encoder --task_name $TASK --max_seq_length 96 --per_device_train_batch_size=16 --do_train
