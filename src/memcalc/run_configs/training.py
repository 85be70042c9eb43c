"""What the training frameworks share: a fact of theirs becomes options of ours, in one place."""

from __future__ import annotations

import math
from typing import Any

from memcalc.errors import ConfigError
from memcalc.run_configs import option_names as our
from memcalc.run_configs.mapping import Given, Mapping
from memcalc.run_configs.optimizer_names import is_known, spelled
from memcalc.run_configs.sharding import Sharding
from memcalc.setup.defaults import IN_PLAIN_LOOPS

_DTYPES = {
    "float32": "fp32",
    "fp32": "fp32",
    "float": "fp32",
    "bfloat16": "bf16",
    "bf16": "bf16",
    "float16": "fp16",
    "fp16": "fp16",
    "half": "fp16",
    "auto": "auto",
}

PAIRS = ("dpo", "reward", "orpo", "cpo", "simpo", "ipo")
"""Objectives whose batch counts pairs."""


def dtype(given: Given) -> str:
    """fp32, bf16, fp16 or auto. Raises ConfigError."""
    name = _DTYPES.get(str(given.value).lower().removeprefix("torch."))
    if name is None:
        raise ConfigError(f"{given.key}: {given.shown} is no dtype of training: use float32, bfloat16 or float16.")
    return name


def batch(
    out: Mapping, rows: Given, cap: Given | None, *, packing: str = "", multiple: int = 1, objective: str = "sft"
) -> None:
    """The longest batch: `packing` is flat (one row of all), rows (every row full), or empty (padded to the longest).

    `multiple`: rows are padded up to a multiple of this. A cap of None asks for --seq-len.
    """
    count = rows.value
    if cap is None or cap.value is None:
        out.take(our.BATCH, count, rows)
        out.ask("the longest sequence is in none of the files, and nothing caps it: give --seq-len N")
        return
    length = math.ceil(cap.value / multiple) * multiple
    if packing == "flat":
        out.take(our.BATCH, 1, rows, f"{count} packed rows become one row: --{our.BATCH} 1")
        out.take(our.SEQ_LEN, count * length, cap, f"{count} × {length} tokens in one row")
        out.take(our.PACKING, True, Given("packing", packing, True), "one flattened row with segments")
        out.facts["tensor_shape"] = [1, count * length]
        return
    out.take(our.BATCH, count, rows)
    padded = f" (padded up to a multiple of {multiple})" if length != cap.value else ""
    out.take(our.SEQ_LEN, length, cap, cap.meaning + padded)
    if packing == "rows":
        out.facts["tensor_shape"] = [count, length]
        return
    out.assume(f"the dataset's longest sample cannot be known: took {cap.key} {cap.shown} for it")
    if count * (2 if objective in PAIRS else 1) > 1:
        out.take(
            our.PADDING_MASK, True, Given("padding", "to the longest", True), "a micro-batch is padded, with a mask"
        )


def precision(  # noqa: PLR0913 (what a trainer's file says)
    out: Mapping,
    given: Given,
    *,
    weights: str,
    autocast: str,
    sharding: Sharding,
    adapters: str = "",
    pure: bool = False,
) -> None:
    """Dtypes. `weights` as they are loaded, `autocast` empty or a dtype, `adapters` the LoRA dtype or empty.

    `pure`: FSDP without a mixed-precision policy.
    """
    if sharding.kind == "zero":
        engine = autocast or weights if sharding.precision in ("", "auto") else sharding.precision
        if engine == "auto":
            engine = "bf16"
        words = f"DeepSpeed casts the module to {engine}, with a sharded fp32 master copy and no autocast"
        out.take(our.PRECISION, engine, given, words if engine != "fp32" else "fp32 throughout")
        if sharding.precision in ("bf16", "fp16") and autocast not in ("", sharding.precision):
            out.assume(
                f"{given.key} says {autocast} and {sharding.where} says {sharding.precision}: DeepSpeed would stop"
            )
    elif sharding.kind == "fsdp" and not pure and autocast and not adapters:
        out.take(our.PRECISION, f"mixed-{autocast}", given, f"fp32 shards, gathered and computed in {autocast}")
    elif weights == "fp32":
        recipe = f"mixed-{autocast}" if autocast else "fp32"
        out.take(
            our.PRECISION, recipe, given, f"fp32 weights under {autocast} autocast" if autocast else "fp32 weights"
        )
    else:
        out.take(our.PRECISION, weights, given, f"{weights} weights{' under autocast' if autocast else ''}")
        if autocast and sharding.kind != "fsdp":
            out.take(our.AUTOCAST, autocast, given, f"{autocast} autocast over 16-bit weights")
    if adapters:
        out.take(our.LORA_DTYPE, adapters, Given("adapter dtype", adapters, adapters, True))


def optimizer(out: Mapping, given: Given, *, implementation: str = "", accumulation: int = 1) -> None:
    """The optimizer that a key spells. Raises ConfigError where nobody knows it."""
    row = spelled(str(given.value))
    name = "adamw" if row.name == "adamw-cpu" else row.name
    if not is_known(name):
        if not row.near:
            out.lack(
                f"{given.key}: {given.shown} ({row.library}) is not modelled: give --optimizer NAME for an estimate"
            )
            out.take(our.OPTIMIZER, name, given, f"{row.library}, not modelled")
            return
        out.lack(f"{given.key}: {given.shown} ({row.library}) is not modelled: taken as {row.near}, which is nearest")
        out.take(our.OPTIMIZER, row.near, given, f"nearest to {name} of {row.library}")
    else:
        out.take(our.OPTIMIZER, name, given, row.library)
    if row.name == "adamw-cpu":
        out.take(our.CPU_OFFLOAD, "optimizer", given, "states on the host")
        return
    impl = implementation or row.impl
    if impl and out.setup[our.OPTIMIZER] in ("adamw", "adam", "sgd"):
        out.take(our.OPTIMIZER_IMPL, impl, given, f"{impl} implementation")
    if row.in_backward:
        if accumulation > 1:
            raise ConfigError(
                f"{given.key}: {given.shown} steps each weight in backward, so gradients cannot be accumulated: "
                "set gradient_accumulation_steps to 1."
            )
        out.take(our.OPTIMIZER_IN_BACKWARD, True, given, "each weight is stepped in backward")


def checkpointing(out: Mapping, given: Given, on: bool, reentrant: Given | None = None, *, every: int = 1) -> None:
    """Activation checkpointing of whole blocks."""
    out.take(our.CHECKPOINTING, "full" if on else "none", given)
    if not on:
        return
    if reentrant is not None:
        words = "reentrant" if reentrant.value else "non-reentrant"
        out.take(our.REENTRANT, bool(reentrant.value), reentrant, words)
    if every > 1:
        out.take(our.CHECKPOINT_EVERY, every, given, f"every {every}. block")


def use_reentrant(kwargs: Given, default: bool, why: str = "") -> Given:
    """`use_reentrant` of a `gradient_checkpointing_kwargs`, or the framework's default."""
    values = kwargs.value if isinstance(kwargs.value, dict) else {}
    said = values.get("use_reentrant")
    if said is None:
        return Given("use_reentrant", default, default, True, why)
    text = str(said).strip().lower()
    if text not in ("true", "false", "1", "0"):
        raise ConfigError(f"use_reentrant needs true or false, not {text[:20]!r}: correct it.")
    return Given(f"{kwargs.key}.use_reentrant", said, text in ("true", "1"))


def attention(out: Mapping, given: Given) -> str:
    """The attention implementation; flex and xformers keep what flash keeps. Raises ConfigError."""
    name = str(given.value or "sdpa").lower().removeprefix("paged|")
    if given.value is None or name in ("auto", "default"):
        out.take(
            our.ATTENTION, "sdpa", Given(given.key, given.raw, "sdpa", given.default, given.meaning), "library default"
        )
        return "sdpa"
    ours = ATTENTION.get(name)
    if ours is None and ("flash" in name or name.startswith("kernels-community/")):
        ours = "flash"
    if ours is None:
        raise ConfigError(
            f"{given.key}: {given.shown} is no attention implementation that memcalc knows: use eager, sdpa or "
            f"flash_attention_2."
        )
    if name in ("flex", "flex_attention", "xformers", "xformers_attention", "sage", "sageattention", "sage_attention"):
        out.lack(f"{given.key}: {given.shown} is taken as flash, which saves the same tensors for backward")
    out.take(our.ATTENTION, ours, given)
    return ours


ATTENTION = {
    **dict.fromkeys(("eager", "disabled"), "eager"),
    **dict.fromkeys(("sdpa", "sdp", "sdpa_flash", "sdpa_varlen"), "sdpa"),
    **dict.fromkeys(
        (
            "flash",
            "fa2",
            "fa3",
            "fa4",
            "flash_attn",
            "flash_attn2",
            "flash_attn3",
            "flash_attention",
            "flash_attention_2",
            "flash_attention_3",
            "flash_attention_4",
            "flex",
            "flex_attention",
            "xformers",
            "xformers_attention",
            "sage",
            "sageattention",
            "sage_attention",
            "fp8",
        ),
        "flash",
    ),
}


def liger(out: Mapping, given: Given, *, loss: bool = True, chosen: Given | None = None) -> None:
    """Liger's kernels, and its fused linear loss unless `loss` is false; `chosen` is a `liger_kernel_config`."""
    config = chosen.value if chosen is not None else {}
    switched = {str(name): value is not False for name, value in config.items()}
    parts = [part for part in ("rope", "rms_norm", "swiglu") if switched.get(part, True)]
    if "geglu" in switched and not switched["geglu"]:
        parts = [part for part in parts if part != "swiglu"]
    if parts:
        out.take(our.KERNELS, "liger", given, "norms, rotary embedding and SwiGLU fused")
    if chosen is not None and 0 < len(parts) < 3:
        out.take(our.LIGER_KERNELS, ",".join(parts), chosen, "some of them alone")
    if loss and switched.get("fused_linear_cross_entropy", True):
        out.take(our.LOSS, our.LOSS_LIGER, given, "fused linear cross-entropy")
    elif loss and switched.get("cross_entropy", False):
        out.take(our.LOSS, our.LOSS_LIGER_ON_LOGITS, given, "Liger's cross-entropy on full logits")


def loop(out: Mapping, name: str, framework: str) -> None:
    """The training loop: plain, hf or trl. Objectives other than sft are those of TRL's trainers, but in a plain loop.

    A loss that was taken before is dropped where the objective has its own.
    """
    objective = out.setup.get(our.OBJECTIVE, "sft")
    if name == "plain" and objective not in IN_PLAIN_LOOPS:
        name = "trl"
    if objective != "sft":
        out.setup.pop(our.LOSS, None)
        if name == "hf":
            name = "trl"
            out.assume(f"{objective} is computed as TRL 1.16 runs it")
    elif name == "trl" and out.setup.get(our.LOSS) != our.LOSS_TILED:
        name = "hf"
    words = {"plain": "a loop of its own", "hf": "Trainer's loop", "trl": "TRL's loop"}[name]
    out.take(our.TRAINER, name, Given("training loop", framework, name, True), words)


def conflict(out: Mapping, name: str, here: Any, there: Any, where: str) -> None:
    """Two files that disagree: DeepSpeed stops there, so memcalc does. Raises ConfigError."""
    if here is not None and there is not None and here != there:
        raise ConfigError(
            f"two files disagree: {name} {here} (training) and {there} ({where}); the run would stop there: make "
            f"them agree."
        )
