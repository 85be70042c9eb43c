"""Blocks of T5 and its relatives: attention with position biases, plain and gated feed-forward."""

from __future__ import annotations

from memcalc import ops
from memcalc.autograd.tensor import Tensor
from memcalc.common.escaping import quoted
from memcalc.config.reader import Config
from memcalc.errors import ConfigError
from memcalc.nn.kv_cache import Cache
from memcalc.nn.layers.linear import Linear
from memcalc.nn.layers.mlp import activation
from memcalc.nn.layers.norms import RMSNorm
from memcalc.nn.layers.relative_attention import RelativeAttention
from memcalc.nn.module import Module
from memcalc.tables.dtypes import FP16


class FeedForward(Module):
    """wo(dropout(act(wi(x)))), or with a gate wo(dropout(act(wi_0(x)) * wi_1(x))), with norm and residual around it.

    `inner` is what stands in its place.
    """

    scope = "MLP"

    def __init__(self, c: Config, inner: Module | None = None) -> None:
        hidden, width = c.integer("d_model"), c.integer("d_ff")
        if inner is None:
            gated, act = _activation(c)
            inner = GatedDense(hidden, width, act, c) if gated else PlainDense(hidden, width, act, c)
        self.DenseReluDense = inner
        self.layer_norm = RMSNorm(hidden, scale_in="input")
        self.dropout = c.probability("dropout_rate")

    def forward(self, hidden: Tensor) -> Tensor:
        """[b, s, h] to [b, s, h]."""
        forwarded = self.layer_norm(hidden)
        forwarded = self.DenseReluDense(forwarded)
        return ops.add(hidden, ops.dropout(forwarded, self.dropout))


def _activation(c: Config) -> tuple[bool, str]:
    """Whether `feed_forward_proj` asks for a gate, and its activation function."""
    name = c.text("feed_forward_proj")
    if name == "gated-gelu":
        return True, "gelu_new"
    gate, _, act = name.rpartition("-")
    if gate not in ("", "gated"):
        raise ConfigError(
            f"{c.where} gives 'feed_forward_proj' as {quoted(name)}; it must be an activation or gated-<one>."
        )
    return gate == "gated", act


class PlainDense(Module):
    """wo(dropout(act(wi(x))))."""

    def __init__(self, hidden: int, width: int, act: str, c: Config) -> None:
        self.wi = Linear(hidden, width, group="MLP")
        self.wo = Linear(width, hidden, group="MLP")
        self.act = activation(act)
        self.dropout = c.probability("dropout_rate")

    def forward(self, hidden: Tensor) -> Tensor:
        """[..., h] to [..., h]."""
        hidden = self.wi(hidden)
        hidden = self.act(hidden)
        hidden = ops.dropout(hidden, self.dropout)
        hidden = ops.to(hidden, self.wo.weight.dtype)
        return self.wo(hidden)


class GatedDense(Module):
    """wo(dropout(act(wi_0(x)) * wi_1(x)))."""

    def __init__(self, hidden: int, width: int, act: str, c: Config) -> None:
        self.wi_0 = Linear(hidden, width, group="MLP")
        self.wi_1 = Linear(hidden, width, group="MLP")
        self.wo = Linear(width, hidden, group="MLP")
        self.act = activation(act)
        self.dropout = c.probability("dropout_rate")

    def forward(self, hidden: Tensor) -> Tensor:
        """[..., h] to [..., h]."""
        gate = self.act(self.wi_0(hidden))
        linear = self.wi_1(hidden)
        hidden = ops.mul(gate, linear)
        hidden = ops.dropout(hidden, self.dropout)
        hidden = ops.to(hidden, self.wo.weight.dtype)
        return self.wo(hidden)


class SelfAttention(Module):
    """Norm, self-attention, dropout, residual."""

    scope = "attention"

    def __init__(self, c: Config, *, has_bias: bool, decoder: bool, umt5: bool) -> None:
        self.SelfAttention = RelativeAttention(c, has_bias=has_bias, decoder=decoder, causal=decoder, umt5=umt5)
        self.layer_norm = RMSNorm(c.integer("d_model"), scale_in="input")
        self.dropout = c.probability("dropout_rate")

    def forward(
        self, hidden: Tensor, mask: Tensor | None, bias: Tensor | None, cache: Cache | None
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """[b, s, h] to [b, s, h], the bias, and the probabilities."""
        normed = self.layer_norm(hidden)
        out, bias, weights = self.SelfAttention(normed, mask=mask, states=None, bias=bias, cache=cache)
        out = ops.add(hidden, ops.dropout(out, self.dropout))
        return out, bias, weights


class CrossAttention(Module):
    """Norm, attention over the encoder's states, dropout, residual."""

    scope = "attention"

    def __init__(self, c: Config, *, umt5: bool) -> None:
        self.EncDecAttention = RelativeAttention(c, has_bias=False, decoder=True, causal=False, umt5=umt5)
        self.layer_norm = RMSNorm(c.integer("d_model"), scale_in="input")
        self.dropout = c.probability("dropout_rate")

    def forward(
        self, hidden: Tensor, states: Tensor, mask: Tensor | None, bias: Tensor | None, cache: Cache | None
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """[b, s, h] to [b, s, h], the bias, and the probabilities."""
        normed = self.layer_norm(hidden)
        out, bias, weights = self.EncDecAttention(normed, mask=mask, states=states, bias=bias, cache=cache)
        out = ops.add(hidden, ops.dropout(out, self.dropout))
        return out, bias, weights


class T5Block(Module):
    """Self-attention, in a decoder cross-attention, and MLP, or `inner` in its place."""

    scope = "residual stream"

    def __init__(self, c: Config, *, has_bias: bool, decoder: bool, umt5: bool, inner: Module | None = None) -> None:
        self.layer: list[Module] = [SelfAttention(c, has_bias=has_bias, decoder=decoder, umt5=umt5)]
        if decoder:
            self.layer.append(CrossAttention(c, umt5=umt5))
        self.layer.append(FeedForward(c, inner))

    def forward(
        self,
        hidden: Tensor,
        mask: Tensor | None,
        states: Tensor | None = None,
        bias: Tensor | None = None,
        cross_bias: Tensor | None = None,
        states_mask: Tensor | None = None,
        cache: Cache | None = None,
    ) -> tuple[Tensor, tuple[Tensor | None, Tensor | None]]:
        """[b, s, h] to [b, s, h], and both biases. Pure fp16 is kept from overflowing."""
        hidden, own_bias, _ = self.layer[0](hidden, mask=mask, bias=bias, cache=cache)
        if hidden.dtype is FP16:
            bound = ops.finite_bound(hidden)
            hidden = ops.clamp_within(hidden, bound)
        new_cross = None
        if states is not None:
            hidden, new_cross, _ = self.layer[1](hidden, states=states, mask=states_mask, bias=cross_bias, cache=cache)
            if hidden.dtype is FP16:
                bound = ops.finite_bound(hidden)
                hidden = ops.clamp_within(hidden, bound)
        hidden = self.layer[-1](hidden)
        if hidden.dtype is FP16:
            bound = ops.finite_bound(hidden)
            hidden = ops.clamp_within(hidden, bound)
        return hidden, (own_bias, new_cross)
