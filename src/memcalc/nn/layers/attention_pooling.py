"""Pooling by attention (SigLIP): a trained probe attends to all patches, through torch.nn.MultiheadAttention."""

from __future__ import annotations

from memcalc import ops
from memcalc.autograd.tensor import Tensor
from memcalc.nn.layers.linear import Linear
from memcalc.nn.layers.mlp import PlainMLP
from memcalc.nn.layers.norms import LayerNorm
from memcalc.nn.module import Module, Parameter


class MultiheadAttention(Module):
    """torch.nn.MultiheadAttention of one sequence over another, batch first, as it runs where weights are asked for."""

    scope = "attention"

    def __init__(self, hidden: int, heads: int) -> None:
        self.in_proj_weight = Parameter(3 * hidden, hidden, group="attention")
        self.in_proj_bias = Parameter(3 * hidden, group="attention")
        self.out_proj = Linear(hidden, hidden, bias=True, group="attention")
        self.heads = heads

    def _split(self, x: Tensor, length: int, batch: int) -> Tensor:
        return ops.transpose(ops.view(x, length, batch * self.heads, -1), 0, 1)

    def _both(self, query: Tensor, states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Projections where key and value are of the same states."""
        hidden = query.shape[-1]
        of_query, of_both = ops.split(self.in_proj_weight, [hidden, 2 * hidden], 0)
        bias_query, bias_both = ops.split(self.in_proj_bias, [hidden, 2 * hidden], 0)
        projected = ops.linear(query, of_query, bias_query)
        both = ops.linear(states, of_both, bias_both)
        both = ops.view(both, *both.shape[:-1], 2, hidden)
        both = ops.contiguous(ops.squeeze(ops.transpose(ops.unsqueeze(both, 0), 0, -2), -2))
        return projected, ops.select(both, 0), ops.select(both, 0)

    def _three(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        """Projections of query, key and value."""
        weights = ops.chunk(self.in_proj_weight, 3, 0)
        biases = ops.chunk(self.in_proj_bias, 3, 0)
        return tuple(ops.linear(x, weight, bias) for x, weight, bias in zip(inputs, weights, biases, strict=True))

    def forward(
        self, query: Tensor, states: Tensor, values: Tensor | None = None, mask: Tensor | None = None
    ) -> Tensor:
        """Queries [b, l, h] and states [b, n, h], both key and value, to [b, l, h].

        Values may be others. `mask` [b · heads, l, n] is true where nothing is seen.
        """
        hidden = query.shape[-1]
        bias = None if mask is None else ops.empty_like(mask, query.dtype)
        query, states = ops.transpose(query, 1, 0), ops.transpose(states, 1, 0)
        length, batch, _ = query.shape
        seen = states.shape[0]
        if values is None:
            projected, key, value = self._both(query, states)
        else:
            values = ops.transpose(values, 1, 0)
            projected, key, value = self._three(query, states, values)
        heads = self._split(projected, length, batch)
        key, value = self._split(key, seen, batch), self._split(value, seen, batch)
        scaled = ops.mul_scalar(heads)
        key_transposed = ops.transpose(key, -2, -1)
        weights = ops.bmm(scaled, key_transposed) if bias is None else ops.baddbmm(bias, scaled, key_transposed)
        weights = ops.softmax(weights)
        out = ops.bmm(weights, value)
        out = ops.view(ops.contiguous(ops.transpose(out, 0, 1)), length * batch, hidden)
        out = self.out_proj(out)
        out = ops.view(out, length, batch, hidden)
        weights = ops.view(weights, batch, self.heads, length, seen)
        mean = ops.mean(weights, 1, keepdim=False)
        del mean
        return ops.transpose(out, 1, 0)


class AttentionPooling(Module):
    """The probe's attention, and an MLP with a residual after it."""

    def __init__(self, hidden: int, heads: int, width: int, act: str) -> None:
        self.probe = Parameter(1, 1, hidden, group="head")
        self.attention = MultiheadAttention(hidden, heads)
        self.layernorm = LayerNorm(hidden)
        self.mlp = PlainMLP(hidden, width, act, names=("fc1", "fc2"), bias=True)

    def forward(self, hidden: Tensor) -> Tensor:
        """[b, n, h] to [b, h]."""
        probe = ops.repeat(self.probe, hidden.shape[0])
        hidden = self.attention(probe, hidden)
        residual = hidden
        hidden = self.layernorm(hidden)
        hidden = ops.add(residual, self.mlp(hidden))
        return ops.select(hidden, 1)
