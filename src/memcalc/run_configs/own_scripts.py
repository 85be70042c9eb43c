"""Training scripts of well-known repositories on Transformers' Trainer: their keys and what the script itself fixes.

One row a script, recognised by its file name and keys. Sources: artidoro/qlora qlora.py, haotian-liu/LLaVA
llava/train/train.py, lm-sys/FastChat fastchat/train/train.py and train_lora.py, QwenLM/Qwen finetune.py.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import Any

from memcalc.run_configs import adapter_facts, hf_trainer, training
from memcalc.run_configs import option_names as our
from memcalc.run_configs.context import Context
from memcalc.run_configs.keys import Key, Keys, count, either, flag, harmless, names, number, text, whole
from memcalc.run_configs.known_keys import hf_keys
from memcalc.run_configs.mapping import Given

KEYS = hf_keys.trainer_table(
    Key("lora_enable", flag, False, our.LORA_RANK, "train adapters", other=("use_lora", "use_peft_lora")),
    Key("lora_r", count, 64, our.LORA_RANK, "rank of the adapters"),
    Key("lora_alpha", number, 16, "", "scale of the adapters"),
    Key("lora_dropout", number, 0.0, our.LORA_DROPOUT, "dropout in front of the adapters"),
    Key("lora_target_modules", names, None, our.LORA_TARGETS, "what gets adapters", other=("lora_modules",)),
    Key("bits", whole, 16, our.QUANTIZATION, "bits of the base"),
    Key("q_lora", flag, False, our.QUANTIZATION, "adapters on a quantized base"),
    Key("quant_type", text, "nf4", our.QUANTIZATION, "kind of 4 bits"),
    Key("double_quant", flag, True, our.QUANTIZATION, "double quantization"),
    Key("full_finetune", flag, False, our.LORA_RANK, "all weights are trained"),
    Key("source_max_len", count, 1024, our.SEQ_LEN, "cap of the source"),
    Key("target_max_len", count, 256, our.SEQ_LEN, "cap of the target"),
    Key("vision_tower", text, None, "", "a vision tower of the script's own"),
    Key("freeze_backbone", flag, False, our.FREEZE, "the language model is not trained"),
    Key("tune_mm_mlp_adapter", flag, False, our.TRAIN_ONLY, "the projector alone is trained"),
)
HARMLESS = either(
    hf_keys.HARMLESS,
    harmless(
        "model_max_length pretrain_mm_mlp_adapter mm_projector_lr dataset trust_remote_code adam8bit max_memory_MB "
        "max_new_tokens do_mmlu_eval mmlu_split mmlu_dataset lora_bias lora_weight_path use_fast fix_vit "
        "gradient_checkpointing_kwargs attn_implementation flash_attn is_multimodal",
        r"(mm|lora|mmlu|wandb|image|unfreeze)_\w+",
    ),
)


@dataclass(frozen=True)
class Script:
    """What a script fixes that no key says. `targets` None: every linear layer but the head."""

    repository: str
    lora: dict[str, Any] = field(default_factory=dict)
    always_lora: bool = False
    optim: str = "adamw_torch"
    length: int = 512
    attention: str = "sdpa"
    targets: str = "all-linear"
    quantized: str = ""
    adapters: str = "fp32"
    prepared: bool = False
    weights: str = ""


SCRIPTS = {
    "qlora.py": Script("artidoro/qlora", always_lora=True, optim="paged_adamw_32bit", adapters="bf16", weights="bf16"),
    "train_mem.py": Script("LLaVA or FastChat", {"lora_dropout": 0.05}, attention="flash"),
    "train_xformers.py": Script("LLaVA or FastChat", {"lora_dropout": 0.05}, attention="flash"),
    "train_lora.py": Script(
        "FastChat",
        {"lora_r": 8, "lora_dropout": 0.05},
        always_lora=True,
        targets="q_proj,v_proj",
        quantized="nf4-double",
        prepared=True,
    ),
    "finetune.py": Script(
        "QwenLM/Qwen",
        {"lora_dropout": 0.05},
        length=8192,
        attention="flash",
        targets="c_attn,c_proj,w1,w2",
        quantized="gptq-4",
        prepared=True,
    ),
}


def script_of(command: str, values: dict[str, Any]) -> Script | None:
    """The script of this name, where its own keys are there too."""
    found = SCRIPTS.get(os.path.basename(command))
    marks = {
        "bits",
        "lora_enable",
        "q_lora",
        "use_lora",
        "source_max_len",
        "lazy_preprocess",
        "vision_tower",
        "mm_projector_type",
    }
    return found if found is not None and marks & values.keys() else None


def read(context: Context, script: Script) -> None:
    """A run of one of these scripts. Raises ConfigError."""
    out = context.out
    rows = dict(KEYS)
    for name, default in script.lora.items():
        rows[name] = Key(**{**rows[name].__dict__, "absent": default})
    rows["optim"] = Key(**{**rows["optim"].__dict__, "absent": script.optim})
    keys = Keys(rows, context.values, context.where, out, HARMLESS)
    out.assume(
        f"{os.path.basename(context.command)} is taken as the script of {script.repository}: what no key says is as "
        f"it is there"
    )
    out.model = keys.value("model_name_or_path")
    found = hf_trainer.sharding(context, keys, "hf", default_version=1)
    lora = (bool(keys.value("lora_enable")) or script.always_lora) and not keys.value("full_finetune")
    autocast, given = hf_trainer.autocast(keys)
    if lora:
        _quantization(keys, script)
        targets = keys.get("lora_target_modules")
        named = Given("lora targets", script.targets, script.targets, True)
        own = targets if targets.value not in (None, ["all"]) else named
        adapter_facts.lora(out, keys.get("lora_r"), own, keys.get("lora_dropout"))
    weights = script.weights or ("fp32" if not lora and found.kind == "" else autocast or "fp32")
    training.precision(
        out, given, weights=weights, autocast=autocast, sharding=found, adapters=script.adapters if lora else ""
    )
    _length(keys, script)
    training.attention(out, Given("attention", None, script.attention, True, "as the script sets it"))
    hf_trainer.common(context, keys, found, reentrant=found.kind != "fsdp")
    if keys.has("vision_tower"):
        out.note(keys.get("vision_tower"))
        out.lack("the vision tower is put together by the script: the estimate is of the language model")
    keys.get("freeze_backbone"), keys.get("tune_mm_mlp_adapter"), keys.get("lora_alpha")
    out.take(our.OBJECTIVE, "sft", Given("trainer", None, "sft", True))
    training.loop(out, "hf", "Trainer")
    keys.finish(
        {} if lora else {name: "adapters are not switched on" for name in context.values if name.startswith("lora_")}
    )
    context.finish(found)


def _quantization(keys: Keys, script: Script) -> None:
    bits, quantized = keys.get("bits"), keys.get("q_lora")
    if bits.value == 4:
        kind = str(keys.value("quant_type")) + (
            "-double" if keys.value("double_quant") and keys.value("quant_type") == "nf4" else ""
        )
        adapter_facts.quantization(keys.out, bits, kind, "embedding and head go back to bf16", prepared=script.prepared)
    elif bits.value == 8:
        adapter_facts.quantization(keys.out, bits, "int8", prepared=script.prepared)
    elif quantized.value and script.quantized:
        adapter_facts.quantization(
            keys.out, quantized, script.quantized, f"as {script.repository} does it", prepared=script.prepared
        )


def _length(keys: Keys, script: Script) -> None:
    rows = keys.get("per_device_train_batch_size")
    source, target = keys.get("source_max_len"), keys.get("target_max_len")
    if script.repository == "artidoro/qlora":
        total = source.value + target.value
        cap = Given("source_max_len + target_max_len", total, total, source.default and target.default)
    else:
        cap = keys.get("max_seq_length")
        if cap.value is None:
            cap = Given("model_max_length", script.length, script.length, True, "the script's default")
    training.batch(keys.out, rows, cap)
