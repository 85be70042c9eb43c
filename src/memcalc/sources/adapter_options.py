"""What an adapter_config.json asks for, in the words of memcalc's options: used, or refused by its name.

Source: PeftConfig and LoraConfig of PEFT 0.21 (peft/config.py, peft/tuners/lora/config.py).
"""

import re
from collections.abc import Iterator, Mapping
from typing import Any

from memcalc.common.assumption import Assumption
from memcalc.common.patterns import SlowPattern, compiled
from memcalc.errors import ConfigError
from memcalc.models.build import build
from memcalc.models.spec import ModelSpec
from memcalc.nn.layers.linear import Conv1D, Embedding, Linear
from memcalc.nn.state_dict import weights_by_stack
from memcalc.sources.adapter import Adapter
from memcalc.sources.display_names import shown, some
from memcalc.sources.file_selection import ADAPTER_CONFIG

NAMES: Mapping[str, str] = {
    "ADALORA": "AdaLoRA",
    "IA3": "IA3",
    "LOHA": "LoHa",
    "LOKR": "LoKr",
    "VERA": "VeRA",
    "OFT": "OFT",
    "BOFT": "BOFT",
    "PROMPT_TUNING": "prompt tuning",
    "MULTITASK_PROMPT_TUNING": "multitask prompt tuning",
    "P_TUNING": "p-tuning",
    "PREFIX_TUNING": "prefix tuning",
    "ADAPTION_PROMPT": "LLaMA-Adapter",
    "LN_TUNING": "LayerNorm tuning",
    "XLORA": "X-LoRA",
}
"""PEFT's kinds of adapters that are not LoRA, as people write them; others go by PEFT's own name."""

_BIASES = {"none": "none", "all": "all", "lora_only": "lora-only"}

_MADE_BEFORE = re.compile(r"pissa(_niter_\d{1,4})?|olora|corda|eva|lora_ga|orthogonal|gaussian")
"""Ways of making the first adapter that leave it and its base as large as any: what they take is over by then."""

_NAME = re.compile(r"[\w.-]{1,200}", re.ASCII)

_READ = ("peft_type", "r", "target_modules", "lora_dropout", "bias", "lora_bias", "use_dora", "modules_to_save")
_SCALES = ("lora_alpha", "alpha_pattern", "use_rslora", "fan_in_fan_out", "runtime_config", "inference_mode")
_STARTS = ("init_lora_weights", "loftq_config", "eva_config", "corda_config", "lora_ga_config", "qalora_group_size")
_ABOUT = ("task_type", "base_model_name_or_path", "revision", "auto_mapping", "peft_version", "megatron_core")
_WITHOUT_EFFECT = frozenset((*_READ, *_SCALES, *_STARTS, *_ABOUT))
"""Keys that are read here, and keys that change no memory: scales, and what the file is about."""

_REFUSED: Mapping[str, str] = {
    "target_parameters": "adapts parameters that belong to no linear layer",
    "layers_to_transform": "adapts some layers only",
    "layers_pattern": "adapts some layers only",
    "exclude_modules": "leaves modules out",
    "rank_pattern": "gives modules ranks of their own",
    "trainable_token_indices": "trains single rows of the embedding",
    "layer_replication": "repeats layers",
    "megatron_config": "splits layers between GPUs",
    "use_qalora": "adapts groups of a quantized layer (QALoRA)",
    "use_bdlora": "makes the factors block-diagonal (BD-LoRA)",
    "alora_invocation_tokens": "adapts only what follows some tokens (aLoRA)",
    "arrow_config": "chooses among adapters (Arrow)",
    "velora_config": "compresses activations (VeLoRA)",
    "monteclora_config": "samples the adapter (MonteCLoRA)",
    "kasa_config": "cuts the base weights (KaSA)",
}
"""Keys of a LoraConfig that change what is trained or kept, and that memcalc does not compute."""


def check_kind(adapter: Adapter) -> None:
    """Raise ConfigError for an adapter that is no LoRA: it would be taken for something that it is not."""
    if adapter.kind == "LORA":
        return
    if adapter.kind == "unknown":
        raise ConfigError(f"{ADAPTER_CONFIG} does not say which kind of adapter this is ('peft_type'); correct it.")
    name = NAMES.get(adapter.kind, shown(adapter.kind))
    raise ConfigError(
        f"{ADAPTER_CONFIG} describes an adapter of the kind {name}, and memcalc computes LoRA only; merge it into its "
        "base and give the merged model, or give the base alone."
    )


def lora_options(adapter: Adapter, spec: ModelSpec) -> tuple[dict[str, Any], list[Assumption]]:
    """Options of `TrainingSetup` for the LoRA that `adapter` describes on `spec`, and lines about them.

    Raises:
        ConfigError: a value cannot be, or asks for what memcalc does not compute.
    """
    config = adapter.config
    refuse_others(config)
    rank = _rank(config)
    _check_weights(adapter, rank)
    options: dict[str, Any] = {"lora_rank": rank}
    targets = _targets(config.get("target_modules"), spec)
    if targets:
        options["lora_targets"] = ",".join(targets)
    options |= _dropout(config) | _bias(config)
    if _flag(config, "use_dora"):
        options["dora"] = True
    saved = config.get("modules_to_save")
    if saved:
        options["modules_to_save"] = ",".join(_names(saved, "modules_to_save"))
    default = "" if "r" in config else ", PEFT's default, as it states none"
    where = f" on {some(list(targets), 8)}" if targets else ""
    lines = [Assumption("adapter_lora_options", f"LoRA of rank {rank}{where}{default}, as {ADAPTER_CONFIG} says")]
    odd = [key for key, value in config.items() if _is_given(value) and key not in _WITHOUT_EFFECT | _REFUSED.keys()]
    if odd:
        lines.append(
            Assumption(
                "adapter_keys_not_counted",
                f"{ADAPTER_CONFIG} gives {some(odd)}, which memcalc does not know: not counted",
            )
        )
    started = config.get("init_lora_weights", True)
    if isinstance(started, str):
        lines.append(
            Assumption(
                "adapter_initialization",
                f"the adapter was made by {started} (init_lora_weights): what that takes is over before training",
            )
        )
    return options, lines


def refuse_others(config: Mapping[str, Any]) -> None:
    """Raise ConfigError for what a LoraConfig may ask for beyond plain LoRA."""
    for key, meaning in _REFUSED.items():
        value = config.get(key)
        if value not in (None, False, [], {}, "") and not (
            key == "rank_pattern" and _all_equal(value, config.get("r"))
        ):
            raise ConfigError(
                f"{ADAPTER_CONFIG} gives {key!r}, which {meaning}: memcalc does not compute that; remove it to "
                "estimate plain LoRA."
            )
    started = config.get("init_lora_weights", True)
    if not isinstance(started, bool) and not (isinstance(started, str) and _MADE_BEFORE.fullmatch(started.lower())):
        raise ConfigError(
            f"{ADAPTER_CONFIG} gives 'init_lora_weights' as {shown(_json(started))}, which memcalc does not compute; "
            "remove it to estimate plain LoRA."
        )


def _is_given(value: Any) -> bool:
    return value not in (None, False, [], {}, "")


def _all_equal(pattern: Any, rank: Any) -> bool:
    return isinstance(pattern, Mapping) and all(type(value) is int and value == rank for value in pattern.values())


def _rank(config: Mapping[str, Any]) -> int:
    rank = config.get("r", 8)
    if type(rank) is not int or not 0 < rank <= 2**20:
        raise _wrong("r", rank, "a whole number of at least 1")
    return rank


def _check_weights(adapter: Adapter, rank: int) -> None:
    """Raise ConfigError where the adapter's own weights are of another rank: PEFT would not load them."""
    shapes = adapter.weights.shapes if adapter.weights else {}
    for name, shape in shapes.items():
        if name.endswith((".lora_A.weight", ".lora_embedding_A")) and shape and shape[0] != rank:
            raise ConfigError(
                f"{ADAPTER_CONFIG} gives 'r' as {rank}, but {shown(name)} in the adapter's weights is of rank "
                f"{shape[0]:,}; correct it, or take the config that belongs to these weights."
            )


def _dropout(config: Mapping[str, Any]) -> dict[str, Any]:
    value = config.get("lora_dropout", 0.0)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 1:
        raise _wrong("lora_dropout", value, "a number from 0 to below 1")
    return {"lora_dropout": float(value)} if value else {}


def _bias(config: Mapping[str, Any]) -> dict[str, Any]:
    bias = config.get("bias", "none")
    if not isinstance(bias, str) or bias not in _BIASES:
        raise _wrong("bias", bias, "none, all or lora_only")
    own = _flag(config, "lora_bias")
    if own and bias != "none":
        raise ConfigError(f"{ADAPTER_CONFIG} gives 'lora_bias' and 'bias' {bias}, which PEFT refuses; correct one.")
    return {"lora_bias": "adapter" if own else _BIASES[bias]} if own or bias != "none" else {}


def _flag(config: Mapping[str, Any], key: str) -> bool:
    value = config.get(key)
    if value is not None and not isinstance(value, bool):
        raise _wrong(key, value, "true or false")
    return bool(value)


def _wrong(key: str, value: Any, due: str) -> ConfigError:
    return ConfigError(f"{ADAPTER_CONFIG} gives {key!r} as {shown(_json(value))}, but it must be {due}; correct it.")


def _json(value: Any) -> Any:
    """A value as JSON writes it."""
    words = {None: "null", True: "true", False: "false"}
    return words[value] if value is None or isinstance(value, bool) else repr(value)


def _names(value: Any, key: str) -> list[str]:
    """A list of module names."""
    if not isinstance(value, list) or not all(
        isinstance(item, str) and re.fullmatch(r"[\w.-]+", item) for item in value
    ):
        raise _wrong(key, value, "a list of names of modules")
    return list(dict.fromkeys(value))


def _targets(value: Any, spec: ModelSpec) -> tuple[str, ...]:
    """Names of the modules that get an adapter; () for PEFT's choice for the family."""
    if value is None:
        return ()
    if not isinstance(value, str):
        return tuple(_names(value, "target_modules")) or _no_targets()
    if value.lower() == "all-linear":
        return ("all-linear",)
    try:
        pattern = compiled(value)
    except SlowPattern:
        raise ConfigError(
            f"{ADAPTER_CONFIG} gives 'target_modules' as a pattern that could take for ever to match "
            f"({shown(value)}); list the modules instead."
        ) from None
    except re.error as problem:
        raise ConfigError(
            f"{ADAPTER_CONFIG} gives 'target_modules' as {shown(value)}, which is no regular expression "
            f"({problem.msg}); correct it."
        ) from None
    return _matched(pattern, spec)


def _no_targets() -> tuple[str, ...]:
    raise ConfigError(f"{ADAPTER_CONFIG} lists no 'target_modules', so there is nothing to adapt; correct it.")


def _matched(pattern: re.Pattern[str], spec: ModelSpec) -> tuple[str, ...]:
    """The modules that PEFT would adapt for a pattern: those whose whole name matches, told by the ends of their names.

    Raises:
        ConfigError: it matches none, or tells apart layers whose weights bear the same names.
    """
    chosen: dict[str, set[bool]] = {}
    for module, names in linear_modules(spec):
        for name in names:
            chosen.setdefault(module, set()).add(pattern.fullmatch(name) is not None)
    found = [module for module, answers in chosen.items() if answers == {True}]
    ends = tuple(f".{module}" for module in found)
    mixed = [module for module, answers in chosen.items() if len(answers) > 1]
    mixed += [module for module, answers in chosen.items() if answers == {False} and f".{module}".endswith(ends)]
    if mixed:
        raise ConfigError(
            f"{ADAPTER_CONFIG} adapts some of the modules called {shown(mixed[0])} and not others (target_modules "
            f"{shown(pattern.pattern)}): memcalc adapts all of a name; list names instead."
        )
    if not found:
        raise ConfigError(
            f"{ADAPTER_CONFIG} gives 'target_modules' as the pattern {shown(pattern.pattern)}, which matches no layer "
            "of this model; correct it, or list the modules."
        )
    return tuple(found)


def linear_modules(spec: ModelSpec) -> Iterator[tuple[str, Iterator[str]]]:
    """Every module that LoRA can adapt: its name within its block, and its full names, one a position."""
    for path, positions, weights in weights_by_stack(build(spec)):
        for weight in weights:
            module, _, leaf = weight.name.rpartition(".")
            if leaf == "weight" and module and isinstance(weight.owner, Linear | Conv1D | Embedding):
                yield module, (f"{path}.{position}.{module}" if positions else module for position in positions or (0,))
