"""The keys of TrainingArguments. Source: transformers 5.24 (training_args.py)."""

from __future__ import annotations

from typing import Any

from memcalc.run_configs import option_names as our
from memcalc.run_configs.keys import Key, anything, count, flag, harmless, mapping, names, number, table, text

ROWS = (
    Key(
        "per_device_train_batch_size",
        count,
        8,
        our.BATCH,
        "sequences per GPU and forward pass",
        other=("per_gpu_train_batch_size", "train_batch_size"),
    ),
    Key("gradient_accumulation_steps", count, 1, our.GRAD_ACCUM, "micro-batches per optimizer step"),
    Key("bf16", flag, False, our.AUTOCAST, "autocast over whatever dtype the weights have"),
    Key("fp16", flag, False, our.AUTOCAST, "autocast over whatever dtype the weights have"),
    Key(
        "activation_checkpointing",
        flag,
        False,
        our.CHECKPOINTING,
        "recompute blocks in backward",
        "5.20",
        ("gradient_checkpointing",),
    ),
    Key(
        "activation_checkpointing_kwargs", mapping, {}, our.REENTRANT, "how", "5.20", ("gradient_checkpointing_kwargs",)
    ),
    Key("optim", text, "adamw_torch_fused", our.OPTIMIZER, "the optimizer", "5 (adamw_torch before torch 2.8)"),
    Key("optim_args", anything, None, "", "arguments of the optimizer"),
    Key("optim_target_modules", anything, None, "", "modules whose gradients are projected"),
    Key("use_liger_kernel", flag, False, our.KERNELS, "Liger's kernels and loss", other=("use_liger",)),
    Key("liger_kernel_config", mapping, {}, our.LIGER_KERNELS, "which of Liger's parts are on"),
    Key("label_smoothing_factor", number, 0.0, our.LABEL_SMOOTHING, "label smoothing"),
    Key("fsdp", anything, None, our.PARALLEL, "FSDP; version 2 where fsdp_config has no version", "5"),
    Key("fsdp_config", anything, {}, our.PARALLEL, "FSDP's ways"),
    Key("fsdp_transformer_layer_cls_to_wrap", names, None, "", "the blocks"),
    Key("deepspeed", anything, None, our.PARALLEL, "DeepSpeed's file"),
    Key("parallelism_config", mapping, {}, "", "sizes of the device mesh"),
    Key("ddp_bucket_cap_mb", count, None, our.DDP_BUCKET, "size of DDP's buckets"),
    Key("torch_compile", flag, False, "", "torch.compile"),
    Key("auto_find_batch_size", flag, False, "", "halves the batch until it fits"),
    Key("accelerator_config", mapping, {}, "", "split_batches makes the batch a total"),
    Key("per_device_eval_batch_size", count, 8, "", "batch of evaluation"),
    Key("torch_empty_cache_steps", count, None, "", "returns cached memory every N steps"),
    Key("group_by_length", flag, False, "", "the longest samples meet in one batch"),
    Key("model_init_kwargs", mapping, {}, our.PRECISION, "arguments of from_pretrained"),
)

MODEL = (
    Key(
        "model_name_or_path",
        text,
        None,
        "model",
        "the model",
        other=("model_name", "model_id", "pretrained_model_name_or_path"),
    ),
    Key("dtype", text, None, our.PRECISION, "dtype that weights load in", "4.56", ("torch_dtype",)),
    Key("attn_implementation", text, None, our.ATTENTION, "attention implementation"),
    Key(
        "max_seq_length",
        count,
        None,
        our.SEQ_LEN,
        "cap of a sample",
        other=("model_max_length", "max_length", "block_size", "cutoff_len", "max_seq_len"),
    ),
)

HARMLESS = harmless(
    "output_dir overwrite_output_dir num_train_epochs max_steps learning_rate lr_scheduler_type lr_scheduler_kwargs "
    "warmup_steps warmup_ratio weight_decay adam_beta1 adam_beta2 adam_epsilon average_tokens_across_devices "
    "max_grad_norm bf16_full_eval fp16_full_eval tf32 torch_compile_backend torch_compile_mode use_cache "
    "neftune_noise_alpha log_on_each_node include_num_input_tokens_seen log_level log_level_replica disable_tqdm "
    "report_to run_name project prediction_loss_only include_for_metrics batch_eval_metrics load_best_model_at_end "
    "metric_for_best_model greater_is_better ignore_data_skip restore_callback_states_from_checkpoint full_determinism "
    "seed data_seed use_cpu no_cuda remove_unused_columns label_names train_sampling_strategy length_column_name "
    "ddp_find_unused_parameters ddp_broadcast_buffers ddp_static_graph ddp_backend ddp_timeout debug "
    "skip_memory_metrics do_train do_eval do_predict resume_from_checkpoint local_rank enable_jit_checkpoint "
    "evaluation_strategy past_index fp16_opt_level half_precision_backend fp16_backend jit_mode_eval use_ipex "
    "sharded_ddp xpu_backend tpu_num_cores include_inputs_for_metrics include_tokens_per_second mp_parameters "
    "predict_with_generate generation_max_length generation_num_beams generation_config sortish_sampler "
    "dataset_name dataset_config dataset_config_name dataset_train_split dataset_test_split train_file "
    "validation_file test_file task_name max_train_samples max_eval_samples max_predict_samples overwrite_cache "
    "preprocessing_num_workers cache_dir tokenizer_name tokenizer_name_or_path config_name use_fast_tokenizer "
    "model_revision trust_remote_code token use_auth_token ignore_mismatched_sizes low_cpu_mem_usage "
    "validation_split_percentage keep_linebreaks streaming dataset_text_field dataset_num_proc dataset_id_or_path "
    "eval_dataset_name splits chat_template chat_template_format add_special_tokens append_concat_token "
    "lazy_preprocess data_path "
    "data_path_list version image_folder image_aspect_ratio env launcher logging_dir logging_nan_inf_filter "
    "warmup_type "
    "text_column text_column_name summary_column label_column_name source_prefix eval_data_path padding_side",
    r"(logging|eval|save|hub|push_to_hub|dataloader|dataset|wandb|trackio|mlflow|lr)_\w+",
    r"push_to_hub|mm_\w+|group_by_modality_length|adam_\w+|max_eval_\w+|do_\w+|tpu_\w+|ddp_\w+|private|report\w*",
)


def trainer_table(*more: Key, **absent: Any) -> dict[str, Key]:
    """TrainingArguments with other defaults (`absent`) and further keys, which replace those of the same name."""
    rows = {row.name: row for row in (*ROWS, *MODEL)}
    for name, value in absent.items():
        rows[name] = Key(**{**rows[name].__dict__, "absent": value})
    return {**rows, **table(*more)}


KEYS = trainer_table(
    Key("task_name", text, None, "", "GLUE's task: a sequence classifier"),
    Key("num_labels", count, None, our.NUM_LABELS, "classes"),
    Key("pad_to_max_length", flag, None, "", "pads every sample to the cap"),
    Key("max_source_length", count, 1024, our.SEQ_LEN, "cap of the source"),
    Key("max_target_length", count, 128, "target_len", "cap of the target"),
)
