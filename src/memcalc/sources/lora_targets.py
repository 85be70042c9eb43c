"""Modules of a LoRA file as diffusers loads them: by the names that the denoiser's class gives them.

Layers that the original repositories fuse (query, key and value) get an adapter each. Source: diffusers 0.42.1,
loaders/lora_conversion_utils.py.
"""

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from memcalc.common.assumption import Assumption
from memcalc.errors import ConfigError
from memcalc.models.spec import ModelSpec
from memcalc.sources.adapter import Adapter
from memcalc.sources.adapter_options import linear_modules, lora_options
from memcalc.sources.display_names import shown, some
from memcalc.sources.lora_file import LoraFile

_FLUX: Mapping[str, tuple[str, ...]] = {
    "img_attn_qkv": ("attn.to_q", "attn.to_k", "attn.to_v"),
    "img_attn_proj": ("attn.to_out.0",),
    "txt_attn_qkv": ("attn.add_q_proj", "attn.add_k_proj", "attn.add_v_proj"),
    "txt_attn_proj": ("attn.to_add_out",),
    "img_mlp_0": ("ff.net.0.proj",),
    "img_mlp_2": ("ff.net.2",),
    "txt_mlp_0": ("ff_context.net.0.proj",),
    "txt_mlp_2": ("ff_context.net.2",),
    "img_mod_lin": ("norm1.linear",),
    "txt_mod_lin": ("norm1_context.linear",),
    "linear1": ("attn.to_q", "attn.to_k", "attn.to_v", "proj_mlp"),
    "linear2": ("proj_out",),
    "modulation_lin": ("norm.linear",),
    "processor_qkv_lora1": ("attn.to_q", "attn.to_k", "attn.to_v"),
    "processor_proj_lora1": ("attn.to_out.0",),
    "processor_qkv_lora2": ("attn.add_q_proj", "attn.add_k_proj", "attn.add_v_proj"),
    "processor_proj_lora2": ("attn.to_add_out",),
    "processor_qkv_lora": ("attn.to_q", "attn.to_k", "attn.to_v"),
    "processor_proj_lora": ("proj_out",),
}
_WAN = {
    **{
        f"{attention}_{name}": (f"{ours}.{to}",)
        for attention, ours in (("self_attn", "attn1"), ("cross_attn", "attn2"))
        for name, to in (("q", "to_q"), ("k", "to_k"), ("v", "to_v"), ("o", "to_out.0"))
    },
    "ffn_0": ("ffn.net.0.proj",),
    "ffn_2": ("ffn.net.2",),
}
_SD3 = {
    **{
        f"{stream}_{name}": ours
        for stream, names in (
            (
                "x_block",
                (
                    ("attn_qkv", ("attn.to_q", "attn.to_k", "attn.to_v")),
                    ("attn_proj", ("attn.to_out.0",)),
                    ("attn2_qkv", ("attn2.to_q", "attn2.to_k", "attn2.to_v")),
                    ("attn2_proj", ("attn2.to_out.0",)),
                    ("mlp_fc1", ("ff.net.0.proj",)),
                    ("mlp_fc2", ("ff.net.2",)),
                    ("adaLN_modulation_1", ("norm1.linear",)),
                ),
            ),
            (
                "context_block",
                (
                    ("attn_qkv", ("attn.add_q_proj", "attn.add_k_proj", "attn.add_v_proj")),
                    ("attn_proj", ("attn.to_add_out",)),
                    ("mlp_fc1", ("ff_context.net.0.proj",)),
                    ("mlp_fc2", ("ff_context.net.2",)),
                    ("adaLN_modulation_1", ("norm1_context.linear",)),
                ),
            ),
        )
        for name, ours in names
    }
}
_CHROMA = {**_FLUX, "in_layer": ("linear_1",), "out_layer": ("linear_2",)}
_FLUX2: Mapping[str, tuple[str, ...]] = {
    **{name: modules for name, modules in _FLUX.items() if "_attn_" in name},
    "img_mlp_0": ("ff.linear_in",),
    "img_mlp_2": ("ff.linear_out",),
    "txt_mlp_0": ("ff_context.linear_in",),
    "txt_mlp_2": ("ff_context.linear_out",),
    "linear1": ("attn.to_qkv_mlp_proj",),
    "linear2": ("attn.to_out",),
}
_LUMINA = {"attention_qkv": ("to_q", "to_k", "to_v"), "attention_out": ("to_out.0",)}

ORIGINAL: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    "FluxTransformer2DModel": _FLUX,
    "ChromaTransformer2DModel": _CHROMA,
    "Flux2Transformer2DModel": _FLUX2,
    "WanTransformer3DModel": _WAN,
    "SD3Transformer2DModel": _SD3,
    "Lumina2Transformer2DModel": _LUMINA,
    "ZImageTransformer2DModel": _LUMINA,
}
"""The original names within a block, and those of diffusers' class."""

_BLOCK = re.compile(r"^.*(?:blocks|layers|refiner|attentions|resnets)[._]\d+[._](?:\d+[._])?")

Place = tuple[str, str]
"""Where a module is ("single": in a block of one stream, "block": in another, "": in none), and its name there."""


@dataclass(frozen=True)
class Targets:
    """What is adapted: the rank of most modules, their names or one pattern, and ranks of other modules.

    few: names of which the file has less than the model; missing: modules of the file that are no linear layers of it.
    """

    rank: int
    names: tuple[str, ...]
    pattern: str | None
    ranks: str | None
    few: tuple[str, ...]
    missing: tuple[str, ...]


def options_of(adapter: Adapter, spec: ModelSpec) -> tuple[dict[str, Any], list[Assumption]]:
    """Options of `TrainingSetup` for the LoRA of a file or of an adapter's folder on `spec`, and lines about them.

    Raises ConfigError where it asks for what memcalc does not compute, or has none of the modules of `spec`.
    """
    if not isinstance(adapter, LoraFile):
        return lora_options(adapter, spec)
    found = targets_of(adapter, spec)
    options: dict[str, Any] = {"lora_rank": found.rank, "lora_targets": found.pattern or ",".join(found.names)}
    if found.ranks is not None:
        options["lora_rank_pattern"] = found.ranks
    if adapter.dora:
        options["dora"] = True
    text = f"LoRA of rank {found.rank} on {some(list(found.names), 8)}, as the file's names and shapes say"
    lines = [Assumption("adapter_lora_options", text)]
    if found.few:
        text = f"some blocks alone have adapters on {some(list(found.few), 4)}: they are counted in all"
        lines.append(Assumption("adapter_keys_not_counted", text))
    if found.missing:
        few = some(list(found.missing), 3)
        text = f"{len(found.missing):,} of its modules, which are no linear layers of the model, are not counted: {few}"
        lines.append(Assumption("adapter_keys_not_counted", text))
    return options, lines


def targets_of(adapter: LoraFile, spec: ModelSpec) -> Targets:
    """The modules of `spec` that a LoRA file adapts. Raises ConfigError where it has none of them."""
    own: dict[Place, set[str]] = {}
    there: Counter[Place] = Counter()
    for module, names in linear_modules(spec):
        for name in names:
            own.setdefault(_place(name), set()).add(module)
            there[_kind(name), module] += 1
    original = ORIGINAL.get(spec.model_type, {})
    ranks: dict[Place, Counter[int]] = {}
    missing = []
    for name, factors in adapter.modules.items():
        kind, within = _place(name)
        found = own.get((kind, within)) or original.get(within) or ()
        if not found:
            missing.append(name)
        for module in found:
            ranks.setdefault((kind, module), Counter())[factors.rank] += 1
    if not ranks:
        raise ConfigError(
            f"the adapter's modules ({some(list(adapter.modules), 2)}) are none of {shown(spec.model_type)}'s: it was "
            "trained on another base; give that one."
        )
    each = {module: found.most_common(1)[0][0] for (_, module), found in ranks.items()}
    rank = Counter(each.values()).most_common(1)[0][0]
    odd = ",".join(f"{module}={own_rank}" for module, own_rank in sorted(each.items()) if own_rank != rank)
    few = sorted({module for (kind, module), found in ranks.items() if found.total() < there[kind, module]})
    return Targets(rank, tuple(sorted(each)), _pattern(ranks, there), odd or None, tuple(few), tuple(missing))


def _pattern(ranks: Mapping[Place, object], there: Mapping[Place, int]) -> str | None:
    """A pattern for the whole path, where modules of one name are adapted in one kind of place and not in another."""
    chosen = {module for _, module in ranks}
    if all((kind, module) in ranks for kind, module in there if module in chosen):
        return None
    parts = []
    for kind, start in _STARTS.items():
        names = "|".join(re.escape(module) for own, module in sorted(ranks) if own == kind)
        if names:
            parts.append(f"{start}(?:{names})")
    return "|".join(parts)


_STARTS = {"single": r"single_.*\.\d+\.", "block": r"(?!single_).*\.\d+\.", "": ""}
"""How paths begin in each kind of place."""


def _kind(name: str) -> str:
    if re.match(r"single_|lora_unet_single_", name):
        return "single"
    return "block" if _BLOCK.match(name) else ""


def _place(name: str) -> Place:
    """A module's place, its name in kohya's spelling."""
    return _kind(name), _BLOCK.sub("", name).replace(".", "_")
