"""The linear layers of a denoiser whose weights a GGUF file quantizes, each with its type, as diffusers keeps them.

Source: diffusers 0.42.1, quantizers/gguf/gguf_quantizer.py: a linear layer stays packed, whatever else is stored in
fp32 or fp16 takes the dtype of the run.
"""

import re
from collections.abc import Iterable, Mapping

from memcalc.models.spec import ModelSpec
from memcalc.ops.quantized import GGUF_SCRATCH
from memcalc.sources.adapter_options import linear_modules
from memcalc.sources.checkpoint.stored_tensor import StoredTensor
from memcalc.sources.gguf.ggml_types import GGML_TYPES
from memcalc.sources.lora_targets import ORIGINAL
from memcalc.tables.weight_formats import WeightFormat

_BLOCK = re.compile(r"(?P<stack>[a-z_.]+)\.(?P<place>\d+)\.(?P<rest>.+)\.weight")
_STACKS = {
    "double_blocks": "transformer_blocks",
    "single_blocks": "single_transformer_blocks",
    "joint_blocks": "transformer_blocks",
}
_INSIDE = ("", "attn.", "attention.")
"""What a class may put before the names of query, key and value."""
_OF_UNET = re.compile(
    r"(?P<section>input|middle|output|down|mid|up)_block.*?\.(?:transformer_blocks\.\d+\.)?"
    r"(?P<rest>attn[12]\..+?|ff\..+?|proj_in|proj_out|emb_layers\.1|time_emb_proj)(\.weight)?"
)
_SECTIONS = ("input", "down", "middle", "mid", "output", "up")
_SOURCE = "llama.cpp's ggml-common.h"

FORMATS: Mapping[str, WeightFormat] = {
    kind.name: WeightFormat(
        name=kind.name,
        bits=max(1, 8 * kind.nbytes // kind.block),
        block=(kind.block, kind.nbytes),
        kernel="gguf",
        source=_SOURCE,
    )
    for kind in GGML_TYPES.values()
    if kind.name in GGUF_SCRATCH
}
"""GGUF's types that diffusers loads."""


def packed_modules(tensors: Mapping[str, StoredTensor], spec: ModelSpec) -> tuple[dict[str, WeightFormat], list[str]]:
    """The type of each linear layer by its name in diffusers' class, and the quantized tensors that are none.

    tensors: those of the denoiser by their original names.
    """
    there = {name for _, names in linear_modules(spec) for name in names}
    original = ORIGINAL.get(spec.model_type, {})
    by_name = _of_unet(tensors, there) if spec.model_type.startswith("UNet") else {}
    found: dict[str, WeightFormat] = {}
    others = []
    for name, tensor in tensors.items():
        form = FORMATS.get(tensor.dtype)
        if tensor.dtype in ("F32", "F16") or (tensor.dtype == "BF16" and len(tensor.shape or ()) < 2):
            continue
        named = by_name.get(name) or _modules(name, original)
        modules = [] if form is None else [module for module in named if module in there]
        if not modules and tensor.dtype != "BF16":
            others.append(name)
        for module in modules:
            assert form is not None
            found[module] = form
    return found, others


def _of_unet(tensors: Iterable[str], there: Iterable[str]) -> dict[str, list[str]]:
    """The layers of a UNet's transformer blocks, which both namings number in the same order."""
    theirs, ours = (_by_rest(names) for names in (tensors, there))
    return {
        name: [module]
        for rest, names in theirs.items()
        if len(names) == len(ours.get(rest, ()))
        for name, module in zip(names, ours[rest], strict=True)
    }


def _by_rest(names: Iterable[str]) -> dict[str, list[str]]:
    """Names in order by what they are within their block."""
    found: dict[str, list[tuple[tuple[int, ...], str]]] = {}
    for name in names:
        block = _OF_UNET.fullmatch(name)
        if block is not None and not name.endswith(".bias"):
            place = (_SECTIONS.index(block["section"]), *map(int, re.findall(r"\.(\d+)(?=\.)", name)))
            rest = block["rest"].replace("emb_layers.1", "time_emb_proj")
            found.setdefault(rest, []).append((place, name))
    return {rest: [name for _, name in sorted(places)] for rest, places in found.items()}


def _modules(name: str, original: Mapping[str, tuple[str, ...]]) -> list[str]:
    """The layers that a tensor is split into."""
    block = _BLOCK.fullmatch(name)
    if block is None:
        return [name.removesuffix(".weight")]
    stack = _STACKS.get(block["stack"], block["stack"])
    rest = original.get(block["rest"].replace(".", "_"), (block["rest"],))
    return [f"{stack}.{block['place']}.{before}{module}" for module in rest for before in _INSIDE]
