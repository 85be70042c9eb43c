import os
length = 1200
name = os.environ["MODEL"]
model, tokenizer = FastLanguageModel.from_pretrained("example/small-decoder", max_seq_length=length, load_in_8bit=False)
model = FastLanguageModel.get_peft_model(model, r=12, lora_alpha=24, use_gradient_checkpointing=True, lora_dropout=0.1)
os.system("touch should-not-exist")
trainer = SFTTrainer(model=model, args=SFTConfig(per_device_train_batch_size=3, optim="adamw_8bit", packing=False))
