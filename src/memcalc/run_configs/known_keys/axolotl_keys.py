"""The keys of axolotl's YAML. Source: axolotl 0.18, utils/schemas/*.py and integrations/*/args.py."""

from __future__ import annotations

from typing import Any

from memcalc.run_configs import option_names as our
from memcalc.run_configs.keys import Key, anything, count, flag, harmless, mapping, names, number, table, text, whole


def _plugins(raw: Any) -> list[str]:
    return [str(item) for item in raw] if isinstance(raw, list) else names(raw)


def _listed(raw: Any) -> list[Any]:
    return raw if isinstance(raw, list) else [raw]


KEYS = table(
    Key("base_model", text, None, "model", "the model"),
    Key("model_config_type", text, None, "", "the config's model_type"),
    Key("micro_batch_size", count, 1, our.BATCH, "sequences per GPU and forward pass"),
    Key("batch_size", count, None, our.GRAD_ACCUM, "the product of micro-batch and accumulation", "legacy"),
    Key("gradient_accumulation_steps", count, 1, our.GRAD_ACCUM, "micro-batches per optimizer step"),
    Key("sequence_len", count, 512, our.SEQ_LEN, "cap of a sample; longer ones are dropped"),
    Key("sample_packing", flag, False, our.PACKING, "bins of micro_batch_size × sequence_len"),
    Key("multipack_real_batches", flag, None, our.PACKING, "packed rows stay [B, S]; on by itself without flash"),
    Key("pad_to_sequence_len", flag, None, our.SEQ_LEN, "true: every row to the cap; unset: up to a multiple of 64"),
    Key("pad_to_multiple_of", count, None, our.SEQ_LEN, "rows are padded up to a multiple"),
    Key("pretraining_dataset", anything, None, our.PACKING, "a stream of text"),
    Key("pretraining_sample_concatenation", flag, None, our.PACKING, "the stream is packed"),
    Key("bf16", anything, "auto", our.PRECISION, "weights load in bf16, with autocast (full: without)"),
    Key("fp16", anything, None, our.PRECISION, "fp16 autocast"),
    Key("bfloat16", flag, None, our.PRECISION, "weights in bf16"),
    Key("float16", flag, None, our.PRECISION, "weights in fp16"),
    Key("float32", flag, None, our.PRECISION, "weights in fp32"),
    Key("fp8", flag, False, "", "fp8 linear layers"),
    Key("adapter", text, None, our.LORA_RANK, "lora or qlora; absent: all weights are trained"),
    Key("lora_r", count, None, our.LORA_RANK, "rank of the adapters"),
    Key("lora_alpha", number, None, "", "scale of the adapters"),
    Key("lora_dropout", number, 0.0, our.LORA_DROPOUT, "dropout in front of the adapters"),
    Key("lora_target_linear", flag, None, our.LORA_TARGETS, "every linear layer but the output head"),
    Key("lora_target_modules", names, None, our.LORA_TARGETS, "what gets adapters"),
    Key("lora_target_parameters", anything, None, "", "parameters with adapters"),
    Key("lora_modules_to_save", names, None, our.MODULES_TO_SAVE, "modules trained in full beside the adapters"),
    Key("lora_rank_pattern", anything, None, "", "ranks by module"),
    Key("peft_layers_to_transform", anything, None, "", "layers with adapters"),
    Key("peft_trainable_token_indices", anything, None, "", "rows of the embedding that are trained"),
    Key("peft_use_dora", flag, False, our.DORA, "weight-decomposed LoRA"),
    Key("peft_autocast_adapter_dtype", flag, True, our.LORA_DTYPE, "16-bit adapters become fp32"),
    Key("lora_mlp_kernel", flag, None, "", "fused LoRA of the MLP; on by itself"),
    Key("lora_qkv_kernel", flag, None, "", "fused LoRA of the projections; on by itself"),
    Key("lora_o_kernel", flag, None, "", "fused LoRA of the output projection; on by itself"),
    Key("lora_embedding_kernel", flag, None, "", "fused LoRA of the embedding; on by itself"),
    Key("relora", flag, None, "", "ReLoRA"),
    Key("load_in_4bit", flag, False, our.QUANTIZATION, "4-bit base"),
    Key("load_in_8bit", flag, False, our.QUANTIZATION, "8-bit base"),
    Key("gptq", flag, False, our.QUANTIZATION, "a GPTQ checkpoint"),
    Key("bnb_config_kwargs", mapping, {}, our.QUANTIZATION, "overrides of the 4-bit config"),
    Key("model_quantization_config", anything, None, "", "another quantization of the checkpoint"),
    Key("model_quantization_config_kwargs", mapping, {}, "", "its arguments"),
    Key("gradient_checkpointing", anything, False, our.CHECKPOINTING, "recompute blocks in backward"),
    Key("gradient_checkpointing_kwargs", mapping, {}, our.REENTRANT, "how"),
    Key("activation_offloading", anything, False, our.ACTIVATION_OFFLOADING, "checkpointed inputs in host memory"),
    Key("selective_checkpointing", anything, None, "", "checkpointing by operation"),
    Key("layer_offloading", anything, None, "", "layers in host memory"),
    Key("tiled_mlp", flag, None, "", "the MLP in pieces of the sequence"),
    Key("qat", anything, None, "", "quantization-aware training"),
    Key("optimizer", text, "adamw_torch_fused", our.OPTIMIZER, "the optimizer"),
    Key("optim_args", anything, None, our.GALORE_RANK, "arguments of the optimizer"),
    Key("attn_implementation", text, None, our.ATTENTION, "attention implementation"),
    Key("flash_attention", anything, None, our.ATTENTION, "flash attention", "legacy"),
    Key("sdp_attention", flag, None, our.ATTENTION, "PyTorch's attention", "legacy"),
    Key("xformers_attention", flag, None, our.ATTENTION, "xformers", "legacy"),
    Key("flex_attention", flag, None, our.ATTENTION, "flex attention", "legacy"),
    Key("eager_attention", flag, None, our.ATTENTION, "eager attention", "legacy"),
    Key("sage_attention", flag, None, our.ATTENTION, "sage attention", "legacy"),
    Key("plugins", _plugins, (), our.LOSS, "integrations; Liger and cut cross-entropy are such"),
    Key("cut_cross_entropy", flag, None, our.LOSS, "on by its plugin's presence"),
    Key("liger_rope", flag, False, our.KERNELS, "fused rotary embedding"),
    Key("liger_rms_norm", flag, False, our.KERNELS, "fused norms"),
    Key("liger_layer_norm", flag, False, our.KERNELS, "fused layer norms"),
    Key("liger_glu_activation", flag, False, our.KERNELS, "fused SwiGLU"),
    Key("liger_swiglu", flag, False, our.KERNELS, "fused SwiGLU", "legacy"),
    Key("liger_cross_entropy", flag, False, our.LOSS, "fused loss on full logits"),
    Key("liger_fused_linear_cross_entropy", flag, False, our.LOSS, "fused head and loss"),
    Key("chunked_cross_entropy", flag, None, our.LOSS, "loss in chunks of the logits"),
    Key("chunked_cross_entropy_num_chunks", whole, None, our.LOSS_CHUNKS, "how many"),
    Key("unfrozen_parameters", _listed, None, our.TRAIN_ONLY, "regular expressions of what is trained"),
    Key("freeze_mm_modules", flag, None, our.FREEZE, "vision and projector are not trained"),
    Key("rl", text, None, our.OBJECTIVE, "a preference or policy objective"),
    Key("trl", mapping, {}, our.OBJECTIVE, "its arguments"),
    Key("reward_model", flag, None, our.OBJECTIVE, "a reward model is trained"),
    Key("process_reward_model", flag, None, our.OBJECTIVE, "a reward model of steps"),
    Key("num_labels", count, None, our.NUM_LABELS, "classes"),
    Key("precompute_ref_log_probs", flag, None, our.REFERENCE, "the reference runs before training"),
    Key("deepspeed", anything, None, our.PARALLEL, "DeepSpeed's file"),
    Key("fsdp", anything, None, our.PARALLEL, "FSDP's old list of words"),
    Key("fsdp_config", mapping, {}, our.PARALLEL, "FSDP's ways"),
    Key("fsdp_version", whole, None, our.PARALLEL, "1 unless it says 2"),
    Key("parallelism_config", mapping, {}, "", "sizes of the device mesh"),
    Key("dp_shard_size", whole, None, our.DATA_PARALLEL, "GPUs that share one copy"),
    Key("dp_replicate_size", whole, None, our.REPLICAS, "copies of the sharded model"),
    Key("tensor_parallel_size", whole, None, our.TENSOR_PARALLEL, "GPUs that share every layer"),
    Key(
        "context_parallel_size",
        whole,
        None,
        our.CONTEXT_PARALLEL,
        "GPUs that share a sequence",
        other=("sequence_parallel_degree",),
    ),
    Key("expert_parallel_size", whole, None, our.EXPERT_PARALLEL, "GPUs that share the experts"),
    Key("ddp_bucket_cap_mb", whole, None, our.DDP_BUCKET, "size of DDP's buckets"),
    Key("tokens", _listed, None, "", "added tokens"),
    Key("torch_compile", anything, None, "", "torch.compile"),
    Key("trust_remote_code", flag, None, "", "turns the LoRA kernels off"),
    Key("eval_batch_size", whole, None, "", "batch of evaluation"),
    Key("eval_sample_packing", flag, None, "", "evaluation packs too"),
    Key("sample_packing_eff_est", number, None, "", "an estimate of how full bins are"),
    Key("excess_length_strategy", text, None, "", "what becomes of longer samples"),
)

HARMLESS = harmless(
    "strict resume_from_checkpoint auto_resume_from_checkpoints resize_token_embeddings_to_32x trainer_cls datasets "
    "mean_resizing_embeddings shrink_embeddings embeddings_skip_upcast reinit_weights vllm quantization test_datasets "
    "dynamic_checkpoint center_rewards_coefficient dpo_use_weighting dpo_label_smoothing dpo_loss_type dpo_beta "
    "shuffle_merged_datasets push_dataset_to_hub hf_use_auth_token device device_map world_size local_rank ddp seed "
    "do_causal_lm_eval eval_causal_lm_metrics do_bench_eval bench_dataset metric_for_best_model greater_is_better "
    "gc_steps "
    "tf32 gradient_clipping eval_sequence_len min_sample_len max_prompt_len curriculum_sampling batch_flattening "
    "streaming special_tokens added_tokens_overrides max_steps warmup_steps warmup_ratio early_stopping_patience "
    "load_best_model_at_end use_tensorboard neftune_noise_alpha orpo_alpha simpo_gamma cpo_alpha max_memory "
    "gpu_memory_limit low_cpu_mem_usage chat_template chat_template_jinja chat_template_kwargs eot_tokens "
    "default_system_message fix_untrained_tokens is_preprocess preprocess_iterable axolotl_config_path output_dir "
    "train_on_inputs group_by_length learning_rate embedding_lr weight_decay lr_scheduler lr_scheduler_kwargs "
    "optim_target_modules torchdistx_path max_grad_norm num_epochs model_type tokenizer_type model_config "
    "base_model_config base_model_ignore_patterns overrides_of_model_config overrides_of_model_kwargs type_of_model "
    "revision_of_model cls_model_config experimental_skip_move_to_device use_kernels use_onebitllms debug "
    "dataset_prepared_path rl_beta xpu remove_unused_columns accelerator_config use_ray lora_model_dir "
    "lora_fan_in_fan_out lora_on_cpu lora_alpha_pattern loraplus_lr_ratio loraplus_lr_embedding merge_lora "
    "peft peft_use_rslora peft_init_lora_weights peft_layers_pattern peft_ensure_weight_tying "
    "qlora_sharded_model_loading "
    "local_rank evaluation_strategy eval_table_size eval_max_new_tokens heads_k_stride ring_attn_func deepcompile "
    "s2_attention flash_attn_cross_entropy flash_attn_rms_norm flash_attn_fuse_mlp flash_optimum noisy_embedding_alpha "
    "ddp_timeout gemma4_hybrid_attn_impl image_size image_resize_algorithm val_set_size processor_type "
    "processor_kwargs "
    "tokenizer_config tokenizer_use_fast tokenizer_legacy tokenizer_use_mistral_common skip_prepare_dataset "
    "dataset_processes lora_alpha sample_packing_group_size sample_packing_bin_size dataloader_prefetch_factor "
    "save_safetensors hub_model_id is_falcon_derived_model is_llama_derived_model is_mistral_derived_model "
    "is_qwen_derived_model total_num_tokens total_supervised_tokens rope_scaling role_boundaries "
    "llama4_linearized_experts",
    r"(dataset|dataloader|wandb|mlflow|comet|trackio|swanlab|use|hub|ray|gradio|otel|save|saves|eval|evals|logging|adam|lr"
    r"|loss_watchdog|kto|ddp|profiler|include|generation|generate|num_generation|torch_compile|kd|dion|qgalore|shuffle"
    r"|tokenizer|processor|streaming|pose|pretrain|sample_packing|scaling|cosine|jagged|relora|bench|lisa|dpo|spectrum"
    r"|lm_eval|hf|ebft|nemo|fp8|fp32|tiled_mlp|expert_parallel|num_dataset|grokfast|hatchery|llmcompressor|moe|diffusion)_\w+",
    r"mlflow\w*|experimental_\w+|use_\w+|push_\w+|pretraining_\w+|flash_attn_\w+|flex_attn_\w+|quantize_\w+",
)
