"""LLaMA-Factory's YAML or JSON and its command line.

Source: LLaMA-Factory 0.9.6 (hparams/*.py, model/*.py, v1/config).
"""

from __future__ import annotations

from typing import Any

from memcalc.errors import ConfigError
from memcalc.run_configs import adapter_facts, hf_trainer, training
from memcalc.run_configs import option_names as our
from memcalc.run_configs.context import Context
from memcalc.run_configs.keys import Keys
from memcalc.run_configs.known_keys.llama_factory_keys import HARMLESS, KEYS
from memcalc.run_configs.mapping import Given
from memcalc.run_configs.sharding import Sharding

_STAGES = {"sft": "sft", "pt": "sft", "rm": "reward", "ppo": "ppo", "dpo": "dpo", "kto": "kto"}
_PREFERENCES = {"orpo": "orpo", "simpo": "cpo"}


def is_llama_factory(values: dict[str, Any]) -> bool:
    """Whether a mapping is a LLaMA-Factory file of the classic keys."""
    marks = {"finetuning_type", "cutoff_len", "stage", "template", "lora_target", "quantization_bit", "flash_attn"}
    return len(marks & values.keys()) >= (2 if "model_name_or_path" in values else 3)


def read(context: Context) -> None:
    """A LLaMA-Factory run. Raises ConfigError."""
    out = context.out
    keys = Keys(KEYS, context.values, context.where, out, HARMLESS)
    out.model = keys.value("model_name_or_path")
    kind = str(keys.value("finetuning_type")).lower()
    lora = kind == "lora"
    if kind not in ("lora", "full", "freeze", "oft"):
        raise ConfigError(f"finetuning_type: {kind[:40]} is none of LLaMA-Factory's: use lora, full, freeze or oft.")
    objective = _objective(keys)
    _world(context)
    found = hf_trainer.sharding(context, keys, "llamafactory", default_version=1)
    quantized = _quantization(keys, lora)
    _precision(keys, found, lora, quantized)
    if lora:
        _lora(keys, quantized)
    elif kind == "oft":
        out.lack("finetuning_type: oft is not modelled: give --lora-rank for a LoRA of your own")
    _lengths(keys, objective)
    _attention(keys)
    accumulation = keys.take("gradient_accumulation_steps").value
    _optimizer(keys, found, accumulation)
    _checkpointing(keys, found)
    if keys.value("enable_liger_kernel"):
        training.liger(out, keys.get("enable_liger_kernel"), loss=objective == "sft")
    _frozen(keys, kind)
    adapter_facts.reference(out, objective, lora=lora and keys.value("ref_model") is None)
    _unmodelled(keys)
    hf_trainer.rest(keys)
    training.loop(out, "hf", "LLaMA-Factory")
    dead = {} if lora else {name: f"finetuning_type is {kind}" for name in context.values if name.startswith("lora")}
    dead["gradient_checkpointing"] = "LLaMA-Factory turns it on by itself; disable_gradient_checkpointing turns it off"
    keys.finish(dead)
    context.finish(found)


def _world(context: Context) -> None:
    """llamafactory-cli starts a process for each visible GPU, or NPROC_PER_NODE of them."""
    environment = context.environment
    processes, nodes = environment.get("NPROC_PER_NODE", ""), environment.get("NNODES", "1")
    visible = [device for device in environment.get("CUDA_VISIBLE_DEVICES", "").split(",") if device.strip()]
    if context.world is None and processes.isdecimal() and nodes.isdecimal():
        context.world, context.world_from = int(processes) * int(nodes), "NPROC_PER_NODE"
    elif context.world is None and context.command == "train" and visible:
        context.world, context.world_from = len(visible), "CUDA_VISIBLE_DEVICES"


def _objective(keys: Keys) -> str:
    stage = keys.get("stage")
    objective = _STAGES.get(str(stage.value).lower())
    if objective is None:
        raise ConfigError(f"stage: {stage.shown} is none of LLaMA-Factory's: use pt, sft, rm, ppo, dpo or kto.")
    preference = keys.get("pref_loss")
    if objective == "dpo":
        objective = _PREFERENCES.get(str(preference.value).lower(), "dpo")
    keys.out.take(our.OBJECTIVE, objective, stage if objective != "orpo" else preference)
    if objective == "reward":
        keys.out.lack(
            "stage rm has a value head on the whole language model, with its logits and all hidden states: the "
            "estimate is of a classifier's head"
        )
    return objective


def _quantization(keys: Keys, lora: bool) -> bool:
    bits, method = keys.get("quantization_bit"), keys.get("quantization_method")
    if bits.value is None:
        return False
    if not lora:
        raise ConfigError(
            f"quantization_bit in {keys.where} needs finetuning_type: lora; LLaMA-Factory stops there, too."
        )
    name = str(method.value).lower()
    if name in ("bnb", "bitsandbytes"):
        kind = {8: "int8", 4: str(keys.value("quantization_type"))}.get(bits.value)
        if kind is None:
            raise ConfigError(f"quantization_bit: {bits.shown} in {keys.where}: bitsandbytes has 4 and 8.")
        if kind == "nf4" and keys.value("double_quantization"):
            kind = "nf4-double"
        adapter_facts.quantization(keys.out, bits, kind, "PEFT's preparation is not called")
        return True
    kind = {8: "int8"}.get(bits.value, "nf4")
    keys.out.lack(f"quantization_method: {method.shown} is not modelled: taken as {kind}, which is nearest in bytes")
    adapter_facts.quantization(keys.out, bits, kind)
    return True


def _precision(keys: Keys, found: Sharding, lora: bool, quantized: bool) -> None:
    out, pure = keys.out, keys.get("pure_bf16")
    autocast, given = hf_trainer.autocast(keys, "LLaMA-Factory")
    if pure.value:
        training.precision(out, pure, weights="bf16", autocast="", sharding=found, adapters="bf16" if lora else "")
        return
    if autocast == "" and found.kind != "zero":
        out.assume("neither bf16, fp16 nor pure_bf16 is set: compute is in the checkpoint's dtype, taken as bf16")
    badam = keys.value("use_badam")
    if lora:
        base = "fp16" if autocast == "fp16" else "bf16"
        out.assume(f"frozen weights stay in the checkpoint's dtype: taken as {base}")
        adapters = "fp32" if found.kind != "zero" or found.stage < 3 or quantized else base
        training.precision(
            out, given, weights=base, autocast=autocast, sharding=found, adapters="fp32" if autocast else adapters
        )
    elif badam:
        training.precision(out, keys.get("use_badam"), weights="bf16", autocast=autocast, sharding=found)
    else:
        weights = "fp32" if autocast else "bf16"
        words = given if autocast else Given("compute_dtype", None, "bf16", True)
        training.precision(out, words, weights=weights, autocast=autocast, sharding=found)
        if autocast and found.kind not in ("zero", "fsdp"):
            out.assume("trained weights are cast to fp32 (LLaMA-Factory does so unless pure_bf16 is set)")


def _lora(keys: Keys, quantized: bool) -> None:
    adapter_facts.lora(
        keys.out,
        keys.get("lora_rank"),
        keys.get("lora_target"),
        keys.get("lora_dropout"),
        saved=keys.get("additional_target"),
        dora=keys.get("use_dora"),
    )


def _lengths(keys: Keys, objective: str) -> None:
    packing, neat = keys.get("packing"), keys.get("neat_packing")
    packed = neat.value or (packing.value if not packing.default else keys.value("stage") == "pt")
    rows, cap = keys.get("per_device_train_batch_size"), keys.get("cutoff_len")
    if packed and keys.value("stage") in ("pt", "sft"):
        if keys.value("stage") == "sft":
            cap = Given(cap.key, cap.raw, cap.value + 1, cap.default, "rows of cutoff_len + 1 tokens")
        training.batch(keys.out, rows, cap, packing="rows", multiple=8)
        keys.out.note(packing if not neat.value else neat, "rows filled to cutoff_len")
        return
    if packed:
        keys.out.drop(packing, f"stage {keys.value('stage')} does not pack")
    training.batch(keys.out, rows, cap, multiple=8, objective=objective)


def _attention(keys: Keys) -> None:
    given = keys.get("flash_attn")
    word = str(given.value).lower()
    training.attention(
        keys.out, Given(given.key, given.raw, None if word == "auto" else word, given.default, given.meaning)
    )


def _optimizer(keys: Keys, found: Sharding, accumulation: int) -> None:
    out = keys.out
    galore, layerwise = keys.get("use_galore"), keys.get("galore_layerwise")
    own = [name for name in ("use_galore", "use_apollo", "use_badam", "use_adam_mini", "use_muon") if keys.value(name)]
    if len(own) > 1:
        raise ConfigError(f"{keys.where} sets {' and '.join(own)}: LLaMA-Factory takes one of them.")
    if galore.value:
        if layerwise.value and accumulation > 1:
            raise ConfigError(
                "galore_layerwise steps in backward, so gradients cannot be accumulated: set "
                "gradient_accumulation_steps to 1."
            )
        out.take(our.OPTIMIZER, "galore-adamw", galore, "galore-torch")
        out.take(our.GALORE_RANK, keys.value("galore_rank"), keys.get("galore_rank"))
        if layerwise.value:
            out.take(our.OPTIMIZER_IN_BACKWARD, True, layerwise, "each weight is stepped in backward")
        if keys.get("optim").default:
            out.assume(
                "use_galore takes optim adamw_torch; the library's default today is adamw_torch_fused, which it may "
                "refuse"
            )
    elif own:
        name = {"use_apollo": "apollo_adamw", "use_badam": "badam", "use_adam_mini": "adam_mini", "use_muon": "muon"}[
            own[0]
        ]
        given = keys.get(own[0])
        if own[0] == "use_apollo":
            out.take(our.GALORE_RANK, keys.value("apollo_rank"), keys.get("apollo_rank"))
        training.optimizer(out, Given(given.key, given.raw, name))
    else:
        hf_trainer.optimizer(keys, found, accumulation)
    keys.get("optim")


def _checkpointing(keys: Keys, found: Sharding) -> None:
    off, reentrant = keys.get("disable_gradient_checkpointing"), keys.get("use_reentrant_gc")
    given = Given(
        "disable_gradient_checkpointing", off.raw, not off.value, off.default, "checkpointing is on by itself"
    )
    if reentrant.default and found.kind == "fsdp" and found.version == 2:
        reentrant = Given("use_reentrant_gc", False, False, True, "off under FSDP2")
    training.checkpointing(keys.out, given, not off.value, reentrant)
    unsloth = keys.get("use_unsloth_gc")
    if unsloth.value and not off.value:
        keys.out.take(our.ACTIVATION_OFFLOADING, True, unsloth, "checkpointed inputs in host memory")


def _frozen(keys: Keys, kind: str) -> None:
    out = keys.out
    if kind == "freeze":
        layers = keys.get("freeze_trainable_layers")
        if (
            keys.value("freeze_trainable_modules") not in (None, ["all"])
            or keys.value("use_llama_pro")
            or layers.value < 0
        ):
            out.lack(
                "freeze_trainable_modules, use_llama_pro and the first layers are not modelled: the last layers are "
                "taken"
            )
        out.take(our.TRAIN_ONLY, f"last-{abs(layers.value)}", layers, "only the last layers are trained")
    tower = keys.get("freeze_vision_tower")
    if kind != "lora" and tower.value and _is_multimodal(keys):
        out.take(our.FREEZE, "vision", tower, "the vision tower is not trained")
    pixels = keys.get("image_max_pixels")
    if not pixels.default:
        side = int(float(pixels.value) ** 0.5) // 28 * 28
        out.take(our.IMAGE_SIZE, max(side, 28), pixels, "a square image of at most that many pixels")
        out.ask("images per sample are not in the file: one is taken; --images-per-sequence says otherwise")


def _is_multimodal(keys: Keys) -> bool:
    name = str(keys.value("model_name_or_path")).lower()
    return any(
        mark in name
        for mark in (
            "-vl",
            "vl-",
            "llava",
            "omni",
            "vision",
            "gemma-3",
            "internvl",
            "pixtral",
            "paligemma",
            "minicpm-v",
        )
    )


def _unmodelled(keys: Keys) -> None:
    for name, words in (
        ("use_unsloth", "Unsloth's kernels and loss are"),
        ("shift_attn", "shift_attn is"),
        ("mixture_of_depths", "mixture of depths is"),
        ("use_kt", "KTransformers is"),
        ("fp8", "fp8 linear layers are"),
        ("use_mca", "Megatron through use_mca is"),
        ("use_megatron_bridge", "Megatron Bridge is"),
        ("upcast_layernorm", "upcast_layernorm is"),
    ):
        if keys.value(name):
            keys.out.lack(f"{words} not modelled: the estimate is without it")
    for name in ("upcast_lmhead_output", "galore_target", "apollo_rank", "lora_alpha", "badam_mode", "optim_args"):
        if name in keys.rows:
            keys.get(name)
