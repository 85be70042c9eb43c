"""Adapters of training frameworks, the base that they stand on, and the model that an objective compares with."""

from __future__ import annotations

from memcalc.run_configs import option_names as our
from memcalc.run_configs.mapping import Given, Mapping

NO_REFERENCE = ("sft", "reward", "orpo", "cpo", "simpo", "rm", "pretraining")
"""Objectives without a reference model."""


def lora(  # noqa: PLR0913 (what a trainer's file says)
    out: Mapping,
    rank: Given,
    targets: Given,
    dropout: Given,
    *,
    saved: Given | None = None,
    dora: Given | None = None,
    bias: Given | None = None,
) -> None:
    """Adapters. Targets: a list, `all-linear`, or None for PEFT's default of the family."""
    out.take(our.LORA_RANK, rank.value, rank)
    if targets.value is not None:
        out.take(our.LORA_TARGETS, target_text(out, targets), targets)
    else:
        out.note(Given(targets.key, None, None, True), "PEFT's default modules of the family")
    if dropout.value:
        out.take(our.LORA_DROPOUT, float(dropout.value), dropout)
    else:
        out.note(dropout, "no dropout in front of the adapters")
    if saved is not None and saved.value:
        out.take(our.MODULES_TO_SAVE, ",".join(saved.value), saved)
    if dora is not None and dora.value:
        out.take(our.DORA, True, dora)
    if bias is not None and bias.value not in (None, "none", False):
        out.take(our.LORA_BIAS, {"lora_only": "lora-only"}.get(str(bias.value), bias.value), bias)


def target_text(out: Mapping, targets: Given) -> str:
    """The value of --lora-targets."""
    value = targets.value
    if isinstance(value, (list, tuple)):
        value = [str(item) for item in value]
        if [item.lower() for item in value] in (["all-linear"], ["all"]):
            return "all-linear"
        return ",".join(value)
    if str(value).lower() in ("all-linear", "all"):
        return "all-linear"
    return str(value)


def quantization(out: Mapping, given: Given, name: str, meaning: str = "", *, prepared: bool = False) -> None:
    """Quantized base weights; `prepared`: PEFT's preparation casts norms, embeddings and head to fp32."""
    out.take(our.QUANTIZATION, name, given, meaning)
    if name != "none":
        out.take(our.KBIT, prepared, Given("prepare_model_for_kbit_training", prepared, prepared, True))


def reference(out: Mapping, objective: str, *, lora: bool, none: bool = False, precomputed: bool = False) -> None:
    """The reference model of an objective that has one."""
    if objective in NO_REFERENCE:
        return
    kind = "none" if none else "precomputed" if precomputed else "shared" if lora else "copy"
    out.take(our.REFERENCE, kind, Given("reference model", kind, kind, True))
