"""The keys of LLaMA-Factory. Source: LLaMA-Factory 0.9.6, hparams/*.py."""

from __future__ import annotations

from memcalc.run_configs import option_names as our
from memcalc.run_configs.keys import Key, count, either, flag, harmless, names, number, text, whole
from memcalc.run_configs.known_keys import hf_keys

KEYS = hf_keys.trainer_table(
    Key("model_name_or_path", text, None, "model", "the model"),
    Key("stage", text, "sft", our.OBJECTIVE, "pt, sft, rm, ppo, dpo or kto"),
    Key("finetuning_type", text, "lora", our.LORA_RANK, "lora, full, freeze or oft"),
    Key("cutoff_len", count, 2048, our.SEQ_LEN, "longest sample"),
    Key("packing", flag, None, our.PACKING, "on by itself in stage pt alone"),
    Key("neat_packing", flag, False, our.PACKING, "packed rows with a block-wise mask"),
    Key("pure_bf16", flag, False, our.PRECISION, "bf16 weights and states, no autocast"),
    Key("lora_rank", count, 8, our.LORA_RANK, "rank of the adapters"),
    Key("lora_alpha", number, None, "", "scale of the adapters; twice the rank"),
    Key("lora_dropout", number, 0.0, our.LORA_DROPOUT, "dropout in front of the adapters"),
    Key("lora_target", names, ["all"], our.LORA_TARGETS, "all: every linear layer but the output head"),
    Key("additional_target", names, None, our.MODULES_TO_SAVE, "modules trained in full beside the adapters"),
    Key("use_dora", flag, False, our.DORA, "weight-decomposed LoRA"),
    Key("quantization_bit", count, None, our.QUANTIZATION, "bits of the base"),
    Key("quantization_method", text, "bnb", our.QUANTIZATION, "bnb, hqq or eetq"),
    Key("quantization_type", text, "nf4", our.QUANTIZATION, "kind of 4 bits"),
    Key("double_quantization", flag, True, our.QUANTIZATION, "double quantization"),
    Key("flash_attn", text, "auto", our.ATTENTION, "auto, disabled, sdpa, fa2 or fa3"),
    Key("disable_gradient_checkpointing", flag, False, our.CHECKPOINTING, "checkpointing is on by itself"),
    Key("use_reentrant_gc", flag, True, our.REENTRANT, "kind of checkpointing"),
    Key("use_unsloth_gc", flag, False, our.ACTIVATION_OFFLOADING, "checkpointed inputs in host memory"),
    Key("enable_liger_kernel", flag, False, our.KERNELS, "Liger's kernels; its loss in pt and sft alone"),
    Key("upcast_layernorm", flag, False, "", "norms in fp32"),
    Key("upcast_lmhead_output", flag, False, "", "logits in fp32"),
    Key("use_galore", flag, False, our.OPTIMIZER, "GaLore"),
    Key("galore_rank", count, 16, our.GALORE_RANK, "rank of the projection"),
    Key("galore_layerwise", flag, False, our.OPTIMIZER_IN_BACKWARD, "steps in backward"),
    Key("galore_target", names, ["all"], "", "modules whose gradients are projected"),
    Key("use_apollo", flag, False, our.OPTIMIZER, "APOLLO"),
    Key("apollo_rank", count, 16, our.GALORE_RANK, "rank of the projection"),
    Key("use_badam", flag, False, our.OPTIMIZER, "BAdam: one block trained at a time"),
    Key("badam_mode", text, "layer", "", "layer or ratio"),
    Key("use_adam_mini", flag, False, our.OPTIMIZER, "Adam-mini"),
    Key("use_muon", flag, False, our.OPTIMIZER, "Muon"),
    Key("freeze_trainable_layers", whole, 2, our.TRAIN_ONLY, "the last N layers; negative: the first"),
    Key("freeze_trainable_modules", names, ["all"], our.TRAIN_ONLY, "modules of those layers"),
    Key("use_llama_pro", flag, False, our.TRAIN_ONLY, "expanded blocks alone"),
    Key("freeze_vision_tower", flag, True, our.FREEZE, "the vision tower is not trained"),
    Key("freeze_multi_modal_projector", flag, True, our.FREEZE, "the projector is not trained"),
    Key("freeze_language_model", flag, False, our.FREEZE, "the language model is not trained"),
    Key("image_max_pixels", count, 589824, our.IMAGE_SIZE, "largest image"),
    Key("pref_loss", text, "sigmoid", our.OBJECTIVE, "sigmoid is DPO; orpo and simpo have no reference"),
    Key("ref_model", text, None, our.REFERENCE, "a reference of its own"),
    Key("use_unsloth", flag, False, "", "Unsloth"),
    Key("shift_attn", flag, False, "", "shifted sparse attention"),
    Key("mixture_of_depths", text, None, "", "mixture of depths"),
    Key("use_kt", flag, False, "", "KTransformers"),
    Key("fp8", flag, False, "", "fp8 linear layers"),
    Key("use_mca", flag, False, "", "Megatron-Core adapter"),
    Key("use_megatron_bridge", flag, False, "", "Megatron Bridge"),
)
for _name in (
    "dtype",
    "attn_implementation",
    "max_seq_length",
    "use_liger_kernel",
    "model_init_kwargs",
    "activation_checkpointing",
    "activation_checkpointing_kwargs",
):
    KEYS.pop(_name)

HARMLESS = either(
    hf_keys.HARMLESS,
    harmless(
        "template dataset eval_dataset dataset_dir media_dir train_on_prompt mask_history buffer_size mix_strategy "
        "interleave_probs preprocessing_batch_size max_samples eval_num_beams ignore_pad_token_for_loss val_size "
        "tool_format default_system enable_thinking preserve_thinking tokenized_path data_shared_file_system "
        "adapter_name_or_path adapter_folder resize_vocab split_special_tokens add_tokens new_special_tokens_config "
        "init_special_tokens rope_scaling moe_aux_loss_coef train_from_scratch infer_backend offload_folder "
        "use_kv_cache "
        "use_v1_kernels infer_dtype hf_hub_token ms_hub_token om_hub_token print_param_status quantization_device_map "
        "image_min_pixels image_do_pan_and_scan crop_to_patches video_max_pixels video_min_pixels video_fps "
        "video_maxlen "
        "use_audio_in_video audio_sampling_rate compute_dtype device_map model_max_length block_diag_attn "
        "loraplus_lr_ratio loraplus_lr_embedding use_rslora pissa_init pissa_iter pissa_convert create_new_adapter "
        "pref_beta pref_ftx pref_bco_weight dpo_label_smoothing kto_chosen_weight kto_rejected_weight simpo_gamma "
        "ref_model_adapters ref_model_quantization_bit reward_model reward_model_adapters "
        "reward_model_quantization_bit "
        "reward_model_type ld_alpha use_dft_loss use_asft_loss asft_alpha use_eaft_loss eaft_alpha compute_accuracy "
        "disable_shuffling early_stopping_steps plot_loss include_effective_tokens_per_second do_sample temperature "
        "top_p top_k num_beams max_length max_new_tokens repetition_penalty length_penalty skip_special_tokens "
        "freeze_extra_modules badam_start_block module_dropout master_addr master_port ray_num_workers "
        "megatron_bridge_args "
        "use_hyper_parallel hyper_parallel_args lang n_shot task task_dir save_dir download_mode batch_size "
        "profile_modules",
        r"(ppo|galore|apollo|badam|swanlab|use_swanlab|kt|sglang|export|fp8|profiler|oft|use_kt|hyper_parallel|enable_torch)_\w+|use_swanlab|vllm_\w+|enable_torch_profiler",
    ),
)
