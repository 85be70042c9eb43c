"""LLaMA-Factory's v1 key set. Source: LLaMA-Factory 0.9.6, v1/config/*.py."""

from __future__ import annotations

from typing import Any

from memcalc.errors import ConfigError
from memcalc.run_configs import adapter_facts, training
from memcalc.run_configs import option_names as our
from memcalc.run_configs.context import Context
from memcalc.run_configs.hf_trainer import launched
from memcalc.run_configs.keys import Key, Keys, anything, count, flag, harmless, mapping, table, text, whole
from memcalc.run_configs.mapping import Given
from memcalc.run_configs.sharding import Sharding

KEYS = table(
    Key("model", text, "Qwen/Qwen3-4B-Instruct-2507", "model", "the model"),
    Key("micro_batch_size", count, 1, our.BATCH, "sequences per GPU and forward pass"),
    Key("global_batch_size", count, None, our.GRAD_ACCUM, "sequences of a step over all GPUs"),
    Key("cutoff_len", count, 2048, our.SEQ_LEN, "longest sample"),
    Key("bf16", flag, True, our.PRECISION, "bf16 weights"),
    Key("batching_strategy", text, "normal", our.PACKING, "how rows are filled"),
    Key("enable_activation_checkpointing", flag, True, our.CHECKPOINTING, "recompute blocks in backward"),
    Key("flash_attn", text, "sdpa", our.ATTENTION, "attention implementation"),
    Key("peft_config", mapping, None, our.LORA_RANK, "adapters"),
    Key("quant_config", mapping, None, our.QUANTIZATION, "quantized base"),
    Key("kernel_config", mapping, None, our.KERNELS, "fused kernels"),
    Key("dist_config", mapping, None, our.PARALLEL, "FSDP2 or DeepSpeed"),
    Key("dp_size", whole, None, our.DATA_PARALLEL, "data-parallel GPUs"),
    Key("cp_size", whole, 1, our.CONTEXT_PARALLEL, "GPUs that share a sequence"),
    Key("optim_config", mapping, None, our.OPTIMIZER, "the optimizer"),
    Key("stage", text, "sft", our.OBJECTIVE, "objective"),
    Key("pref_loss", text, None, our.OBJECTIVE, "a preference objective"),
)
HARMLESS = harmless(
    "model_class custom_chat_template trust_remote_code init_config train_dataset eval_dataset output_dir "
    "learning_rate "
    "num_train_epochs max_steps max_grad_norm batching_workers cp_mode mp_replicate_size mp_shard_size dist_timeout "
    "lr_scheduler_config seed full_determinism resume_from_checkpoint logging_steps sample_backend max_new_tokens "
    "pref_beta pref_ftx simpo_gamma dpo_label_smoothing ld_alpha template",
    r"save_\w+",
)


def is_v1(values: dict[str, Any]) -> bool:
    """Whether a mapping is of the v1 key set."""
    return "model" in values and bool(
        {"peft_config", "dist_config", "kernel_config", "quant_config", "model_class"} & values.keys()
    )


def read(context: Context) -> None:
    """A LLaMA-Factory v1 run. Raises ConfigError."""
    out = context.out
    keys = Keys(KEYS, context.values, context.where, out, HARMLESS)
    out.model = keys.value("model")
    found = _sharding(context, keys)
    peft = keys.value("peft_config")
    quantized = keys.value("quant_config")
    lora = bool(peft) and str(peft.get("name", "lora")).lower() == "lora"
    preference = keys.get("pref_loss")
    objective = "sft" if preference.value is None else {"orpo": "orpo", "simpo": "cpo"}.get(preference.value, "dpo")
    out.take(our.OBJECTIVE, objective, preference)
    bf16 = keys.get("bf16")
    if lora and quantized:
        _quantization(keys, quantized)
    sharded = found.kind == "fsdp"
    weights, autocast = ("fp32" if sharded and not lora else "bf16", "bf16") if bf16.value else ("fp32", "")
    training.precision(
        out,
        bf16,
        weights=weights,
        autocast=autocast if sharded or lora else "",
        sharding=found,
        adapters="fp32" if lora else "",
    )
    if lora:
        _lora(keys, peft)
    packing = str(keys.value("batching_strategy")).lower()
    training.batch(
        out,
        keys.get("micro_batch_size"),
        keys.get("cutoff_len"),
        packing="" if packing in ("normal", "dynamic_batching") else "flat",
        multiple=8,
        objective=objective,
    )
    training.attention(out, keys.get("flash_attn"))
    _accumulation(keys, found)
    optim = keys.value("optim_config") or {}
    training.optimizer(out, Given("optim_config.name", optim.get("name"), optim.get("name") or "adamw", not optim))
    training.checkpointing(
        out,
        keys.get("enable_activation_checkpointing"),
        keys.value("enable_activation_checkpointing"),
        Given("use_reentrant", False, False, True),
    )
    kernels = keys.value("kernel_config") or {}
    if "liger" in str(kernels.get("name", "")).lower():
        training.liger(out, keys.get("kernel_config"))
    adapter_facts.reference(out, objective, lora=lora)
    training.loop(out, "plain", "LLaMA-Factory v1")
    keys.finish()
    context.finish(found)


def _sharding(context: Context, keys: Keys) -> Sharding:
    given = keys.get("dist_config")
    found = context.sharding or Sharding()
    name = str((given.value or {}).get("name", "")).lower()
    if name == "fsdp2":
        found.kind, found.version, found.reshard, found.given = "fsdp", 2, True, given
        if str(given.value.get("offload_params", given.value.get("cpu_offload", ""))).lower() == "true":
            found.offload = ("parameters",)
    elif name == "deepspeed":
        context.out.ask("dist_config names a DeepSpeed file: give it too")
        found.kind, found.stage, found.precision, found.given = "zero", 3, "auto", given
    elif name and name != "ddp":
        raise ConfigError(f"dist_config.name in {keys.where} is none of fsdp2, deepspeed and ddp: correct it.")
    if keys.value("cp_size") > 1:
        found.sizes[our.CONTEXT_PARALLEL] = keys.value("cp_size")
    launched(context, found)
    return found


def _quantization(keys: Keys, values: dict[str, Any]) -> None:
    bits = str(values.get("quantization_bit", values.get("bits", 4)))
    double = str(values.get("double_quantization", True)).lower() == "true"
    kind = "int8" if bits == "8" else "nf4-double" if double else "nf4"
    adapter_facts.quantization(keys.out, keys.get("quant_config"), kind)


def _lora(keys: Keys, values: dict[str, Any]) -> None:
    rows = table(
        Key("r", count, 8, our.LORA_RANK, "rank of the adapters"),
        Key("target_modules", anything, "all-linear", our.LORA_TARGETS, "what gets adapters"),
        Key("lora_dropout", anything, 0.0, our.LORA_DROPOUT, "dropout in front of the adapters"),
    )
    inner = Keys(rows, values, f"peft_config of {keys.where}", keys.out)
    adapter_facts.lora(keys.out, inner.get("r"), inner.get("target_modules"), inner.get("lora_dropout"))


def _accumulation(keys: Keys, found: Sharding) -> None:
    total, rows = keys.get("global_batch_size"), keys.value("micro_batch_size")
    if total.value is None:
        keys.out.take(our.GRAD_ACCUM, 1, Given("global_batch_size", None, 1, True), "no accumulation is named")
    elif found.world is None:
        keys.out.ask("global_batch_size sets accumulation by the number of GPUs: give --gpus N and --grad-accum N")
    else:
        keys.out.take(our.GRAD_ACCUM, max(1, total.value // (rows * found.world)), total)
