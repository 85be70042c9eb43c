"""ms-swift's command lines, YAML and JSON. Source: ms-swift 4.6 (swift/arguments, swift/trainers/arguments.py)."""

from __future__ import annotations

import math
from typing import Any

from memcalc.run_configs import adapter_facts, hf_trainer, training
from memcalc.run_configs import option_names as our
from memcalc.run_configs.context import Context
from memcalc.run_configs.keys import Keys
from memcalc.run_configs.known_keys.ms_swift_keys import HARMLESS, KEYS
from memcalc.run_configs.mapping import Given
from memcalc.run_configs.sharding import Sharding

_SAME = {"full": "full", "lora": "lora"}


def is_swift(values: dict[str, Any]) -> bool:
    """Whether a mapping is an ms-swift file."""
    return "model" in values and bool(
        {"tuner_type", "train_type", "sft_type", "rlhf_type", "attn_impl"} & values.keys()
    )


def read(context: Context) -> None:
    """An ms-swift run. Raises ConfigError."""
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
        adapter_facts.lora(
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
    adapter_facts.reference(out, objective, lora=lora and not keys.has("ref_model"), none=free)
    hf_trainer.rest(keys)
    if keys.value("lisa_activated_layers"):
        out.lack("LISA is not modelled: the estimate is of all layers trained")
    training.loop(out, "hf", "ms-swift")
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
        objective = {"rm": "reward", "simpo": "cpo"}.get(str(kind.value).lower(), str(kind.value).lower())
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
        ("sequence_parallel_size", our.SEQUENCE_PARALLEL_SIZE if found.kind == "zero" else our.CONTEXT_PARALLEL),
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
            adapter_facts.quantization(keys.out, method, f"{method.value}-4")
        return method.value is not None
    if method.value in (None, "bnb"):
        double = keys.value("bnb_4bit_use_double_quant")
        kind = str(keys.value("bnb_4bit_quant_type")) + ("-double" if double else "")
        adapter_facts.quantization(
            keys.out, bits, kind if (bits.value or 4) == 4 else "int8", "PEFT's preparation is not called"
        )
        return True
    kind = "int8" if bits.value == 8 or method.value == "eetq" else "nf4"
    if method.value in ("gptq", "awq"):
        kind = f"{method.value}-4"
    else:
        keys.out.lack(f"quant_method: {method.shown} is not modelled: taken as {kind}, which is nearest in bytes")
    adapter_facts.quantization(keys.out, method, kind)
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
    out.take(our.OPTIMIZER, "galore-adamw", galore, "galore-torch")
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
