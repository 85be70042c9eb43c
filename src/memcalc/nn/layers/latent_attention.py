"""Latent attention: keys and values that are expanded from one compressed vector per token (DeepSeek)."""

from __future__ import annotations

from collections.abc import Callable

from memcalc import ops
from memcalc.autograd.tensor import Tensor
from memcalc.nn.layers.attention_backends import attend
from memcalc.nn.layers.linear import Linear
from memcalc.nn.layers.norms import RMSNorm
from memcalc.nn.module import Module
from memcalc.nn.run_context import run_context

Rotate = Callable[..., tuple[Tensor, Tensor]]
"""Query and key, and the rotary embedding's table, to rotated query and key."""


def rotate_interleaved(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor, dim: int = 1) -> tuple[Tensor, Tensor]:
    """Neighbours share an angle: rotated as even and odd halves, from the first half of the table.

    `dim` is where cos and sin [b, s, d] get their head dimension.
    """
    cos = ops.unsqueeze(ops.narrow(cos, -1, cos.shape[-1] // 2), dim)
    sin = ops.unsqueeze(ops.narrow(sin, -1, sin.shape[-1] // 2), dim)
    query_1, query_2 = ops.slice(query, -1, 2), ops.slice(query, -1, 2)
    key_1, key_2 = ops.slice(key, -1, 2), ops.slice(key, -1, 2)
    query_out = ops.cat(_rotated(query_1, query_2, cos, sin), -1)
    key_out = ops.cat(_rotated(key_1, key_2, cos, sin), -1)
    return query_out, key_out


def _rotated(first: Tensor, second: Tensor, cos: Tensor, sin: Tensor) -> list[Tensor]:
    return [ops.sub(ops.mul(first, cos), ops.mul(second, sin)), ops.add(ops.mul(second, cos), ops.mul(first, sin))]


class LatentAttention(Module):
    """Multi-head latent attention (DeepSeek): the cache has one vector of `kv_rank` and one rotary key a token.

    q_rank: rank of the query's low-rank projection; None: the query has one full projection.
    kv_rank: rank of the latent that keys and values are expanded from.
    nope_dim, rope_dim: elements of a head's query and key without and with rotary embedding.
    value_dim: elements of a head's value.
    bias: the down projections and the output projection have biases.
    dropout: probability of dropout on the attention probabilities.
    rotate: applies the rotary embedding to query and key.
    query_scaling: applied to the rotated queries (Mistral 4).
    """

    scope = "attention"
    window: int | None = None

    def __init__(
        self,
        hidden: int,
        heads: int,
        *,
        q_rank: int | None,
        kv_rank: int,
        nope_dim: int,
        rope_dim: int,
        value_dim: int,
        bias: bool = False,
        dropout: float = 0.0,
        rotate: Rotate = rotate_interleaved,
        query_scaling: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        self.query_scaling = query_scaling
        self.query_dims = [nope_dim, rope_dim]
        self.value_dim = value_dim
        self.kv_dims = [kv_rank, rope_dim]
        self.rotate = rotate
        self.dropout = dropout
        width = heads * (nope_dim + rope_dim)
        if q_rank is None:
            self.q_proj: Linear | None = Linear(hidden, width, group="attention")
        else:
            self.q_proj = None
            self.q_a_proj = Linear(hidden, q_rank, bias=bias, group="attention")
            self.q_a_layernorm = RMSNorm(q_rank)
            self.q_b_proj = Linear(q_rank, width, group="attention")
        self.kv_a_proj_with_mqa = Linear(hidden, kv_rank + rope_dim, bias=bias, group="attention")
        self.kv_a_layernorm = RMSNorm(kv_rank)
        self.kv_b_proj = Linear(kv_rank, heads * (nope_dim + value_dim), group="attention")
        self.o_proj = Linear(heads * value_dim, hidden, bias=bias, group="attention")

    def _query(self, hidden: Tensor) -> Tensor:
        if self.q_proj is not None:
            return self.q_proj(hidden)
        return self.q_b_proj(self.q_a_layernorm(self.q_a_proj(hidden)))

    def _compressed(self, hidden: Tensor, query: Tensor, rotation: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Query without and with rotation [b, h, s, d], latent and rotary key [b, 1, s, d], and the projection that the
        last two are cut from, which stays bound in forward."""
        batch, length, _ = hidden.shape
        query = ops.transpose(ops.view(query, batch, length, -1, sum(self.query_dims)), 1, 2)
        query_pass, query_rot = ops.split(query, self.query_dims, -1)
        compressed = self.kv_a_proj_with_mqa(hidden)
        latent, key_rot = ops.split(compressed, self.kv_dims, -1)
        latent = self.kv_a_layernorm(latent)
        latent = ops.view(latent, batch, 1, length, -1)
        key_rot = ops.view(key_rot, batch, 1, length, -1)
        query_rot, key_rot = self.rotate(query_rot, key_rot, *rotation)
        return query_pass, query_rot, latent, key_rot, compressed

    def _expand(self, latent: Tensor, key_rot: Tensor) -> tuple[Tensor, Tensor]:
        """Keys [b, h, s, nope + rope] and values [b, h, s, value] from the latent [b, 1, s, rank] and rotary key."""
        nope_dim, rope_dim = self.query_dims
        batch, _, length, _ = latent.shape
        expanded = ops.view(self.kv_b_proj(latent), batch, length, -1, nope_dim + self.value_dim)
        latent = ops.transpose(expanded, 1, 2)
        key_nope, value = ops.split(latent, [nope_dim, self.value_dim], -1)
        key_rot = ops.expand(key_rot, -1, key_nope.shape[1], -1, -1)
        key = latent.tape.empty((*latent.shape[:-1], nope_dim + rope_dim), latent.dtype)
        key = ops.copy_slice_(key, key_nope)
        key = ops.copy_slice_(key, key_rot)
        return key, value

    def _absorbed(self, query_pass: Tensor, query_rot: Tensor, latent: Tensor) -> Tensor:
        """Attention over the latent itself: the expansion is multiplied into the query and into what comes out.

        Source: "absorb" in DeepSeek's own inference code, and the MLA backends of vLLM and SGLang.
        """
        tape, (batch, heads, length, _) = query_pass.tape, query_pass.shape
        query = tape.empty((batch, heads, length, latent.shape[-1]), latent.dtype)
        query = ops.cat((query, query_rot), -1)
        mixed = tape.empty((batch, heads, length, latent.shape[-1]), latent.dtype)
        del query
        out = tape.empty((batch, length, heads, self.value_dim), mixed.dtype)
        return ops.view(out, batch, length, -1)

    def forward(
        self, hidden: Tensor, rotation: tuple[Tensor, ...], mask: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """Hidden states [b, s, h] to [b, s, h], and the probabilities where they exist."""
        batch, length, _ = hidden.shape
        query = self._query(hidden)
        query_pass, query_rot, latent, key_rot, _compressed = self._compressed(hidden, query, rotation)
        cache = run_context(query).cache
        if cache is not None:
            latent, key_rot = cache.update(self, latent, key_rot)
            if cache.absorbs_latent and length == 1:
                return self.o_proj(self._absorbed(query_pass, query_rot, latent)), None
        query_states = ops.cat((query_pass, query_rot), -1)
        if self.query_scaling is not None:
            query_states = self.query_scaling(query_states)
        key, value = self._expand(latent, key_rot)
        out, weights = attend(query_states, key, value, mask, 1, self.dropout)
        out = ops.contiguous(ops.reshape(out, batch, length, -1))
        return self.o_proj(out), weights
