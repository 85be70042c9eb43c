"""Nemotron Super and Ultra (DeciLM): Llama whose blocks differ in key-value heads and widths, or lack a part.

The code is the repository's own (modeling_decilm.py); llama.cpp's converter (`DeciModel`) computes the same widths.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from memcalc import ops
from memcalc.autograd.tensor import Tensor
from memcalc.config.reader import Config
from memcalc.errors import ConfigError
from memcalc.models.common.decoder import dense_decoder
from memcalc.models.family import Family, llama_sizes, table
from memcalc.nn.layers.grouped_query_attention import GroupedQueryAttention
from memcalc.nn.layers.linear import Linear
from memcalc.nn.layers.mlp import GatedMLP
from memcalc.nn.layers.rotary import Rotation
from memcalc.nn.model import Network
from memcalc.nn.module import Module

_MULTIPLE = 256
"""MLPs are as wide as a multiple of it."""


class Skipped(Module):
    """In place of an attention or an MLP that a block does not have."""

    window: int | None = None


class LinearInPlace(Module):
    """One matrix in place of attention or MLP."""

    window: int | None = None

    def __init__(self, hidden: int, group: str) -> None:
        self.linear_attn = Linear(hidden, hidden, group=group)

    def forward(self, hidden: Tensor, *_ignored: object) -> Any:
        """[b, s, h] to [b, s, h]."""
        out = self.linear_attn(hidden)
        return (out, None) if _ignored else out


class DeciBlock(Module):
    """Norm, attention, add; norm, MLP, add; each half only where the block has it."""

    scope = "residual stream"

    def __init__(self, attention: Module, mlp: Module, norm: Callable[[], Module]) -> None:
        self.self_attn = attention
        self.input_layernorm = None if isinstance(attention, Skipped) else norm()
        self.mlp = mlp
        self.post_attention_layernorm = None if isinstance(mlp, Skipped) else norm()

    def forward(self, hidden: Tensor, rotation: Rotation, mask: Tensor | None, position_ids: Tensor) -> Tensor:
        """[b, s, h] to [b, s, h]."""
        if self.input_layernorm is not None:
            residual = hidden
            hidden = self.input_layernorm(hidden)
            hidden, _weights = self.self_attn(hidden, rotation, mask)
            hidden = ops.add(residual, hidden)
        if self.post_attention_layernorm is not None:
            residual = hidden
            hidden = self.post_attention_layernorm(hidden)
            hidden = self.mlp(hidden)
            hidden = ops.add(residual, hidden)
        return hidden


def _halves(c: Config) -> list[tuple[Config, Config]]:
    """The config of attention and of the MLP of every block."""
    given, depth = c.items("block_configs") or [], c.integer("num_hidden_layers")
    if len(given) != depth:
        raise ConfigError(
            f"{c.where} has {len(given)} 'block_configs' but {depth} 'num_hidden_layers'; they must agree."
        )
    found = []
    for index, block in enumerate(given):
        if not isinstance(block, dict):
            raise ConfigError(f"{c.where} has 'block_configs' that are no objects; correct them.")
        whole = Config(block, where=f"block {index} of {c.where}'s 'block_configs'")
        found.append((whole.nested("attention", {}), whole.nested("ffn", {})))
    return found


def _attention(c: Config, options: Config) -> Module:
    if options.flag("no_op"):
        return Skipped()
    hidden, heads = c.integer("hidden_size"), c.integer("num_attention_heads")
    if options.flag("replace_with_linear"):
        return LinearInPlace(hidden, "attention")
    if options.has("window_length") or options.has("num_sink_tokens") or options.has("sparsify"):
        raise ConfigError(
            f"{options.where} asks for a window, sinks or sparsity, which memcalc does not describe here; remove it."
        )
    group = options.integer("n_heads_in_group")
    if heads % group:
        raise ConfigError(
            f"{options.where} has 'n_heads_in_group' {group}, which does not divide {heads} heads; correct it."
        )
    bias = c.flag("attention_bias")
    dropout = c.probability("attention_dropout", 0.0)
    return GroupedQueryAttention(
        hidden, heads, heads // group, hidden // heads, bias=bias, out_bias=bias, dropout=dropout
    )


def _mlp(c: Config, options: Config) -> Module:
    if options.flag("no_op"):
        return Skipped()
    hidden = c.integer("hidden_size")
    if options.flag("replace_with_linear"):
        return LinearInPlace(hidden, "MLP")
    width = int(2 * options.factor("ffn_mult") * hidden / 3)
    width += -width % _MULTIPLE
    return GatedMLP(hidden, width, c.text("hidden_act"), bias=c.flag("mlp_bias"))


def nemotron_nas(c: Config, architecture: str | None) -> Network:
    """Llama-Nemotron Super and Ultra."""
    halves = _halves(c)
    made: dict[str, Callable[[], Module]] = {}

    def mlp(attention: Config, ffn: Config) -> Callable[[], Module]:
        """What makes the MLP: the same function for blocks that are alike, which a stack tells kinds by."""
        return made.setdefault(f"{dict(attention.values)} {dict(ffn.values)}", lambda: _mlp(c, ffn))

    return dense_decoder(
        c.replaced(num_key_value_heads=None, intermediate_size=None),
        architecture,
        make_attention=lambda layer: _attention(c, halves[layer][0]),
        mlp=[mlp(*half) for half in halves],
        block=DeciBlock,
    )


FAMILIES = table(
    Family(
        "nemotron-nas",
        nemotron_nas,
        llama_sizes((128256, 8192, 0, 80, 64, 0, 131072)),
        verified="exact counts; tensors as Transformers' llama keeps them",
        attention_assumed=True,
    )
)
