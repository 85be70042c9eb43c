"""axolotl's YAML.

Source: axolotl 0.18 (utils/schemas/*.py, core/builders, loaders/model.py, loaders/patch_manager.py).
"""

from __future__ import annotations

from typing import Any

from memcalc.errors import ConfigError
from memcalc.run_configs import adapter_facts, axolotl_ways, hf_trainer, training
from memcalc.run_configs import option_names as our
from memcalc.run_configs.context import Context
from memcalc.run_configs.keys import Keys, checked, flag
from memcalc.run_configs.known_keys.axolotl_keys import HARMLESS, KEYS
from memcalc.run_configs.mapping import Given
from memcalc.run_configs.sharding import Sharding
from memcalc.setup.conflicts import GRADIENT_PROJECTING

_SHORT = ("flash", "sdp", "flash_attention", "flex", "xformers_attention", "sage_attention")
"""attn_implementation values that recent releases refuse."""

_LEGACY = {
    "flash_attention": "flash",
    "sdp_attention": "sdpa",
    "xformers_attention": "xformers",
    "flex_attention": "flex",
    "eager_attention": "eager",
    "sage_attention": "sage",
}
_RL = {
    "dpo": "dpo",
    "ipo": "dpo",
    "orpo": "orpo",
    "kto": "kto",
    "simpo": "cpo",
    "grpo": "grpo",
    "gdpo": "grpo",
    "ebft": "ebft",
}


def is_axolotl(values: dict[str, Any]) -> bool:
    """Whether a mapping is an axolotl file."""
    marks = {
        "micro_batch_size",
        "sequence_len",
        "adapter",
        "sample_packing",
        "datasets",
        "plugins",
        "pretraining_dataset",
    }
    return "base_model" in values and bool(marks & values.keys())


def read(context: Context) -> None:
    """An axolotl run. Raises ConfigError."""
    out = context.out
    keys = Keys(KEYS, context.values, context.where, out, HARMLESS)
    out.model = keys.value("base_model")
    objective = _objective(keys)
    out.take(our.OBJECTIVE, objective, keys.get("rl"))
    rows = _batch_size(keys)
    found = _sharding(context, keys)
    adapter = keys.get("adapter")
    lora = adapter.value not in (None, "")
    _quantization(keys, adapter)
    _precision(keys, found, lora)
    if lora:
        _lora(keys, adapter)
    name = _attention(keys)
    _lengths(keys, rows, name, objective)
    hf_trainer.optimizer(keys, found, keys.take("gradient_accumulation_steps").value)
    _galore(keys)
    axolotl_ways.checkpointing(keys, found, objective)
    axolotl_ways.loss_and_kernels(keys, found, objective, lora)
    axolotl_ways.trained(keys)
    free = objective == "grpo" and not keys.value("trl").get("beta")
    adapter_facts.reference(
        out, objective, lora=lora, none=free, precomputed=bool(keys.value("precompute_ref_log_probs"))
    )
    for unmodelled in (
        "torch_compile",
        "selective_checkpointing",
        "layer_offloading",
        "tiled_mlp",
        "qat",
        "fp8",
        "relora",
    ):
        if keys.value(unmodelled):
            out.lack(f"{unmodelled} is not modelled")
    training.loop(out, "hf", "axolotl")
    keys.finish(
        {} if lora else {key: "adapter is not set" for key in context.values if key.startswith(("lora_", "peft_"))}
    )
    context.finish(found)


def _objective(keys: Keys) -> str:
    rl = keys.get("rl")
    if rl.value not in (None, ""):
        objective = _RL.get(str(rl.value).lower())
        if objective is None:
            raise ConfigError(f"rl: {rl.shown} is none of axolotl's: use dpo, ipo, orpo, kto, simpo or grpo.")
        return objective
    if keys.value("reward_model") or keys.value("process_reward_model"):
        keys.out.take(our.TASK, "sequence-classification", keys.get("reward_model"))
        keys.out.take(our.NUM_LABELS, keys.value("num_labels") or 1, keys.get("num_labels"))
        return "reward"
    return "sft"


def _batch_size(keys: Keys) -> Given:
    rows, total, accumulation = (
        keys.get("micro_batch_size"),
        keys.get("batch_size"),
        keys.get("gradient_accumulation_steps"),
    )
    if total.default:
        return rows
    if not accumulation.default:
        raise ConfigError(f"{keys.where} gives batch_size and gradient_accumulation_steps: axolotl takes one of them.")
    accumulated = max(1, total.value // rows.value)
    keys.values["gradient_accumulation_steps"] = accumulated
    keys.out.note(total, f"the legacy product per GPU: accumulation {accumulated}")
    return rows


def _sharding(context: Context, keys: Keys) -> Sharding:
    config = keys.value("fsdp_config")
    version = keys.value("fsdp_version")
    if isinstance(config, dict) and version is not None:
        keys.values["fsdp_config"] = {"fsdp_version": version, **config}
    if keys.value("fsdp") in (None, [], "") and not config:
        keys.values.pop("fsdp", None)
    found = hf_trainer.sharding(context, keys, "axolotl", default_version=1)
    for name, option in (
        ("dp_shard_size", our.DATA_PARALLEL),
        ("dp_replicate_size", our.REPLICAS),
        ("tensor_parallel_size", our.TENSOR_PARALLEL),
        ("context_parallel_size", our.CONTEXT_PARALLEL),
        ("expert_parallel_size", our.EXPERT_PARALLEL),
    ):
        given = keys.get(name)
        if given.value and given.value > 1:
            found.sizes[option] = given.value
    return found


def _quantization(keys: Keys, adapter: Given) -> bool:
    four, eight, gptq = keys.get("load_in_4bit"), keys.get("load_in_8bit"), keys.get("gptq")
    if four.value and eight.value:
        raise ConfigError(f"{keys.where} sets both load_in_4bit and load_in_8bit: axolotl takes one of them.")
    if adapter.value == "qlora" and not (four.value or gptq.value):
        raise ConfigError(f"adapter: qlora needs load_in_4bit: true in {keys.where}; axolotl stops there, too.")
    if adapter.value in (None, "") and (four.value or eight.value):
        keys.out.drop(four if four.value else eight, "adapter is not set, and 4- or 8-bit weights are not trained")
        return False
    if gptq.value:
        adapter_facts.quantization(keys.out, gptq, "gptq-4", "a GPTQ checkpoint")
    elif four.value:
        kwargs = keys.value("bnb_config_kwargs")
        kind = str(kwargs.get("bnb_4bit_quant_type", "nf4"))
        double = kwargs.get("bnb_4bit_use_double_quant", True)
        name = (
            "nf4-double" if kind == "nf4" and checked(flag, double, "bnb_4bit_use_double_quant", keys.where) else kind
        )
        adapter_facts.quantization(keys.out, four, name, "double quantization, compute in the model's dtype")
    elif eight.value:
        adapter_facts.quantization(keys.out, eight, "int8", "LLM.int8")
    return bool(four.value or eight.value or gptq.value)


def _precision(keys: Keys, found: Sharding, lora: bool) -> None:
    bf16, fp16 = keys.get("bf16"), keys.get("fp16")
    for old, new in (("bfloat16", bf16), ("float16", fp16)):
        if new.default and keys.value(old):
            given = keys.get(old)
            bf16, fp16 = (given, fp16) if old == "bfloat16" else (bf16, given)
    on = str(bf16.value).lower() in ("true", "auto", "full") and not (
        keys.value("float32") or (bf16.default and fp16.value)
    )
    half = bool(fp16.value) and not on
    adapters = ""
    if lora:
        keeps = keys.value("peft_autocast_adapter_dtype")
        adapters = "fp32" if keeps or half or not on else "bf16"
        adapters = "fp32" if not on else adapters
    if on and str(bf16.value).lower() == "full":
        training.precision(keys.out, bf16, weights="bf16", autocast="", sharding=found, adapters=adapters)
        return
    if on:
        if str(bf16.value).lower() == "auto":
            keys.out.assume("bf16: auto is bf16 where the GPU can: taken as bf16")
        training.precision(keys.out, bf16, weights="bf16", autocast="bf16", sharding=found, adapters=adapters)
    elif half:
        training.precision(
            keys.out, fp16, weights="fp16" if lora else "fp32", autocast="fp16", sharding=found, adapters=adapters
        )
    else:
        training.precision(keys.out, bf16, weights="fp32", autocast="", sharding=found, adapters=adapters)


def _lora(keys: Keys, adapter: Given) -> None:
    if adapter.value not in ("lora", "qlora"):
        keys.out.lack(f"adapter: {adapter.shown} is not modelled: give --lora-rank for a LoRA of your own")
        return
    rank = keys.get("lora_r")
    if rank.value is None:
        raise ConfigError(f"adapter: {adapter.shown} in {keys.where} has no lora_r: axolotl stops there, too.")
    targets, linear = keys.get("lora_target_modules"), keys.get("lora_target_linear")
    named = targets.value
    if linear.value:
        targets = Given("lora_target_linear", True, "all-linear", False, "every linear layer but the output head")
        extra = [name for name in named or () if name in ("embed_tokens", "lm_head")]
        if extra:
            keys.out.lack(f"lora_target_modules adds {', '.join(extra)} to all linear layers: those are left out")
    elif named is None:
        raise ConfigError(
            f"{keys.where} names no LoRA targets: give lora_target_linear or lora_target_modules, as axolotl asks."
        )
    adapter_facts.lora(
        keys.out,
        rank,
        targets,
        keys.get("lora_dropout"),
        saved=keys.get("lora_modules_to_save"),
        dora=keys.get("peft_use_dora"),
    )
    for name in (
        "peft_layers_to_transform",
        "lora_target_parameters",
        "lora_rank_pattern",
        "peft_trainable_token_indices",
    ):
        if keys.value(name):
            keys.out.lack(f"{name} is not modelled: all layers get adapters of one rank")


def _attention(keys: Keys) -> str:
    given = keys.get("attn_implementation")
    if given.default:
        for name, meant in _LEGACY.items():
            legacy = keys.get(name)
            if legacy.value:
                given = Given(name, legacy.raw, meant, False, "the old spelling of attn_implementation")
                break
    elif str(given.value) in _SHORT and str(given.value) != "flex_attention":
        keys.out.assume(f"attn_implementation: {given.shown} is a short name that recent axolotl refuses")
    for name in _LEGACY:
        keys.get(name)
    training.attention(keys.out, given)
    return keys.out.setup[our.ATTENTION]  # type: ignore[no-any-return]


def _lengths(keys: Keys, rows: Given, attention: str, objective: str) -> None:
    packing, cap, pad = keys.get("sample_packing"), keys.get("sequence_len"), keys.get("pad_to_sequence_len")
    if objective == "grpo":
        _generated(keys, rows, cap)
        return
    packed = bool(packing.value) or bool(
        keys.value("pretraining_dataset") and keys.value("pretraining_sample_concatenation")
    )
    if packed and objective == "sft":
        real = keys.get("multipack_real_batches")
        flat = attention == "flash" if real.value is None else not real.value
        training.batch(keys.out, rows, cap, packing="flat" if flat else "rows")
        keys.out.note(packing, "bins of all rows in one" if flat else "rows filled to sequence_len")
        return
    if packing.value:
        keys.out.drop(packing, f"{objective} does not pack")
    if pad.value:
        keys.out.note(pad, "every sample is padded to sequence_len")
        training.batch(keys.out, rows, cap, packing="rows")
        return
    multiple = 1 if not pad.default else keys.value("pad_to_multiple_of") or 64
    training.batch(keys.out, rows, cap, multiple=multiple if objective == "sft" else 1, objective=objective)


def _generated(keys: Keys, rows: Given, cap: Given) -> None:
    block = keys.value("trl")
    length = block.get("max_completion_length") or 512
    given = Given("trl.max_completion_length", length, length, "max_completion_length" not in block)
    keys.out.take(our.BATCH, rows.value, rows, "completions per GPU and forward pass")
    keys.out.take(our.COMPLETION_LENGTH, length, given)
    keys.out.take(our.SEQ_LEN, max(cap.value, length), cap, "prompt and completion together")
    keys.out.assume("the longest prompt cannot be known: took sequence_len for prompt and completion together")
    if block.get("use_vllm") and block.get("vllm_mode") == "colocate":
        keys.out.lack("vLLM beside the trainer takes its share of the GPU, which is not in the estimate")
    given = Given("trl.beta", block.get("beta", 0.0), 0.0, "beta" not in block)
    keys.out.note(given, "a reference model" if block.get("beta") else "no reference model")


def _galore(keys: Keys) -> None:
    if keys.out.setup.get(our.OPTIMIZER) in GRADIENT_PROJECTING:
        given = keys.get("optim_args")
        keys.out.take(our.GALORE_RANK, hf_trainer.galore_rank(given.value), given)
