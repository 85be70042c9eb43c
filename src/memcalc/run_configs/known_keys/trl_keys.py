"""The keys of TRL, and which releases have them. Source: TRL 1.16 (trainer/*_config.py) and its tags from 0.9 on."""

from __future__ import annotations

from typing import Any

from memcalc.run_configs import option_names as our
from memcalc.run_configs.keys import Key, anything, count, either, flag, harmless, names, number, text
from memcalc.run_configs.known_keys import hf_keys

NEWEST = (1, 16)

LAST_RELEASE = {
    "use_liger": (0, 15),
    "dataset_prompt_column": (0, 18),
    "max_seq_length": (0, 19),
    "torch_dtype": (0, 22),
    "max_prompt_length": (0, 27),
}
"""Keys that a release after this one no longer has; dataset_prompt_column is open-r1's, which pins TRL 0.18."""

SINCE = {"bf16": (0, 19), "gradient_checkpointing": (0, 22), "chunked_nll": (1, 7), "bfd": (0, 18), "beta 0": (0, 19)}
"""Releases from which on TRL turns something on by itself (beta 0: GRPO without a reference)."""

ROWS = (
    Key(
        "use_peft",
        flag,
        False,
        our.LORA_RANK,
        "train adapters; without it every lora_ key is dead",
        other=("use_peft_lora",),
    ),
    Key("lora_r", count, 16, our.LORA_RANK, "rank of the adapters"),
    Key("lora_alpha", number, 32, "", "scale of the adapters"),
    Key("lora_dropout", number, 0.05, our.LORA_DROPOUT, "dropout in front of the adapters"),
    Key("lora_target_modules", names, None, our.LORA_TARGETS, "what gets adapters; PEFT's default of the family"),
    Key("lora_target_parameters", names, None, "", "parameters with adapters"),
    Key("lora_modules_to_save", names, None, our.MODULES_TO_SAVE, "modules trained in full beside the adapters"),
    Key("lora_task_type", text, "CAUSAL_LM", "", "SEQ_CLS for a reward model"),
    Key("use_dora", flag, False, our.DORA, "weight-decomposed LoRA"),
    Key(
        "load_in_4bit",
        flag,
        False,
        our.QUANTIZATION,
        "4-bit base",
        other=("use_4bit_quantization", "use_4bit_qunatization"),
    ),
    Key(
        "load_in_8bit",
        flag,
        False,
        our.QUANTIZATION,
        "8-bit base",
        other=("use_8bit_quantization", "use_8bit_qunatization"),
    ),
    Key("bnb_4bit_quant_type", text, "nf4", our.QUANTIZATION, "kind of 4 bits"),
    Key("use_bnb_nested_quant", flag, False, our.QUANTIZATION, "double quantization", other=("use_nested_quant",)),
    Key("bnb_4bit_compute_dtype", text, None, "", "dtype that 4-bit weights compute in"),
    Key(
        "bnb_4bit_quant_storage",
        text,
        None,
        "",
        "dtype that 4-bit weights are stored in",
        other=("bnb_4bit_quant_storage_dtype",),
    ),
    Key("use_flash_attn", flag, False, our.ATTENTION, "flash attention", "PEFT's example script"),
    Key("use_reentrant", flag, None, our.REENTRANT, "kind of checkpointing", "PEFT's example script"),
    Key("max_seq_length", count, 1024, our.SEQ_LEN, "cap of a sample", "0.15 to 0.19", ("max_length",)),
    Key("packing", flag, False, our.PACKING, "several samples in a row"),
    Key("packing_strategy", text, "bfd", our.PACKING, "bfd makes one flattened row, wrapped keeps [B, S]", "0.18"),
    Key("padding_free", flag, False, our.PACKING, "the batch as one row without padding"),
    Key("pad_to_multiple_of", count, 1, our.SEQ_LEN, "rows are padded up to a multiple"),
    Key("loss_type", anything, None, our.LOSS, "the loss"),
    Key("activation_offloading", flag, False, our.ACTIVATION_OFFLOADING, "saved tensors in host memory"),
    Key("precompute_ref_log_probs", flag, False, our.REFERENCE, "the reference runs once, before training"),
    Key("max_prompt_length", count, None, our.SEQ_LEN, "cap of the prompt", "to 0.27"),
    Key(
        "max_completion_length",
        count,
        None,
        our.COMPLETION_LENGTH,
        "cap of a completion",
        other=("max_new_tokens", "response_length"),
    ),
    Key("num_generations", count, 8, our.NUM_GENERATIONS, "completions of a prompt; the batch counts completions"),
    Key("generation_batch_size", count, None, "", "completions kept between steps"),
    Key("steps_per_generation", count, None, "", "micro-batches of one generation"),
    Key("beta", number, None, our.REFERENCE, "0 needs no reference in GRPO and RLOO"),
    Key("ref_model", text, None, our.REFERENCE, "a reference of its own"),
    Key("use_vllm", flag, False, our.UTILIZATION, "vLLM generates"),
    Key("vllm_mode", text, None, our.UTILIZATION, "colocate: on the training GPUs; server: elsewhere"),
    Key("vllm_gpu_memory_utilization", number, 0.3, our.UTILIZATION, "vLLM's share of the GPU"),
    Key("vllm_enable_sleep_mode", flag, False, "", "vLLM leaves the GPU while training"),
)

HARMLESS = either(
    hf_keys.HARMLESS,
    harmless(
        "truncation_mode completion_only_loss assistant_only_loss eval_packing eos_token pad_token shuffle_dataset "
        "chat_template_path chat_template_kwargs router_aux_loss_coef disable_dropout loss_weights ld_alpha "
        "label_smoothing "
        "f_divergence_type f_alpha_divergence_coef use_weighting discopop_tau sync_ref_model ref_model_mixup_alpha "
        "ref_model_sync_steps precompute_ref_batch_size temperature top_p top_k min_p generation_kwargs seed_sampling "
        "repetition_penalty cache_implementation ds3_gather_for_generation num_generations_eval cast_lm_head_to_fp32 "
        "num_iterations epsilon delta epsilon_high importance_sampling_level reward_weights "
        "multi_objective_aggregation "
        "scale_rewards mask_truncated_completions top_entropy_quantile max_tool_calling_iterations reward_funcs "
        "off_policy_mask_threshold use_bias_correction_kl log_completions num_completions_to_print log_unique_prompts "
        "use_transformers_paged normalize_advantages reward_clip_range desirable_weight undesirable_weight "
        "center_rewards_coefficient use_rslora lora_bias ignore_bias_buffers reward_model_name_or_path "
        "dataset_mixture system_prompt simpo_gamma cpo_alpha rpo_alpha num_ppo_epochs num_mini_batches kl_coef "
        "missing_eos_penalty local_rollout_forward_batch_size total_episodes sft_model_path reward_model_path "
        "dataset_prompt_column code_language cosine_min_value_wrong cosine_max_value_wrong benchmarks callbacks "
        "dataset_skip_prepare parallel_code_exec_per_proc teacher_model_name_or_path lmbda seq_kd num_train_samples "
        "num_test_samples overwrite_hub_revision",
        r"(vllm|entropy|sapo|vespo|cosine|repetition|ref_adapter|model_adapter|wandb|code|e2b|morph|log|max_completion_len|format)_\w+|use_adaptive_entropy|filter_\w+|is_\w+",
    ),
)


def is_trl(values: dict[str, Any]) -> bool:
    """Whether keys are TRL's and not TrainingArguments' alone."""
    named = {"model_name_or_path", "dataset_name"} <= values.keys() and not _OF_SCRIPTS & values.keys()
    return named or bool(values.keys() & _MARKS) or any(name.startswith("lora_") for name in values)


_GENERIC = {"max_seq_length", "dtype", "max_new_tokens", "use_reentrant", "ref_model", "pad_to_multiple_of", "use_vllm"}
_MARKS = {row.name for row in ROWS} - _GENERIC | {
    "max_length",
    "dataset_mixture",
    "use_peft_lora",
    "use_4bit_quantization",
    "use_nested_quant",
}
_OF_SCRIPTS = {"do_train", "task_name", "block_size", "max_source_length", "train_file"}
"""Keys of Transformers' example scripts, which name a dataset as TRL does."""
