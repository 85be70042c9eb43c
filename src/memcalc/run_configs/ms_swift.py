"""ms-swift's command lines, YAML and JSON. Source: ms-swift 4.6 (swift/arguments, swift/trainers/arguments.py)."""

from __future__ import annotations

import math
from typing import Any

from memcalc.run_configs import hf_trainer, training
from memcalc.run_configs import option_names as our
from memcalc.run_configs.context import Context
from memcalc.run_configs.keys import Key, Keys, anything, count, either, flag, harmless, names, number, text, whole
from memcalc.run_configs.mapping import Given
from memcalc.run_configs.sharding import Sharding

KEYS = hf_trainer.trainer_table(
    Key("model", text, None, "model", "the model", other=("model_id_or_path", "model_type_or_path")),
    Key("tuner_type", text, "lora", our.LORA_RANK, "lora, full and others", "4 (train_type and sft_type before)", ("train_type", "sft_type")),
    Key("torch_dtype", text, None, our.PRECISION, "dtype that weights load in; the config's own"),
    Key("bf16", flag, None, our.AUTOCAST, "autocast"),
    Key("fp16", flag, None, our.AUTOCAST, "autocast"),
    Key("per_device_train_batch_size", count, 1, our.BATCH, "sequences per GPU and forward pass", other=("batch_size",)),
    Key("gradient_accumulation_steps", count, None, our.GRAD_ACCUM, "ceil(16 / (batch × GPUs)) when absent"),
    Key("max_length", count, None, our.SEQ_LEN, "cap of a sample; the model's maximum when absent"),
    Key("packing", flag, False, our.PACKING, "several samples in a row"),
    Key("packing_length", count, None, our.SEQ_LEN, "length of packed rows; max_length when absent"),
    Key("padding_free", flag, False, our.PACKING, "the batch as one row without padding"),
    Key("gradient_checkpointing", flag, True, our.CHECKPOINTING, "recompute blocks in backward"),
    Key("vit_gradient_checkpointing", flag, None, "", "the same of the vision tower; as gradient_checkpointing when absent"),
    Key("gradient_checkpointing_kwargs", anything, {}, our.REENTRANT, "how"),
    Key("lora_rank", count, 8, our.LORA_RANK, "rank of the adapters"),
    Key("lora_alpha", number, 32, "", "scale of the adapters"),
    Key("lora_dropout", number, 0.05, our.LORA_DROPOUT, "dropout in front of the adapters"),
    Key("lora_dtype", text, None, our.LORA_DTYPE, "dtype of the adapters; fp32 when absent"),
    Key("lora_bias", text, "none", our.LORA_BIAS, "biases that are trained"),
    Key("target_modules", names, ["all-linear"], our.LORA_TARGETS, "what gets adapters", other=("lora_target_modules",)),
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
    Key("use_logits_to_keep", flag, None, our.LOGITS_TO_KEEP, "the head on supervised tokens alone; on where the model takes it"),
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
)  # fmt: skip
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
    hf_trainer.HARMLESS,
    harmless(
        "dataset val_dataset cached_dataset cached_val_dataset split_dataset_ratio load_from_cache_file interleave_prob "
        "stopping_strategy shuffle_buffer_size download_mode columns strict disable_auto_column_mapping model_name "
        "model_author custom_dataset_info system template truncation_strategy max_pixels agent_template norm_bbox "
        "use_chat_template padding_side loss_scale is_binary_loss_scale template_backend response_prefix model_type "
        "enable_thinking preserve_thinking add_non_thinking_prefix tuner_backend adapters external_plugins "
        "custom_register_path model_kwargs enable_npu_model_patch load_args load_data_args packing_num_proc "
        "packing_strategy lazy_tokenize use_hf ignore_args_error use_swift_lora experts_impl new_special_tokens "
        "problem_type rope_scaling device_map max_memory max_model_len local_repo_path init_strategy add_version "
        "create_checkpoint_symlink max_new_tokens temperature top_k top_p repetition_penalty num_beams stream stop_words "
        "router_aux_loss_coef enable_dft_loss enable_channel_loss safe_serialization max_shard_size check_model "
        "acc_strategy train_dataloader_shuffle max_epochs aligner_lr vit_lr ds3_gather_for_generation resume_only_model "
        "loss_type mrl_dims callbacks early_stop_interval extra_eval_args use_flash_ckpt logging_dir lorap_lr_ratio "
        "use_rslora init_weights target_parameters freeze_parameters freeze_parameters_regex trainable_parameters "
        "trainable_parameters_regex ref_adapters rpo_alpha ld_alpha discopop_tau loss_weights cpo_alpha simpo_gamma "
        "desirable_weight undesirable_weight center_rewards_coefficient sft_alpha lmbda seq_kd reward_funcs "
        "reward_weights num_iterations log_completions reward_model reward_adapters teacher_model offload_teacher_model "
        "epsilon epsilon_high delta scale_rewards importance_sampling_level dynamic_sample max_resample_times overlong_filter "
        "soft_max_length soft_cache_length sleep_level offload_model offload_optimizer move_model_batches num_infer_workers "
        "async_generate multi_turn_scheduler max_turns steps_per_generation generation_batch_size group_by_length label_smoothing "
        "val_dataset_shuffle dataset_shuffle advantage_estimator kl_in_reward gkd_logits_topk teacher_deepspeed bnb_4bit_compute_dtype bnb_4bit_quant_storage hqq_axis swanlab_token use_ray ENV env custom_template_path stream_rollout rescale_reward_model",
        r"(vllm|sglang|lmdeploy|galore|lisa|swanlab|lora_ga|fourier|boft|vera|adalora|llamapro|reft|adapter|eval|dataset|cosine|teacher|rollout|server|gc|ref|log|merge|hub)_\w+",
    ),
)

_SAME = {"full": "full", "lora": "lora"}


def is_swift(values: dict[str, Any]) -> bool:
    """Whether a mapping is an ms-swift file."""
    return "model" in values and bool(
        {"tuner_type", "train_type", "sft_type", "rlhf_type", "attn_impl"} & values.keys()
    )


def read(context: Context) -> None:
    """An ms-swift run. Raises UsageError."""
    out = context.out
    for block in ("ENV", "env"):
        if isinstance(context.values.get(block), dict):
            context.environment.update({str(k): str(v) for k, v in context.values[block].items()})
    keys = Keys(KEYS, context.values, context.where, out, HARMLESS)
    out.model = keys.value("model")
    tuner = keys.get("tuner_type")
    lora = str(tuner.value).lower() == "lora"
    if str(tuner.value).lower() not in _SAME:
        out.lack(f"{tuner.key}: {tuner.shown} is not modelled: taken as LoRA of its rank")
        lora = True
    objective = _objective(context, keys)
    _world(context)
    found = _sharding(context, keys)
    quantized = _quantization(keys)
    _precision(keys, found, lora, quantized)
    if lora:
        targets = keys.get("target_regex") if keys.has("target_regex") else keys.get("target_modules")
        training.lora(
            out,
            keys.get("lora_rank"),
            targets,
            keys.get("lora_dropout"),
            saved=keys.get("modules_to_save"),
            dora=keys.get("use_dora"),
            bias=keys.get("lora_bias"),
        )
    attention = training.attention(out, keys.get("attn_impl"))
    _lengths(keys, objective, attention)
    accumulation = _accumulation(keys, found)
    _optimizer(keys, found, accumulation)
    _checkpointing(keys, found)
    _head(keys, objective)
    _frozen(keys, lora)
    beta = keys.get("beta")
    free = objective == "grpo" and beta.value == 0
    training.reference(out, objective, lora=lora and not keys.has("ref_model"), none=free)
    hf_trainer.rest(keys)
    if keys.value("lisa_activated_layers"):
        out.lack("LISA is not modelled: the estimate is of all layers trained")
    out.take(our.TRAINER, "hf", Given("trainer", "ms-swift", "hf", True))
    keys.finish(
        {}
        if lora
        else {
            name: f"{tuner.key} is {tuner.shown}"
            for name in context.values
            if name.startswith("lora_") or name == "target_modules"
        }
    )
    context.finish(found)


def _objective(context: Context, keys: Keys) -> str:
    kind = keys.get("rlhf_type")
    objective = "sft"
    if context.command == "rlhf" or keys.has("rlhf_type"):
        objective = {"rm": "reward", "gkd": "gkd"}.get(str(kind.value).lower(), str(kind.value).lower())
    keys.out.take(
        our.OBJECTIVE,
        objective,
        kind if objective != "sft" else Given("command", context.command or "sft", "sft", True),
    )
    task = keys.get("task_type")
    if str(task.value) == "seq_cls":
        keys.out.take(our.TASK, "sequence-classification", task)
        keys.out.take(our.NUM_LABELS, keys.value("num_labels") or 2, keys.get("num_labels"))
    elif str(task.value) != "causal_lm":
        keys.out.lack(f"task_type: {task.shown} is not modelled: the estimate is of a language model")
    return objective


def _world(context: Context) -> None:
    processes, visible = context.environment.get("NPROC_PER_NODE"), context.environment.get("CUDA_VISIBLE_DEVICES")
    nodes = context.environment.get("NNODES", "1")
    if processes is not None and processes.isdigit():
        context.world = int(processes) * (int(nodes) if nodes.isdigit() else 1)
        context.world_from = "NPROC_PER_NODE"
    elif visible is not None and processes is None and context.world is None:
        devices = [part for part in visible.split(",") if part.strip()]
        if len(devices) == 1:
            context.world, context.world_from = None, ""


def _sharding(context: Context, keys: Keys) -> Sharding:
    fsdp = keys.get("fsdp")
    if fsdp.value == "fsdp2":
        keys.values["fsdp_config"] = {
            "fsdp_version": 2,
            "reshard_after_forward": True,
            "activation_checkpointing": True,
        }
    found = hf_trainer.sharding(context, keys, "msswift")
    for name, option in (
        ("sequence_parallel_size", our.CONTEXT_PARALLEL),
        ("deepspeed_autotp_size", our.TENSOR_PARALLEL),
    ):
        given = keys.get(name)
        if given.value and given.value > 1:
            found.sizes[option] = given.value
    return found


def _quantization(keys: Keys) -> bool:
    bits, method = keys.get("quant_bits"), keys.get("quant_method")
    if bits.value is None and method.value in (None, "gptq", "awq"):
        if method.value is not None:
            training.quantization(keys.out, method, f"{method.value}-4")
        return method.value is not None
    if method.value in (None, "bnb"):
        double = keys.value("bnb_4bit_use_double_quant")
        kind = str(keys.value("bnb_4bit_quant_type")) + ("-double" if double else "")
        training.quantization(
            keys.out, bits, kind if (bits.value or 4) == 4 else "int8", "PEFT's preparation is not called"
        )
        return True
    kind = "int8" if bits.value == 8 or method.value == "eetq" else "nf4"
    if method.value in ("gptq", "awq"):
        kind = f"{method.value}-4"
    else:
        keys.out.lack(f"quant_method: {method.shown} is not modelled: taken as {kind}, which is nearest in bytes")
    training.quantization(keys.out, method, kind)
    return True


def _precision(keys: Keys, found: Sharding, lora: bool, quantized: bool) -> None:
    loaded = keys.get("torch_dtype")
    weights = "bf16" if loaded.value is None else training.dtype(loaded)
    if loaded.value is None:
        keys.out.assume("torch_dtype is not in the file: the model's own, taken as bf16")
    fp16, bf16 = keys.get("fp16"), keys.get("bf16")
    autocast = "bf16" if weights == "bf16" else "fp16"
    if fp16.value:
        autocast = "fp16"
    elif bf16.value:
        autocast = "bf16"
    elif bf16.value is False and not bf16.default and fp16.value is not True:
        autocast = ""
    adapters = ""
    if lora:
        named = keys.get("lora_dtype")
        adapters = "fp32" if named.value is None else training.dtype(named)
        adapters = weights if adapters == "auto" else adapters
    training.precision(keys.out, loaded, weights=weights, autocast=autocast, sharding=found, adapters=adapters)


def _lengths(keys: Keys, objective: str, attention: str) -> None:
    out, rows, cap = keys.out, keys.get("per_device_train_batch_size"), keys.get("max_length")
    if objective in ("grpo", "gkd", "ppo"):
        completion = keys.get("max_completion_length")
        out.take(our.BATCH, rows.value, rows, "completions per GPU and forward pass")
        out.take(our.COMPLETION_LENGTH, completion.value, completion)
        if cap.value is None:
            out.ask("nothing caps the prompt: give --seq-len (longest prompt and completion together)")
        else:
            out.take(our.SEQ_LEN, cap.value + completion.value, cap, "prompt of max_length and the completion")
        if keys.value("use_vllm") and str(keys.value("vllm_mode")) == "colocate":
            out.lack("vLLM beside the trainer takes its share of the GPU, which is not in the estimate")
        return
    packing, free = keys.get("packing"), keys.get("padding_free")
    if cap.value is None and keys.value("packing_length") is None:
        training.batch(out, rows, Given("max_length", None, None, True))
        out.note(cap, "the model's own maximum")
        return
    if packing.value:
        length = keys.get("packing_length")
        training.batch(out, rows, length if length.value is not None else cap, packing="flat")
        out.note(packing)
    elif free.value:
        training.batch(out, rows, cap, packing="flat")
        out.assume("padding_free: the longest samples of a batch are taken to meet at max_length each")
    else:
        training.batch(out, rows, cap, objective=objective)


def _accumulation(keys: Keys, found: Sharding) -> int:
    given = keys.get("gradient_accumulation_steps")
    rows = keys.value("per_device_train_batch_size")
    value = given.value
    if value is None:
        value = math.ceil(16 / (rows * (found.world or 1)))
        given = Given("gradient_accumulation_steps", value, value, True, "ceil(16 / (batch × GPUs))")
    keys.out.take(our.GRAD_ACCUM, value, given)
    return int(value)


def _optimizer(keys: Keys, found: Sharding, accumulation: int) -> None:
    out, galore = keys.out, keys.get("use_galore")
    if not galore.value:
        hf_trainer.optimizer(keys, found, accumulation)
        return
    if keys.value("galore_quantization"):
        out.lack("Q-GaLore is not modelled: taken as GaLore")
    out.take(our.OPTIMIZER, "galore-adamw", galore, "galore-adamw (galore-torch)")
    out.take(our.GALORE_RANK, keys.value("galore_rank"), keys.get("galore_rank"))
    out.note(
        keys.get("galore_optim_per_parameter"),
        "an optimizer for each weight; all step after backward, so gradients are kept",
    )
    keys.get("optim")


def _checkpointing(keys: Keys, found: Sharding) -> None:
    on, kwargs = keys.get("gradient_checkpointing"), keys.get("gradient_checkpointing_kwargs")
    active = bool(on.value) or bool(found.checkpointing)
    how = training.use_reentrant(kwargs, found.kind != "ddp", "false in plain DDP, else true")
    if found.checkpointing:
        how = Given("use_reentrant", False, False, True, "FSDP's own checkpointing")
    training.checkpointing(keys.out, on, active, how)
    tower = keys.get("vit_gradient_checkpointing")
    if not tower.default and bool(tower.value) != active:
        keys.out.lack(
            "vit_gradient_checkpointing differs from gradient_checkpointing: the tower is taken as the language model"
        )


def _head(keys: Keys, objective: str) -> None:
    liger, keep = keys.get("use_liger_kernel"), keys.get("use_logits_to_keep")
    if liger.value:
        training.liger(keys.out, liger, loss=objective == "sft")
    elif keep.value is not False:
        keys.out.note(keep, "logits of supervised tokens alone; how many cannot be known, so all are counted")
        keys.out.assume(
            "use_logits_to_keep: how many tokens are supervised cannot be known, so the head is counted on all"
        )


def _frozen(keys: Keys, lora: bool) -> None:
    name = str(keys.value("model")).lower()
    seeing = any(mark in name for mark in ("-vl", "vl-", "omni", "llava", "internvl", "vision", "-v-", "ovis"))
    for key in ("freeze_aligner", "freeze_llm"):
        keys.get(key)
    if seeing and not lora and keys.value("freeze_vit"):
        keys.out.take(our.FREEZE, "vision", keys.get("freeze_vit"), "the vision tower is not trained")
    if keys.value("freeze_llm"):
        keys.out.lack("freeze_llm is not modelled: the estimate is of the language model trained")
    if keys.value("freeze_parameters_ratio"):
        keys.out.lack("freeze_parameters_ratio is not modelled: the estimate is of all weights trained")
