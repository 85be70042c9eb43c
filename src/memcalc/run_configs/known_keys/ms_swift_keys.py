"""The keys of ms-swift. Source: ms-swift 4.6 (swift/arguments, swift/trainers/arguments.py)."""

from __future__ import annotations

from memcalc.run_configs import option_names as our
from memcalc.run_configs.keys import Key, anything, count, either, flag, harmless, names, number, text, whole
from memcalc.run_configs.known_keys import hf_keys

KEYS = hf_keys.trainer_table(
    Key("model", text, None, "model", "the model", other=("model_id_or_path", "model_type_or_path")),
    Key(
        "tuner_type",
        text,
        "lora",
        our.LORA_RANK,
        "lora, full and others",
        "4 (train_type and sft_type before)",
        ("train_type", "sft_type"),
    ),
    Key("torch_dtype", text, None, our.PRECISION, "dtype that weights load in; the config's own"),
    Key("bf16", flag, None, our.AUTOCAST, "autocast"),
    Key("fp16", flag, None, our.AUTOCAST, "autocast"),
    Key(
        "per_device_train_batch_size", count, 1, our.BATCH, "sequences per GPU and forward pass", other=("batch_size",)
    ),
    Key("gradient_accumulation_steps", count, None, our.GRAD_ACCUM, "ceil(16 / (batch × GPUs)) when absent"),
    Key("max_length", count, None, our.SEQ_LEN, "cap of a sample; the model's maximum when absent"),
    Key("packing", flag, False, our.PACKING, "several samples in a row"),
    Key("packing_length", count, None, our.SEQ_LEN, "length of packed rows; max_length when absent"),
    Key("padding_free", flag, False, our.PACKING, "the batch as one row without padding"),
    Key("gradient_checkpointing", flag, True, our.CHECKPOINTING, "recompute blocks in backward"),
    Key(
        "vit_gradient_checkpointing",
        flag,
        None,
        "",
        "the same of the vision tower; as gradient_checkpointing when absent",
    ),
    Key("gradient_checkpointing_kwargs", anything, {}, our.REENTRANT, "how"),
    Key("lora_rank", count, 8, our.LORA_RANK, "rank of the adapters"),
    Key("lora_alpha", number, 32, "", "scale of the adapters"),
    Key("lora_dropout", number, 0.05, our.LORA_DROPOUT, "dropout in front of the adapters"),
    Key("lora_dtype", text, None, our.LORA_DTYPE, "dtype of the adapters; fp32 when absent"),
    Key("lora_bias", text, "none", our.LORA_BIAS, "biases that are trained"),
    Key(
        "target_modules", names, ["all-linear"], our.LORA_TARGETS, "what gets adapters", other=("lora_target_modules",)
    ),
    Key("target_regex", text, None, our.LORA_TARGETS, "the same as a regular expression"),
    Key("modules_to_save", names, None, our.MODULES_TO_SAVE, "modules trained in full beside the adapters"),
    Key("use_dora", flag, False, our.DORA, "weight-decomposed LoRA"),
    Key("freeze_vit", flag, True, our.FREEZE, "the vision tower is not trained"),
    Key("freeze_aligner", flag, True, our.FREEZE, "the projector is not trained"),
    Key("freeze_llm", flag, False, our.FREEZE, "the language model is not trained"),
    Key("quant_method", text, None, our.QUANTIZATION, "bnb, hqq, eetq, gptq or awq"),
    Key("quant_bits", count, None, our.QUANTIZATION, "bits of the base", other=("quantization_bit",)),
    Key("bnb_4bit_quant_type", text, "nf4", our.QUANTIZATION, "kind of 4 bits"),
    Key("bnb_4bit_use_double_quant", flag, True, our.QUANTIZATION, "double quantization"),
    Key("attn_impl", text, None, our.ATTENTION, "attention implementation"),
    Key(
        "use_logits_to_keep",
        flag,
        None,
        our.LOGITS_TO_KEEP,
        "the head on supervised tokens alone; on where the model takes it",
    ),
    Key("use_galore", flag, False, our.OPTIMIZER, "GaLore"),
    Key("galore_rank", count, 128, our.GALORE_RANK, "rank of the projection"),
    Key("galore_optim_per_parameter", flag, False, "", "an optimizer for each weight"),
    Key("galore_quantization", flag, False, our.OPTIMIZER, "Q-GaLore"),
    Key("lisa_activated_layers", whole, 0, "", "LISA: layers that are trained at a time"),
    Key("optimizer", text, None, our.OPTIMIZER, "an optimizer of a plug-in"),
    Key("rlhf_type", text, "dpo", our.OBJECTIVE, "objective of swift rlhf"),
    Key("beta", number, None, our.REFERENCE, "0 needs no reference in GRPO"),
    Key("num_generations", count, 8, our.NUM_GENERATIONS, "completions of a prompt"),
    Key("max_completion_length", count, 512, our.COMPLETION_LENGTH, "cap of a completion"),
    Key("use_vllm", flag, False, our.UTILIZATION, "vLLM generates"),
    Key("vllm_mode", text, "colocate", our.UTILIZATION, "on the training GPUs, or a server"),
    Key("vllm_gpu_memory_utilization", number, 0.9, our.UTILIZATION, "vLLM's share of the GPU"),
    Key("ref_model", text, None, our.REFERENCE, "a reference of its own"),
    Key("sequence_parallel_size", whole, 1, our.CONTEXT_PARALLEL, "GPUs that share a sequence"),
    Key("deepspeed_autotp_size", whole, 1, our.TENSOR_PARALLEL, "GPUs that share every layer"),
    Key("zero_hpz_partition_size", whole, None, "", "ZeRO++"),
    Key("task_type", text, "causal_lm", our.TASK, "causal_lm, seq_cls, embedding, reranker"),
    Key("num_labels", count, None, our.NUM_LABELS, "classes"),
    Key("freeze_parameters_ratio", number, 0.0, "", "share of the weights that is frozen"),
)
for _name in (
    "dtype",
    "attn_implementation",
    "max_seq_length",
    "model_name_or_path",
    "activation_checkpointing",
    "activation_checkpointing_kwargs",
):
    KEYS.pop(_name)

HARMLESS = either(
    hf_keys.HARMLESS,
    harmless(
        "dataset val_dataset cached_dataset cached_val_dataset split_dataset_ratio load_from_cache_file "
        "interleave_prob "
        "stopping_strategy shuffle_buffer_size download_mode columns strict disable_auto_column_mapping model_name "
        "model_author custom_dataset_info system template truncation_strategy max_pixels agent_template norm_bbox "
        "use_chat_template padding_side loss_scale is_binary_loss_scale template_backend response_prefix model_type "
        "enable_thinking preserve_thinking add_non_thinking_prefix tuner_backend adapters external_plugins "
        "custom_register_path model_kwargs enable_npu_model_patch load_args load_data_args packing_num_proc "
        "packing_strategy lazy_tokenize use_hf ignore_args_error use_swift_lora experts_impl new_special_tokens "
        "problem_type rope_scaling device_map max_memory max_model_len local_repo_path init_strategy add_version "
        "create_checkpoint_symlink max_new_tokens temperature top_k top_p repetition_penalty num_beams stream "
        "stop_words "
        "router_aux_loss_coef enable_dft_loss enable_channel_loss safe_serialization max_shard_size check_model "
        "acc_strategy train_dataloader_shuffle max_epochs aligner_lr vit_lr ds3_gather_for_generation "
        "resume_only_model "
        "loss_type mrl_dims callbacks early_stop_interval extra_eval_args use_flash_ckpt logging_dir lorap_lr_ratio "
        "use_rslora init_weights target_parameters freeze_parameters freeze_parameters_regex trainable_parameters "
        "trainable_parameters_regex ref_adapters rpo_alpha ld_alpha discopop_tau loss_weights cpo_alpha simpo_gamma "
        "desirable_weight undesirable_weight center_rewards_coefficient sft_alpha lmbda seq_kd reward_funcs "
        "reward_weights num_iterations log_completions reward_model reward_adapters teacher_model "
        "offload_teacher_model "
        "epsilon epsilon_high delta scale_rewards importance_sampling_level dynamic_sample max_resample_times "
        "overlong_filter "
        "soft_max_length soft_cache_length sleep_level offload_model offload_optimizer move_model_batches "
        "num_infer_workers "
        "async_generate multi_turn_scheduler max_turns steps_per_generation generation_batch_size group_by_length "
        "label_smoothing "
        "val_dataset_shuffle dataset_shuffle advantage_estimator kl_in_reward gkd_logits_topk teacher_deepspeed "
        "bnb_4bit_compute_dtype bnb_4bit_quant_storage hqq_axis swanlab_token use_ray ENV env custom_template_path "
        "stream_rollout rescale_reward_model",
        r"(vllm|sglang|lmdeploy|galore|lisa|swanlab|lora_ga|fourier|boft|vera|adalora|llamapro|reft|adapter|eval|dataset|cosine|teacher|rollout|server|gc|ref|log|merge|hub)_\w+",
    ),
)
