"""Which quantization a repository says it has, wherever it says so.

The statement is needed for bit widths and group sizes; what each tensor is, `packing.py` tells from names and shapes.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from memcalc.common.escaping import printable, quoted
from memcalc.config.quantization_checks import check_settings, nameless
from memcalc.errors import ConfigError, UsageError

# Where a config says it, in order. `quantization` is MLX's key, `compression_config` an old one of compressed-tensors.
KEYS = ("quantization_config", "compression_config", "quantization", "quant_config")

# Where it lists the modules that stay wide. Sources: the quantization config classes of Transformers,
# ModelOpt's and Quark's exports.
SKIPPED = (
    "modules_to_not_convert",
    "llm_int8_skip_modules",
    "ignored_layers",
    "ignore",
    "exclude_modules",
    "exclude",
    "skip_modules",
    "linear_weights_not_to_quantize",
)

# How deep to look: `thinker_config.text_config.quantization_config` exists.
DEPTH = 3


@dataclass(frozen=True)
class Quantization:
    """What the repository states; `bits` of a weight is None when it does not say."""

    method: str
    where: str
    bits: int | None
    group_size: int | None
    settings: Mapping[str, Any]
    known: bool

    def __str__(self) -> str:
        method = printable(self.method[:40])  # a word of somebody else's file
        return f"{method} {self.bits}-bit" if self.bits else method


def find_quantization(
    config: Mapping[str, Any] | None, hf_quant: Mapping[str, Any] | None = None
) -> Quantization | None:
    """The quantization of `config`: at the top, or in a nested config such as `text_config`.

    `hf_quant` is the object of `hf_quant_config.json`, which NVIDIA's exporter writes beside or instead of the key.
    """
    for where, settings in _statements(config or {}, "", DEPTH):
        method = _method(settings)
        if method is not None:
            return _described(method, where, settings)
    inner = (hf_quant or {}).get("quantization")
    if isinstance(inner, Mapping) and inner.get("quant_algo"):
        return _described("modelopt", "hf_quant_config.json", inner)
    return None


def with_hf_quant(config: Mapping[str, Any], hf_quant: Mapping[str, Any] | None) -> dict[str, Any]:
    """`config` with what `hf_quant_config.json` beside it says, where it says nothing of it itself."""
    inner = (hf_quant or {}).get("quantization")
    if not isinstance(inner, Mapping) or not inner.get("quant_algo"):
        return dict(config)
    found = config.get("quantization_config")
    if isinstance(found, Mapping) and found:
        missing = {key: value for key, value in inner.items() if key not in found and key.startswith("kv_cache")}
        return {**config, "quantization_config": {**found, **missing}}
    if find_quantization(config) is not None:
        return dict(config)
    return {**config, "quantization_config": {"quant_method": "modelopt", **inner}}


def quantized_once(config: Mapping[str, Any], asked: str) -> Quantization | None:
    """The quantization of `config`.

    Raises:
        UsageError: `asked` (of --quantization) would quantize it again.
        ConfigError: what the config says of it cannot be.
    """
    for where, settings in _statements(config, "", DEPTH):
        check_settings(settings, where)
        if _method(settings) is None and (problem := nameless(settings, where)) is not None:
            raise problem
    stated = find_quantization(config)
    if stated is not None and asked != "none":
        raise UsageError(
            f"the model is quantized already ({stated}), as its config says in {stated.where}; "
            "leave out --quantization, or take the model that it was made from."
        )
    return stated


def _statements(config: Mapping[str, Any], path: str, depth: int) -> Iterator[tuple[str, Mapping[str, Any]]]:
    for key in KEYS:
        value = config.get(key)
        if isinstance(value, Mapping):
            yield path + key, value
        elif key == KEYS[0] and value:  # an empty one says nothing, to Transformers too
            raise ConfigError(
                f"config.json gives '{path}{key}' as {quoted(value)}, but it must be an object; correct it."
            )
    if depth:
        for key, value in config.items():
            if isinstance(value, Mapping) and key not in KEYS:
                yield from _statements(value, f"{path}{key}.", depth - 1)


def _method(settings: Mapping[str, Any]) -> str | None:
    """The method's name; several writers leave `quant_method` out, and are known by their other keys."""
    named = settings.get("quant_method")
    if isinstance(named, str) and named.strip():
        return named.strip().lower().replace("_", "-").removeprefix("intel/")
    if settings.get("load_in_4bit") or settings.get("load_in_8bit"):
        return "bitsandbytes"
    producer = settings.get("producer")
    if settings.get("quant_algo") or (isinstance(producer, Mapping) and producer.get("name") == "modelopt"):
        return "modelopt"
    if "config_groups" in settings:
        return "compressed-tensors"
    if not _OF_AWQ.isdisjoint(settings):
        return "awq"
    if "bits" in settings and "group_size" in settings:
        return "mlx" if _OF_GPTQ.isdisjoint(settings) else "gptq"
    return None


_OF_AWQ = frozenset(("w_bit", "q_group_size", "zero_point"))
_OF_GPTQ = frozenset(("desc_act", "damp_percent", "true_sequential", "static_groups", "sym"))
"""Keys that AutoAWQ's and AutoGPTQ's own files have, whose first versions named no method; MLX has none of them."""


def _described(method: str, where: str, settings: Mapping[str, Any]) -> Quantization:
    read = BITS_OF.get(method)
    if read and settings.get("bits") is not None and _integer(settings["bits"]) is None:
        given = quoted(settings["bits"])
        raise ConfigError(
            f"config.json gives 'bits' in '{where}' as {given}, but it must be a whole number; correct it."
        )
    bits = read(settings) if read else _integer(settings.get("bits"))
    group = _group_size(settings)
    return Quantization(method, where, bits, group, MappingProxyType(dict(settings)), read is not None)


def _integer(value: Any) -> int | None:
    if isinstance(value, str) and value.strip().isdigit():
        return int(value)
    return value if type(value) is int and value > 0 else None


def _group_size(settings: Mapping[str, Any]) -> int | None:
    for holder in (settings, *_weight_groups(settings), _nested(settings, "quant_config", "weight_quant_params")):
        found = _integer(holder.get("group_size", holder.get("q_group_size")))
        if found:
            return found
    return None


def weight_layouts(settings: Mapping[str, Any]) -> list[tuple[int, int | None]]:
    """(bits, group size) of every weight group that compressed-tensors settings name."""
    pairs = [(_integer(g.get("num_bits")), _integer(g.get("group_size"))) for g in _weight_groups(settings)]
    return [(bits, group) for bits, group in pairs if bits]


def _weight_groups(settings: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    groups = settings.get("config_groups")
    values = list(groups.values()) if isinstance(groups, Mapping) else []
    weights = [group.get("weights") for group in values if isinstance(group, Mapping)]
    return [entry for entry in weights if isinstance(entry, Mapping)]


def _nested(settings: Mapping[str, Any], *keys: str) -> Mapping[str, Any]:
    for key in keys:
        value = settings.get(key)
        settings = value if isinstance(value, Mapping) else {}
    return settings


def _plain(settings: Mapping[str, Any]) -> int | None:
    return _integer(settings.get("bits", settings.get("w_bit")))


def _bitsandbytes(settings: Mapping[str, Any]) -> int | None:
    return 4 if settings.get("load_in_4bit") else 8 if settings.get("load_in_8bit") else None


def _grouped(settings: Mapping[str, Any]) -> int | None:
    return next((bits for bits, _ in weight_layouts(settings)), None)


def _modelopt(settings: Mapping[str, Any]) -> int | None:
    algorithm = str(settings.get("quant_algo") or "").upper()
    return _grouped(settings) or (4 if "FP4" in algorithm or "W4" in algorithm else 8 if "8" in algorithm else None)


def _hqq(settings: Mapping[str, Any]) -> int | None:
    return _integer(_nested(settings, "quant_config", "weight_quant_params").get("nbits")) or _plain(settings)


def _word(key: str) -> Callable[[Mapping[str, Any]], int | None]:
    """The bits in a word such as `int4`, `qint8`, `float8` or `int4_weight_only`."""

    def read(settings: Mapping[str, Any]) -> int | None:
        value = settings.get(key)
        text = str(value).lower()
        return next((bits for bits in (2, 4, 8) if f"int{bits}" in text or f"float{bits}" in text), None)

    return read


def _fixed(bits: int) -> Callable[[Mapping[str, Any]], int | None]:
    return lambda _: bits


# How each known method states the bits of a weight. Source: the quantization config classes of Transformers
# (utils/quantization_config.py), NVIDIA ModelOpt's export and MLX's converter. Add a row for a new method.
BITS_OF: Mapping[str, Callable[[Mapping[str, Any]], int | None]] = MappingProxyType(
    {
        "gptq": _plain,
        "awq": _plain,
        "auto-round": _plain,
        "mlx": _plain,
        "bitsandbytes": _bitsandbytes,
        "compressed-tensors": _grouped,
        "modelopt": _modelopt,
        "hqq": _hqq,
        "quanto": _word("weights"),
        "torchao": _word("quant_type"),
        "eetq": _fixed(8),
        "fp8": _fixed(8),
        "fbgemm-fp8": _fixed(8),
        "mxfp4": _fixed(4),
        "bitnet": _fixed(2),
        "aqlm": lambda _: None,
        "quark": lambda _: None,
    }
)
