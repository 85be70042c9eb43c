"""The keys of torchtune's recipes. Source: torchtune 0.7 (recipes/*.py, recipes/configs, torchtune/models)."""

from __future__ import annotations

from memcalc.run_configs import option_names as our
from memcalc.run_configs.keys import Key, anything, count, flag, harmless, mapping, names, number, table, text, whole

KEYS = table(
    Key("model", mapping, {}, "model", "a function that builds the model"),
    Key("dtype", text, "bf16", our.PRECISION, "weights, gradients, states and adapters alike; no autocast"),
    Key("batch_size", count, 2, our.BATCH, "sequences per GPU and forward pass"),
    Key("gradient_accumulation_steps", count, 1, our.GRAD_ACCUM, "micro-batches per optimizer step"),
    Key("tokenizer", mapping, {}, our.SEQ_LEN, "max_seq_len caps a sample; null: nothing does"),
    Key("dataset", anything, {}, our.PACKING, "packed fills rows of exactly max_seq_len"),
    Key("optimizer", mapping, {}, our.OPTIMIZER, "the optimizer"),
    Key("optimizer_in_bwd", flag, False, our.OPTIMIZER_IN_BACKWARD, "each weight is stepped in backward"),
    Key("clip_grad_norm", anything, None, "", "clipping"),
    Key("enable_activation_checkpointing", flag, False, our.CHECKPOINTING, "recompute blocks in backward"),
    Key("enable_activation_offloading", flag, False, our.ACTIVATION_OFFLOADING, "saved tensors in host memory"),
    Key("ac_mode", text, None, our.CHECKPOINTING, "selective: every N-th block"),
    Key("ac_option", whole, None, our.CHECKPOINT_EVERY, "which blocks"),
    Key("loss", mapping, {}, our.LOSS, "the loss"),
    Key("compile", anything, False, "", "torch.compile"),
    Key("quantizer", mapping, None, "", "quantization-aware training"),
    Key("resize_token_embeddings", flag, False, "", "adds rows to the embedding"),
    Key("fsdp", mapping, {}, our.CPU_OFFLOAD, "FSDP's ways, old spelling"),
    Key("fsdp_cpu_offload", flag, False, our.CPU_OFFLOAD, "shards, gradients and states on the host"),
    Key("fsdp_reshard_after_forward", flag, True, our.RESHARD, "shard again after forward"),
    Key("tensor_parallel_dim", whole, 1, our.TENSOR_PARALLEL, "GPUs that share every layer"),
    Key("context_parallel_dim", whole, 1, our.CONTEXT_PARALLEL, "GPUs that share a sequence"),
    Key("data_parallel_shard_dim", whole, -1, our.DATA_PARALLEL, "GPUs that share one copy"),
    Key("data_parallel_replicate_dim", whole, 1, our.REPLICAS, "copies of the sharded model"),
    Key("custom_sharded_layers", names, None, "", "layers that are units of their own"),
    Key("low_cpu_ram", flag, False, "", "loading"),
    Key("checkpointer", mapping, {}, "model", "where the weights are"),
    Key("ref_checkpointer", mapping, None, our.REFERENCE, "where the reference's weights are"),
)

MODEL = table(
    Key("lora_rank", count, 8, our.LORA_RANK, "rank of the adapters"),
    Key("lora_alpha", number, 16, "", "scale of the adapters"),
    Key("lora_dropout", number, 0.0, our.LORA_DROPOUT, "dropout in front of the adapters"),
    Key("lora_attn_modules", names, ["q_proj", "v_proj"], our.LORA_TARGETS, "projections of attention with adapters"),
    Key("apply_lora_to_mlp", flag, False, our.LORA_TARGETS, "the three projections of the MLP, too"),
    Key("apply_lora_to_output", flag, False, our.LORA_TARGETS, "the output head, too"),
    Key("use_dora", flag, False, our.DORA, "weight-decomposed LoRA"),
    Key("quantize_base", flag, False, our.QUANTIZATION, "NF4 base (torchao)"),
)
MODEL_HARMLESS = harmless(
    "_component_ image_size decoder_trainable encoder_trainable fusion_trainable max_seq_len attn_dropout pool_type "
    "sample_prompts quantize_base num_classes"
)
HARMLESS = harmless(
    "output_dir seed shuffle resume_from_checkpoint epochs lr_scheduler max_steps_per_epoch device metric_logger "
    "log_every_n_steps log_peak_memory_stats log_level profiler save_adapter_weights_only run_val_every_n_steps "
    "dataset_val batch_size_val collate_fn tensor_parallel_plan early_exit_loss layer_dropout base_dir steps_to_save "
    "use_distributed_state_dict enable_async_checkpointing cudnn_deterministic_mode float8_recipe_name "
    "enable_fp8_training fp8_recipe_name fake_quant_after_n_steps memory_efficient_fsdp_wrap keep_last_n_checkpoints "
    "context_parallel_rotate_method num_workers ac_mode teacher_checkpointer kd_ratio dataset_weights "
    "parallelize_plan pipeline trainer inference reward_fns orchestration model_type safe_serialization kd_loss "
    "batch_size_validation log_gradient_norm cmd chat_template project tokens_per_step",
    r"(save|log|eval|val|profiler|checkpoint)_\w+",
)
