"""The only place that divides by a parallel size: the shapes that one GPU of a tensor-parallel group holds.

Megatron's scheme, as the serving engines use it: attention heads, MLP and expert widths and the vocabulary are divided;
key-value heads are divided too, or, where there are fewer of them than GPUs, each GPU keeps a copy of one. Norms and
whatever else has the hidden size stay whole. The report is for the most loaded GPU.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from memcalc.common.assumption import Assumption
from memcalc.config.reader import Config
from memcalc.errors import UsageError
from memcalc.nn.module import Module

EXPERT_WIDTH = "moe_intermediate_size"

_WIDTHS = (
    "intermediate_size",
    "moe_intermediate_size",
    "shared_expert_intermediate_size",
    "ffn_hidden_size",
    "n_inner",
    "ffn_dim",
    "d_ff",
    "linear_num_key_heads",
    "linear_num_value_heads",
)
"""Keys of MLP widths and of heads of linear attention, divided exactly."""

_FOUR_TIMES = ("n_inner", "intermediate_size")
"""Keys of MLP widths that are four times the hidden size where the config has none (GPT-2, GPT-Neo)."""

VOCABULARY_MULTIPLE = 64
"""Engines pad the vocabulary to a multiple of this before they divide it (vLLM's DEFAULT_VOCAB_PADDING_SIZE)."""


def tensor_parallel(
    config: Config, size: int, *, padded: bool = True, experts: bool = True, attention: int | None = None
) -> tuple[Mapping[str, Any], list[Assumption]]:
    """The config of one GPU's share of a model over `size` GPUs, and what to say about it.

    `padded` says whether the vocabulary is padded first, as serving engines do, `experts` whether those of a mixture
    are divided by their width, `attention` over how many GPUs heads are divided, where they are fewer.

    Raises UsageError where heads or a width cannot be divided.
    """
    if size == 1:
        return config.values, []
    if not (config.has("num_attention_heads") and config.has("vocab_size")):
        raise unknown_division(size, "model")
    heads, of_heads = config.integer("num_attention_heads"), attention or size
    if heads % of_heads:
        raise UsageError(
            f"--tensor-parallel-size {of_heads} does not divide the {heads} attention heads; take a size that does."
        )
    local: dict[str, Any] = {**config.values, "head_dim": config.head_dim()}
    _put(config, local, "num_attention_heads", heads // of_heads)
    notes = [
        Assumption("tensor_parallel", f"tensor parallel over {size} GPUs: the report is for one of them"),
        Assumption(
            "communication_buffers",
            "communication buffers outside PyTorch: NCCL's are counted (--nccl-buffers), an engine's custom all-reduce "
            "and symmetric memory only in vLLM's pool; one published log has 1.8 GiB of all of them on two GPUs",
        ),
    ]
    kv_heads = config.integer("num_key_value_heads", heads)
    if kv_heads % of_heads and of_heads % kv_heads:
        raise UsageError(
            f"--tensor-parallel-size {of_heads} neither divides the {kv_heads} key-value heads nor is a multiple of "
            f"them; take one that does or is."
        )
    if kv_heads < of_heads:
        notes.append(
            Assumption(
                "key_value_heads_copied",
                f"{kv_heads} key-value heads over {of_heads} GPUs: each GPU keeps a copy of one",
            )
        )
    _put(config, local, "num_key_value_heads", max(1, kv_heads // of_heads))
    for key in _WIDTHS:
        width = config.get(key)
        if isinstance(width, int) and (experts or key != EXPERT_WIDTH):
            if width % size:
                raise UsageError(
                    f"--tensor-parallel-size {size} does not divide {key!r} {width}; take a size that does."
                )
            _put(config, local, key, width // size)
    if not any(isinstance(config.get(key), int) for key in _WIDTHS):
        for key in _FOUR_TIMES:
            _put(config, local, key, 4 * config.integer("hidden_size") // size)
    vocabulary = config.integer("vocab_size")
    multiple = VOCABULARY_MULTIPLE if padded else 1
    _put(config, local, "vocab_size", -(-vocabulary // (multiple * size)) * multiple)
    return local, notes


def check_divided(whole: Module, local: Module, size: int) -> None:
    """Refuse a model of which a part stayed whole in its share: its config names a width that is not known here.

    Raises UsageError.
    """
    if size == 1:
        return
    shares = _matrices(local)
    for group, count in _matrices(whole).items():
        if count == shares.get(group):
            raise unknown_division(size, group)


def unknown_division(size: int, what: str) -> UsageError:
    """The error for a family whose `what` is divided in a way that is not described here."""
    return UsageError(
        f"memcalc does not know how the {what} of this family is divided over {size} GPUs; leave out "
        "--tensor-parallel-size."
    )


def _matrices(network: Module) -> dict[str, int]:
    """Weights in matrices by group."""
    counts: dict[str, int] = {}
    for _, parameter in network.parameters():
        if len(parameter.shape) > 1:
            counts[parameter.group] = counts.get(parameter.group, 0) + parameter.numel * parameter.copies
    return counts


def _put(config: Config, local: dict[str, Any], key: str, value: int) -> None:
    """Set `key`, whatever name the config gave it."""
    for alias, target in config.aliases.items():
        if target == key:
            local.pop(alias, None)
    local[key] = value


def proportional_bytes(nbytes: int, local: int, whole: int) -> int:
    """One GPU's part of `nbytes` bytes of weights, of whose `whole` parameters it holds `local`."""
    return -(-nbytes * local // whole)
