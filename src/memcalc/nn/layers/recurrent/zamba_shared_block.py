"""Attention and MLP whose weights several layers share, with adapters of low rank for each of those (Zamba 2)."""

from __future__ import annotations

from memcalc import ops
from memcalc.autograd.tensor import Tensor
from memcalc.nn.layers.grouped_query_attention import GroupedQueryAttention
from memcalc.nn.layers.linear import Linear
from memcalc.nn.layers.mlp import activation
from memcalc.nn.layers.norms import RMSNorm
from memcalc.nn.layers.rotary import Rotation, apply_rotary
from memcalc.nn.module import Module


class Adapter(Module):
    """Two linear layers of low rank, added to a weight that several layers share."""

    def __init__(self, inputs: int, rank: int, outputs: int, group: str) -> None:
        self.down = Linear(inputs, rank, group=group)
        self.up = Linear(rank, outputs, group=group)

    def forward(self, x: Tensor) -> Tensor:
        """[..., in] to [..., out]."""
        x = self.down(x)
        return self.up(x)


class SharedAttention(GroupedQueryAttention):
    """Attention over hidden states and embeddings side by side, shared by several layers (Zamba 2).

    rank, uses: rank of the adapters, and the layers that have one; `uses` is empty without adapters.
    use: the layer that this one stands in.
    rotary: queries and keys are rotated.
    """

    def __init__(
        self,
        hidden: int,
        heads: int,
        kv_heads: int,
        *,
        rank: int,
        uses: list[int],
        use: int,
        rotary: bool,
        dropout: float,
    ) -> None:
        both, head_dim = 2 * hidden, 2 * hidden // heads
        super().__init__(both, heads, kv_heads, head_dim, rotate=apply_rotary if rotary else None, dropout=dropout)
        self.o_proj = Linear(heads * head_dim, hidden, group="attention")
        self.adapted = uses.index(use) if uses else None
        for name in ("q", "k", "v") if uses else ():
            setattr(self, f"linear_{name}_adapter_list", [Adapter(both, rank, both, "attention") for _ in uses])

    def _project(self, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        query, key, value = self.q_proj(hidden), self.k_proj(hidden), self.v_proj(hidden)
        if self.adapted is not None:
            q, k, v = (vars(self)[f"linear_{name}_adapter_list"][self.adapted] for name in ("q", "k", "v"))
            query = ops.add(query, q(hidden))
            key = ops.add(key, k(hidden))
            value = ops.add(value, v(hidden))
        query = ops.transpose(self._split(query), 1, 2)
        key = ops.transpose(self._split(key), 1, 2)
        value = ops.transpose(self._split(value), 1, 2)
        return query, key, value, None


class SharedMLP(Module):
    """A gated MLP with gate and up in one projection, to which the adapter of the layer is added."""

    scope = "MLP"

    def __init__(self, hidden: int, width: int, act: str, *, bias: bool, rank: int, uses: list[int], use: int) -> None:
        self.gate_up_proj = Linear(hidden, 2 * width, bias=bias, group="MLP")
        self.down_proj = Linear(width, hidden, bias=bias, group="MLP")
        self.gate_up_proj_adapter_list = [Adapter(hidden, rank, 2 * width, "MLP") for _ in uses]
        self.adapted = uses.index(use)
        self.act = activation(act)

    def forward(self, hidden: Tensor) -> Tensor:
        """[b, s, h] to [b, s, h]."""
        up = self.gate_up_proj(hidden)
        up = ops.add(up, self.gate_up_proj_adapter_list[self.adapted](hidden))
        halves = ops.chunk(up, 2, -1)
        del up
        hidden = ops.mul(self.act(halves[0]), halves[1])
        return self.down_proj(hidden)


class SharedBlock(Module):
    """Attention and MLP over hidden states and embeddings, without a residual stream."""

    def __init__(self, attention: Module, mlp: Module, hidden: int) -> None:
        self.self_attn = attention
        self.feed_forward = mlp
        self.input_layernorm = RMSNorm(2 * hidden)
        self.pre_ff_layernorm = RMSNorm(hidden)

    def forward(self, hidden: Tensor, original: Tensor, mask: Tensor | None, rotation: Rotation | None) -> Tensor:
        """[b, s, h] to [b, s, h]."""
        hidden = ops.cat([hidden, original], -1)
        hidden = self.input_layernorm(hidden)
        hidden, _ = self.self_attn(hidden, rotation, mask)
        hidden = self.pre_ff_layernorm(hidden)
        return self.feed_forward(hidden)  # type: ignore[no-any-return]
