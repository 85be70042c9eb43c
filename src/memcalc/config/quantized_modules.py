"""Which modules of a quantized repository are quantized, and to what: its lists, patterns and exceptions by name.

Each library writes such a list its own way: Transformers takes names and regular expressions that end at a dot,
compressed-tensors exact names and `re:` patterns, ModelOpt and Quark shell patterns, GPTQ `dynamic` rules. Names are
compared with and without the prefix that a multimodal model puts before its decoder's.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from fnmatch import translate
from functools import cache
from typing import Any

from memcalc.common.escaping import quoted
from memcalc.common.patterns import SlowPattern, compiled
from memcalc.config.quantization import SKIPPED, Quantization
from memcalc.errors import ConfigError

ModuleQuantization = Callable[[str], Quantization | None]
"""What a module of this name is quantized to; None where it stays wide."""

_OUTER = ("model", "language_model", "text_model", "thinker", "module")
_TOWER = re.compile(
    r"(vision|visual|vit\b|vpm|image|audio|speech|whisper|multi_modal|mm_projector|mlp1\b|connector|merger|projector|"
    r"aligner|resampler|embed_vision|embed_audio)"
)
_GLOBS = ("modelopt", "quark", "compressed-tensors")
"""Methods whose lists hold shell patterns; those of the others hold regular expressions."""

_BY_BLOCK = ("gptq", "auto-round")
"""Methods that quantize the layers of the decoder's blocks and nothing else."""


def quantized_modules(stated: Quantization) -> ModuleQuantization:
    """What `stated` makes of each module, by its dotted name without `.weight`.

    Raises ConfigError where a pattern of its lists is no regular expression.
    """
    wide = _Patterns(_listed(stated.settings), globs=stated.method in _GLOBS)
    targets = _targets(stated.settings)
    exceptions = _exceptions(stated)

    @cache
    def quantization_of(name: str) -> Quantization | None:
        names = _names(name)
        if wide.match(names) or (stated.method in _BY_BLOCK and not _in_block(names, stated.settings)):
            return None
        for matched, settings in exceptions:
            if matched(names):
                return settings
        return _of_group(stated, targets, names)

    return quantization_of


_BY_LIST = ("bitsandbytes", "eetq", "quanto", "hqq", "fp8", "fbgemm-fp8", "torchao", "bitnet")
"""Methods whose list of wide modules replaces Transformers' own one, which names the head (quantizers/base.py)."""

_WITH_HEAD = ("compressed-tensors", "modelopt", "quark")
"""Methods that quantize every linear layer which their lists do not name, the head too."""


def quantizes_head(stated: Quantization) -> bool:
    """Whether the head of a language model is quantized where no list keeps it wide; one that is tied never is.

    GPTQ says it by `lm_head` (GPTQModel), auto-round by settings of its own; AWQ leaves it out whatever it lists.
    """
    settings = stated.settings
    if stated.method in _BY_LIST:
        return any(isinstance(settings.get(key), (list, tuple)) for key in SKIPPED)
    extra = settings.get("extra_config")
    own = extra.get("lm_head") if isinstance(extra, Mapping) else None
    return (
        stated.method in _WITH_HEAD
        or (stated.method == "gptq" and settings.get("lm_head") is True)
        or (stated.method == "auto-round" and isinstance(own, Mapping) and (_bits(own) or 16) < 16)
    )


def _listed(settings: Mapping[str, Any]) -> Iterator[str]:
    for key in SKIPPED:
        value = settings.get(key)
        if isinstance(value, (list, tuple)):
            yield from (item.removesuffix(".weight") for item in value if isinstance(item, str) and item)
    for name, value in settings.items():  # MLX: false for a layer that stays wide
        if value is False and "." in name:
            yield name
    dynamic = settings.get("dynamic")
    if isinstance(dynamic, Mapping):
        yield from (f"re:{key[2:]}" for key in dynamic if isinstance(key, str) and key.startswith("-:"))


def _names(name: str) -> tuple[str, ...]:
    """`name` as the several libraries may write it: with and without what stands before the decoder."""
    inner = _stripped(name)
    named = dict.fromkeys((name, inner, f"model.{inner}"))
    if not _TOWER.match(inner):
        outer = ("language_model.", "language_model.model.", "model.language_model.", "thinker.model.")
        named |= dict.fromkeys(f"{prefix}{inner}" for prefix in outer)
    for whole, parts in _EXPERTS.items():
        if inner.endswith(whole):
            stem = inner.removesuffix(whole)
            named |= dict.fromkeys(
                f"{prefix}{stem}.experts.0.{part}"
                for part in parts
                for prefix in ("", "model.", "language_model.model.")
            )
    return tuple(named)


_EXPERTS = {
    ".experts.gate_up_proj": ("gate_proj", "up_proj", "w1", "w3"),
    ".experts.up_proj": ("gate_proj", "up_proj", "w1", "w3"),
    ".experts.down_proj": ("down_proj", "w2"),
}
"""Experts lie in one tensor in Transformers 5, and one by one in lists and files."""


def _stripped(name: str) -> str:
    parts = name.split(".")
    while len(parts) > 1 and parts[0] in _OUTER:
        parts = parts[1:]
    return ".".join(parts)


class _Patterns:
    """Names, shell patterns and regular expressions, of which one has to fit."""

    def __init__(self, patterns: Iterable[str], *, globs: bool) -> None:
        self.plain: set[str] = set()
        begun: set[str] = set()
        expressions: list[str] = []
        for pattern in patterns:
            if pattern.startswith("re:"):
                expressions.append(_expression(pattern[3:]))
            elif not re.search(r"[*?\[\\^$|(+]", pattern):
                self.plain.add(_stripped(pattern))
            elif globs and re.fullmatch(r"[\w.]+\*", pattern):
                begun |= {pattern[:-1], _stripped(pattern[:-1])}
            elif globs:
                expressions += [translate(pattern), translate(_stripped(pattern)), translate(f"{pattern}.*")]
            else:
                expressions.append(rf"(?:{_expression(pattern)})(?:(?<=\.)|(?=\.|$))")
        self.begun = tuple(begun)
        self.expressions = tuple(re.compile(expression) for expression in dict.fromkeys(expressions))

    def match(self, names: tuple[str, ...]) -> bool:
        """Whether a pattern fits one of the names that a module has: as a whole, or as modules around it."""
        if self.plain and any(part in self.plain for name in names for part in _runs(name)):
            return True
        if self.begun and any(name.startswith(self.begun) for name in names):
            return True
        return any(expression.match(name) for expression in self.expressions for name in names)


def _expression(text: str) -> str:
    try:
        compiled(text)
    except SlowPattern:
        raise ConfigError(
            f"config.json lists {quoted(text)} among the modules of its quantization, a pattern that could take for "
            "ever to match; write it simpler."
        ) from None
    except re.error as problem:
        raise ConfigError(
            f"config.json lists {quoted(text)} among the modules of its quantization, which is no regular expression "
            f"({problem.msg}); correct it."
        ) from None
    return text


def _runs(name: str) -> Iterator[str]:
    """Every run of neighbouring parts of a dotted name: `mlp.gate` is one of `layers.0.mlp.gate`."""
    parts = name.split(".")
    for start in range(len(parts)):
        for end in range(start + 1, len(parts) + 1):
            yield ".".join(parts[start:end])


def _in_block(names: tuple[str, ...], settings: Mapping[str, Any]) -> bool:
    """Whether GPTQ quantizes a module: it lies in a block of the decoder, and among those that the config lists."""
    if _TOWER.match(_stripped(names[0])):
        return False
    if settings.get("lm_head") is True and not any(part.isdigit() for part in names[0].split(".")):
        return True
    listed = settings.get("modules_in_block_to_quantize")
    if not isinstance(listed, (list, tuple)) or not listed:
        return True
    inside = {item for group in listed for item in ([group] if isinstance(group, str) else group)}
    return any(name.endswith(f".{item}") for item in inside if isinstance(item, str) for name in names)


def _targets(settings: Mapping[str, Any]) -> list[tuple[_Patterns | None, Mapping[str, Any]]]:
    """compressed-tensors: each group of weights with the modules that it is for; None where it is for all others."""
    groups = settings.get("config_groups")
    found: list[tuple[_Patterns | None, Mapping[str, Any]]] = []
    for group in groups.values() if isinstance(groups, Mapping) else ():
        if isinstance(group, Mapping):
            targets = [item for item in group.get("targets") or () if isinstance(item, str)]
            named = [item for item in targets if item[:1].islower()]  # a class such as Linear begins with a capital
            found.append((_Patterns(named, globs=True) if len(named) == len(targets) and named else None, group))
    return found if len(found) > 1 or any(patterns for patterns, _ in found) else []


def _of_group(
    stated: Quantization, targets: list[tuple[_Patterns | None, Mapping[str, Any]]], names: tuple[str, ...]
) -> Quantization | None:
    if not targets:
        return stated
    fitting = [group for patterns, group in targets if patterns is not None and patterns.match(names)]
    fitting += [group for patterns, group in targets if patterns is None]
    if not fitting or not isinstance(fitting[0].get("weights"), Mapping):
        return None
    return _with(stated, fitting[0]["weights"], {"config_groups": {"group": fitting[0]}})


def _exceptions(stated: Quantization) -> list[tuple[Callable[[tuple[str, ...]], bool], Quantization | None]]:
    """Modules with a quantization of their own: MLX by name, GPTQ `dynamic`, ModelOpt's mixed precision."""
    found: list[tuple[Callable[[tuple[str, ...]], bool], Quantization | None]] = []
    settings = stated.settings
    mixed = settings.get("quantized_layers")
    if isinstance(mixed, Mapping):
        for name, own in mixed.items():
            if isinstance(own, Mapping):
                found.append((_Patterns([str(name)], globs=True).match, _with(stated, {"bits": None}, own)))
        found.append((lambda names: True, None))
        return found
    dynamic = settings.get("dynamic")
    for name, own in (dynamic if isinstance(dynamic, Mapping) else {}).items():
        if isinstance(own, Mapping) and isinstance(name, str) and not name.startswith("-:"):
            pattern = _Patterns([f"re:{name.removeprefix('+:')}"], globs=False)
            found.append((pattern.match, _with(stated, own, own)))
    extra = settings.get("extra_config")
    layers = extra if isinstance(extra, Mapping) else settings if stated.method == "mlx" else {}
    for name, own in layers.items():
        if isinstance(own, Mapping) and "bits" in own and ("." in str(name) or name == "lm_head"):
            wide = _bits(own) is not None and (_bits(own) or 0) >= 16
            pattern = _Patterns([str(name)], globs=False)
            found.append((pattern.match, None if wide else _with(stated, own, own)))
    return found


def _with(stated: Quantization, weights: Mapping[str, Any], own: Mapping[str, Any]) -> Quantization:
    """`stated` with the bits and the group of one module or group of modules."""
    group = weights.get("group_size", stated.group_size)
    return replace(
        stated,
        bits=_bits(weights) if "bits" in weights or "num_bits" in weights else stated.bits,
        group_size=group if type(group) is int and group > 0 else None,
        settings={**stated.settings, **own},
    )


def _bits(settings: Mapping[str, Any]) -> int | None:
    value = settings.get("bits", settings.get("num_bits"))
    return value if type(value) is int and value > 0 else None
