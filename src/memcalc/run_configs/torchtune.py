"""torchtune's YAML and `tune run` lines. Source: torchtune 0.7 (recipes/*.py, recipes/configs, torchtune/models)."""

from __future__ import annotations

import re
from typing import Any

from memcalc.errors import ConfigError
from memcalc.run_configs import adapter_facts, training
from memcalc.run_configs import option_names as our
from memcalc.run_configs.context import Context
from memcalc.run_configs.hf_trainer import launched
from memcalc.run_configs.keys import Key, Keys, count, table
from memcalc.run_configs.known_keys.torchtune_keys import HARMLESS, KEYS, MODEL, MODEL_HARMLESS
from memcalc.run_configs.mapping import Given, Mapping
from memcalc.run_configs.optimizer_names import spelled
from memcalc.run_configs.sharding import Sharding
from memcalc.run_configs.torchtune_shipped import shipped

_LINEAR = {"q_proj": "q_proj", "k_proj": "k_proj", "v_proj": "v_proj", "output_proj": "o_proj", "o_proj": "o_proj"}
_MLP = ("gate_proj", "up_proj", "down_proj")
_COMPONENT = re.compile(r"torchtune\.models\.([a-z0-9_]+)\.(?:(lora|qlora)_)?([a-z0-9_]+)")


def is_torchtune(values: dict[str, Any]) -> bool:
    """Whether any value of a mapping names a component of torchtune."""
    return any(isinstance(v, dict) and str(v.get("_component_", "")).startswith("torchtune.") for v in values.values())


def read(context: Context) -> None:
    """A torchtune recipe. Raises ConfigError."""
    out, values = context.out, _values(context)
    keys = Keys(KEYS, values, context.where, out, HARMLESS)
    adapter, _, size = _model(keys, context)
    found = _sharding(context, keys)
    objective = _objective(keys, context)
    out.take(our.OBJECTIVE, objective, Given("loss", _component(keys.value("loss")), objective))
    model_values = dict(keys.value("model"))
    inner = Keys(MODEL, model_values, f"model of {context.where}", out, MODEL_HARMLESS)
    lora = adapter != ""
    quantized = lora and (adapter == "qlora" or bool(inner.value("quantize_base")))
    if quantized:
        given = inner.get("quantize_base") if adapter != "qlora" else Given("model._component_", f"qlora_{size}", True)
        adapter_facts.quantization(
            out, given, "nf4-double", "torchao's NF4 with quantized scales, as many bytes as nf4-double"
        )
    _precision(keys, found, lora)
    if lora:
        _lora(inner)
    _lengths(keys, objective)
    training.attention(out, Given("attention", None, "flash" if out.setup.get(our.PACKING) else None, True))
    accumulation = keys.take("gradient_accumulation_steps").value
    _optimizer(keys, accumulation, lora, found)
    _checkpointing(keys)
    _loss(keys, objective)
    adapter_facts.reference(out, objective, lora=lora)
    for name, words in (("compile", "torch.compile"), ("quantizer", "quantization-aware training")):
        if keys.value(name) not in (None, False, {}):
            out.lack(f"{words} is not modelled: the estimate is without it")
    for name in ("clip_grad_norm", "checkpointer", "ref_checkpointer", "custom_sharded_layers"):
        keys.get(name)
    training.loop(out, "plain", "torchtune")
    inner.finish(
        {} if lora else {name: "the model has no adapters" for name in model_values if name.startswith("lora_")}
    )
    keys.finish()
    context.finish(found)


def commented(text: str, out: Mapping) -> tuple[str, int | None]:
    """The recipe that the comments of a shipped config name, and the number of GPUs that they say it needs."""
    recipe = re.search(r"^#.*\btune run\b.*?\b([a-z_]+_(?:distributed|single_device))\b", text, re.MULTILINE)
    needs = re.search(r"^#.*\bneeds (\d{1,4}) GPUs", text, re.MULTILINE)
    if recipe is None:
        return "", None
    out.assume(f"the recipe is {recipe[1]}, as a comment of the file says")
    return recipe[1], int(needs[1]) if needs else None


def _component(values: Any) -> str:
    return str(values.get("_component_", "")) if isinstance(values, dict) else str(values)


def _model(keys: Keys, context: Context) -> tuple[str, str, str]:
    given = keys.get("model")
    name = _component(given.value)
    match = _COMPONENT.fullmatch(name)
    if match is None and context.command:
        return _named_config(keys, context)
    if match is None:
        raise ConfigError(
            f"model._component_ in {keys.where} names no model of torchtune: give --model PATH, ID or COUNT."
        )
    family, adapter, function = match[1], match[2] or "", match[3]
    size = function.removeprefix(family).strip("_")
    shown = re.sub(r"(\d+)b", r"\1B", size.replace("_", " ")).replace("0 5B", "0.5B").replace("1 5B", "1.5B")
    keys.out.model = f"{family} {shown}".strip()
    keys.out.note(
        Given("model._component_", name, name), "the shape is torchtune's: --model names the same model elsewhere"
    )
    return adapter, family, function


def _values(context: Context) -> dict[str, Any]:
    """The values, those of a shipped recipe below them where the line names one that is not given."""
    values = dict(context.values)
    named = shipped(context.environment.get("config", "").removesuffix(".yaml"))
    if named is not None:
        context.out.assume(f"took torchtune's shipped config {context.environment['config']}")
    for name, value in (named or {}).items():
        own = values.get(name)
        if isinstance(own, str) and isinstance(value, dict):
            values[name] = {**value, "_component_": own} if own == value.get("_component_") else {"_component_": own}
        elif isinstance(own, dict) and isinstance(value, dict):
            values[name] = {**value, **own}
        else:
            values.setdefault(name, value)
    for name in ("optimizer", "loss"):
        if isinstance(values.get(name), str):
            values[name] = {"_component_": values[name]}
    if "model" not in values and "policy_model" in values:
        values["model"] = values["policy_model"]
    if "model" in values and not {"optimizer", "loss"} & values.keys() and not context.command:
        raise ConfigError(f"{context.where} is a recipe that trains nothing (generation, evaluation or quantization).")
    return values


def _named_config(keys: Keys, context: Context) -> tuple[str, str, str]:
    """`tune run RECIPE --config llama3_2/3B_qlora_single_device`: the file is named, not given."""
    name = context.environment.get("config", "")
    family, _, rest = name.partition("/")
    size = rest.split("_")[0]
    keys.out.model = f"{family} {size}".strip() if rest else None
    if shipped(name) is None:
        keys.out.ask(
            f"the config {name or 'of the recipe'} is named, not given: give its file for what the line leaves out"
        )
    adapter = "qlora" if "qlora" in rest else "lora" if "lora" in rest else ""
    return adapter, family, f"{family}_{size}".lower()


def _sharding(context: Context, keys: Keys) -> Sharding:
    found = context.sharding or Sharding(where=context.where)
    launched(context, found)
    offload = keys.get("fsdp_cpu_offload")
    old = keys.value("fsdp").get("cpu_offload")
    spread = (
        not offload.default
        or old is not None
        or keys.has("custom_sharded_layers")
        or keys.has("tensor_parallel_dim")
        or keys.has("fsdp_reshard_after_forward")
        or "distributed" in context.command
        or (found.world or 1) > 1
    )
    if spread and found.world != 1:
        found.kind, found.version = "fsdp", 2
        found.given = Given("recipe", context.command or "of several GPUs", "fsdp2")
        found.reshard = keys.value("fsdp_reshard_after_forward")
        if keys.value("custom_sharded_layers"):
            given = keys.get("custom_sharded_layers")
            keys.out.take(our.FSDP_WRAP, "parts", given, "embedding and head are units of their own")
        if offload.value or old:
            found.offload = ("parameters",)
        for name, option in (
            ("tensor_parallel_dim", our.TENSOR_PARALLEL),
            ("context_parallel_dim", our.CONTEXT_PARALLEL),
            ("data_parallel_replicate_dim", our.REPLICAS),
        ):
            if keys.value(name) > 1:
                found.sizes[option] = keys.value(name)
    return found


def _objective(keys: Keys, context: Context) -> str:
    name = _component(keys.value("loss")).lower() + " " + context.command.lower()
    for word, objective in (("dpo", "dpo"), ("rso", "dpo"), ("ppo", "ppo"), ("grpo", "grpo"), ("kd", "distillation")):
        if word in name:
            return objective
    return "sft"


def _precision(keys: Keys, found: Sharding, lora: bool) -> None:
    given = keys.get("dtype")
    dtype = training.dtype(given)
    if dtype == "fp16":
        raise ConfigError(f"dtype: fp16 in {keys.where}: torchtune trains in bf16 or fp32 alone.")
    training.precision(
        keys.out, given, weights=dtype, autocast="", sharding=found, adapters=dtype if lora else "", pure=True
    )


def _lora(inner: Keys) -> None:
    modules = [_LINEAR.get(name, name) for name in inner.value("lora_attn_modules")]
    if inner.value("apply_lora_to_mlp"):
        modules.extend(_MLP)
    if inner.value("apply_lora_to_output"):
        modules.append("lm_head")
    given = inner.get("lora_attn_modules")
    targets = Given(
        given.key, given.raw, modules, given.default, "with the MLP's projections" if len(modules) > 4 else ""
    )
    adapter_facts.lora(
        inner.out, inner.get("lora_rank"), targets, inner.get("lora_dropout"), dora=inner.get("use_dora")
    )


def _lengths(keys: Keys, objective: str) -> None:
    tokenizer, dataset = keys.value("tokenizer"), keys.value("dataset")
    raw = tokenizer.get("max_seq_len")
    cap = None
    if raw is not None:
        inner = Keys(
            table(Key("max_seq_len", count, None, our.SEQ_LEN, "cap of a sample")), tokenizer, "tokenizer", keys.out
        )
        cap = inner.get("max_seq_len")
        cap = Given("tokenizer.max_seq_len", cap.raw, cap.value, False, cap.meaning)
    packed = isinstance(dataset, dict) and str(dataset.get("packed", False)).lower() == "true"
    if packed and cap is None:
        raise ConfigError(f"dataset.packed in {keys.where} needs tokenizer.max_seq_len; torchtune stops there, too.")
    training.batch(keys.out, keys.get("batch_size"), cap, packing="rows" if packed else "", objective=objective)
    if packed:
        keys.out.take(
            our.PACKING, True, Given("dataset.packed", True, True), "rows with a block-wise mask (flex attention)"
        )
    else:
        keys.out.setup.pop(our.PADDING_MASK, None)


def _optimizer(keys: Keys, accumulation: int, lora: bool, found: Sharding) -> None:
    values = keys.value("optimizer")
    name = _component(values) or "torch.optim.AdamW"
    fused = values.get("fused")
    row = spelled(name)
    implementation = (
        "fused" if str(fused).lower() == "true" else "foreach" if row.name == "adamw" and row.library == "torch" else ""
    )
    given = Given("optimizer._component_", name, name, not values)
    training.optimizer(keys.out, given, implementation=implementation)
    backward = keys.get("optimizer_in_bwd")
    if backward.value and accumulation > 1:
        raise ConfigError(
            f"optimizer_in_bwd and gradient_accumulation_steps exclude each other in {keys.where}; torchtune stops "
            f"there, too."
        )
    if backward.value and lora:
        keys.out.drop(backward, "the recipes of adapters do not have it")
    elif backward.value:
        keys.take("optimizer_in_bwd")


def _checkpointing(keys: Keys) -> None:
    on, offload = keys.get("enable_activation_checkpointing"), keys.get("enable_activation_offloading")
    mode, every = keys.value("ac_mode"), keys.value("ac_option")
    if mode == "selective" and isinstance(every, int) and every > 1:
        training.checkpointing(
            keys.out, keys.get("ac_mode"), True, Given("use_reentrant", False, False, True), every=every
        )
    else:
        training.checkpointing(keys.out, on, bool(on.value), Given("use_reentrant", False, False, True))
    if offload.value and not on.value:
        raise ConfigError(
            f"enable_activation_offloading needs enable_activation_checkpointing in {keys.where}; torchtune stops "
            f"there, too."
        )
    if offload.value:
        keys.take("enable_activation_offloading")


def _loss(keys: Keys, objective: str) -> None:
    values = keys.value("loss")
    name = _component(values)
    if objective != "sft" or not name:
        return
    if name.endswith(("LinearCrossEntropyLoss", "CEWithChunkedOutputLoss")):
        chunks = values.get("num_output_chunks", 8)
        given = Given("loss._component_", name, name)
        keys.out.take(our.LOSS, our.LOSS_CHUNKED, given, f"cross-entropy in {chunks} chunks of the sequence")
        keys.out.take(
            our.LOSS_CHUNKS,
            chunks if isinstance(chunks, int) else 8,
            Given("loss.num_output_chunks", chunks, chunks, "num_output_chunks" not in values),
        )
