"""The only place that divides by a parallel size: the shapes that one GPU of a tensor-parallel group holds.

Megatron's scheme, as the serving engines use it: attention heads, MLP and expert widths and the vocabulary are divided;
key-value heads are divided too, or, where there are fewer of them than GPUs, each GPU keeps a copy of one. Norms and
whatever else has the hidden size stay whole. The report is for the most loaded GPU.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from memcalc.errors import UsageError
from memcalc.model.config import Config

_WIDTHS = (
    "intermediate_size", "moe_intermediate_size", "shared_expert_intermediate_size", "ffn_hidden_size",
)  # fmt: skip
"""Keys of MLP widths, divided exactly."""

VOCABULARY_MULTIPLE = 64
"""Engines pad the vocabulary to a multiple of this before they divide it (vLLM's DEFAULT_VOCAB_PADDING_SIZE)."""


def tensor_parallel(config: Config, size: int) -> tuple[Mapping[str, Any], list[str]]:
    """The config of one GPU's share of a model over `size` GPUs, and what to say about it.

    Raises UsageError where heads or a width cannot be divided.
    """
    if size == 1:
        return config.values, []
    heads = config.integer("num_attention_heads")
    if heads % size:
        raise UsageError(
            f"--tensor-parallel {size} does not divide the {heads} attention heads; take a size that does."
        )
    local: dict[str, Any] = {**config.values, "head_dim": config.head_dim()}
    _put(config, local, "num_attention_heads", heads // size)
    said = [f"tensor parallel over {size} GPUs: the report is for one of them"]
    kv_heads = config.integer("num_key_value_heads", heads)
    if kv_heads % size and size % kv_heads:
        raise UsageError(
            f"--tensor-parallel {size} neither divides the {kv_heads} key-value heads nor is a multiple of them; take one "
            f"that does or is."
        )
    if kv_heads < size:
        said.append(f"{kv_heads} key-value heads over {size} GPUs: each GPU keeps a copy of one")
    _put(config, local, "num_key_value_heads", max(1, kv_heads // size))
    for key in _WIDTHS:
        width = config.get(key)
        if isinstance(width, int):
            if width % size:
                raise UsageError(f"--tensor-parallel {size} does not divide {key!r} {width}; take a size that does.")
            _put(config, local, key, width // size)
    vocabulary = config.integer("vocab_size")
    padded = -(-vocabulary // (VOCABULARY_MULTIPLE * size)) * VOCABULARY_MULTIPLE
    _put(config, local, "vocab_size", padded)
    return local, said


def _put(config: Config, local: dict[str, Any], key: str, value: int) -> None:
    """Set `key`, whatever name the config gave it."""
    for alias, target in config.aliases.items():
        if target == key:
            local.pop(alias, None)
    local[key] = value


def share(nbytes: int, local: int, whole: int) -> int:
    """One GPU's part of `nbytes` bytes of weights, of whose `whole` parameters it holds `local`."""
    return -(-nbytes * local // whole)
