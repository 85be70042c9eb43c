"""Adapter, Accelerate and DeepSpeed files by themselves, an adapter beside a run, and references inside a file."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from memcalc.errors import ConfigError
from memcalc.run_configs import option_names as our
from memcalc.run_configs import peft_adapter
from memcalc.run_configs.context import Context
from memcalc.run_configs.documents import Document
from memcalc.run_configs.keys import Keys
from memcalc.run_configs.mapping import Given, Mapping
from memcalc.run_configs.sharding import Sharding, apply

_REFERENCE = re.compile(r"\$\{([\w.]+)\}")


def read(found: Sequence[Document], context: Context) -> None:
    """An adapter, Accelerate or DeepSpeed file without a training file."""
    out = context.out
    beside = next((document for document in found if document.kind == "peft"), None)
    if beside is not None:
        out.framework, context.values, context.where = "peft", beside.values, beside.where
        peft_adapter.read(context)
        return
    document = next((document for document in found if document.kind in ("accelerate", "deepspeed")), None)
    if document is None or context.sharding is None:
        raise ConfigError(
            "there is no run in what was given: give a training or serving file, or a launch line after --."
        )
    sharding = context.sharding
    out.framework = document.kind
    _precision_alone(sharding, context.mixed_precision, document, out)
    for option, value in ((our.BATCH, sharding.batch), (our.GRAD_ACCUM, sharding.grad_accum)):
        if value is not None:
            out.take(option, value, Given(option, value, value))
    if sharding.checkpointing is not None or sharding.kind == "fsdp":
        on = bool(sharding.checkpointing)
        out.take(our.CHECKPOINTING, "full" if on else "none", Given("fsdp_activation_checkpointing", on, on, not on))
        if on:
            out.take(our.REENTRANT, False, Given("use_reentrant", False, False, True))
    if sharding.optimizer:
        on_host = "optimizer" in sharding.offload
        out.take(
            our.OPTIMIZER,
            "adamw" if sharding.optimizer.lower() in ("adam", "adamw") else sharding.optimizer,
            Given("optimizer.type", sharding.optimizer, ""),
            "DeepSpeedCPUAdam on the host" if on_host else "DeepSpeed's FusedAdam",
        )
        if not on_host and out.setup[our.OPTIMIZER] == "adamw":
            out.take(our.OPTIMIZER_IMPL, "fused", Given("optimizer.type", sharding.optimizer, ""))
    apply(out, sharding)
    for what in ("the model (--model)", "the micro-batch and the sequence length", "the optimizer and what is trained"):
        out.ask(f"{what}: the {document.kind} file does not say; give the training file too")


def _precision_alone(sharding: Sharding, mixed: str, document: Document, out: Mapping) -> None:
    given = Given(
        "mixed_precision" if document.kind == "accelerate" else "bf16/fp16", mixed or sharding.precision, mixed
    )
    if sharding.kind == "zero":
        if sharding.precision in ("bf16", "fp16", "fp32"):
            out.take(our.PRECISION, sharding.precision, given, "module in this dtype, fp32 master copy in shards")
        else:
            out.ask("precision is auto: it follows bf16 and fp16 of the training file")
    elif mixed in ("bf16", "fp16"):
        words = f"fp32 shards, gathered and computed in {mixed}" if sharding.kind == "fsdp" else f"{mixed} autocast"
        out.take(our.PRECISION, f"mixed-{mixed}", given, words)
    elif mixed == "fp8":
        out.note(given, "fp8 linear layers under bf16 autocast")


def adapter(found: Sequence[Document], kind: str, out: Mapping) -> None:
    """An adapter file beside a training file says what the adapters are."""
    beside = next((document for document in found if document.kind == "peft"), None)
    if beside is None or kind in ("", "vllm", "llamacpp"):
        return
    keys = Keys(peft_adapter.KEYS, beside.values, beside.where, out, peft_adapter.HARMLESS)
    for option in (our.LORA_TARGETS, our.LORA_DROPOUT, our.LORA_BIAS, our.DORA, our.MODULES_TO_SAVE):
        out.setup.pop(option, None)
    peft_adapter.adapters(keys)
    base = keys.value("base_model_name_or_path")
    keys.get("peft_type")
    if out.model is None:
        out.model = base
    out.assume(f"the adapters are those of {beside.where}")
    keys.finish()


def resolved(values: dict[str, Any]) -> dict[str, Any]:
    """`${key}` and `${a.b}` of the same file put in, once; `${oc.env:...}` and other resolvers stay as they are."""

    def look_up(path: str) -> Any:
        found: Any = values
        for part in path.split("."):
            found = found.get(part) if isinstance(found, dict) else None
        return None if isinstance(found, (dict, list)) else found

    def put_in(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: put_in(inner) for key, inner in value.items()}
        if isinstance(value, list):
            return [put_in(inner) for inner in value]
        if not isinstance(value, str) or "${" not in value:
            return value
        whole = _REFERENCE.fullmatch(value)
        if whole:
            found = look_up(whole[1])
            return value if found is None or (isinstance(found, str) and "${" in found) else found
        return _REFERENCE.sub(
            lambda match: str(look_up(match[1])) if look_up(match[1]) is not None else match[0], value
        )

    return {key: put_in(value) for key, value in values.items()}
