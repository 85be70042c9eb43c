"""What Gemma 3n and Gemma 4 share: norms by a power, attention whose last layers read earlier layers' keys and values,
and inputs of each layer from a table of their own."""

from __future__ import annotations

from collections import UserDict
from typing import Literal

from memcalc import ops
from memcalc.autograd.tensor import Tensor
from memcalc.errors import UsageError
from memcalc.nn.layers.attention_backends import attend
from memcalc.nn.layers.linear import Linear, ScaledEmbedding
from memcalc.nn.layers.rotary import Rotation, rotate_half
from memcalc.nn.module import Module, Parameter
from memcalc.nn.run_context import run_context
from memcalc.nn.stack import Stack
from memcalc.tables.dtypes import FP32


class SharedKeyValues(UserDict[int | None, tuple[Tensor, Tensor]]):
    """Keys and values [b, kv, s, d] that later layers of the same window read, by window (`KVSharingDict`).

    No dict, so that wrappers which copy arguments pass it on as it is.
    """


Sharing = Literal["store", "reuse"] | None
"""A layer stores its keys and values for later ones, reads them, or neither (`kv_sharing_modes`)."""


class PowerRMSNorm(Module):
    """Gemma 3n's RMSNorm: divided by a power of the mean square in fp32; the weight, if any, multiplies there."""

    scope = "norms"

    def __init__(self, width: int, *, with_scale: bool = True) -> None:
        self.weight = Parameter(width, group="norms") if with_scale else None

    def forward(self, hidden: Tensor) -> Tensor:
        """[..., width] to [..., width]."""
        normed = power_normalised(ops.to(hidden, FP32))
        if self.weight is not None:
            normed = ops.mul(normed, ops.to(self.weight, FP32))
        return ops.to(normed, hidden.dtype)


def power_normalised(hidden: Tensor) -> Tensor:
    """`hidden` times a power of its mean square."""
    mean_squared = ops.add_scalar(ops.mean(ops.pow(hidden)))
    return ops.mul(hidden, ops.pow(mean_squared, -0.5))


def rotated(x: Tensor, rotation: Rotation, dim: int = 2) -> Tensor:
    """One of query and key [b, s, h, d], rotated; `dim` is where cos and sin get their head dimension."""
    cos, sin = (ops.unsqueeze(table, dim) for table in rotation)
    return ops.add(ops.mul(x, cos), ops.mul(rotate_half(x), sin))


class SharingAttention(Module):
    """Attention that may read the keys and values of an earlier layer of its window instead of making its own.

    hidden, heads, kv_heads, head_dim: sizes; query [b, heads, s, head_dim].
    window: sliding window in tokens, None for full attention.
    sharing: what it does with shared keys and values.
    bias: the projections have biases.
    dropout: probability of dropout on the attention probabilities.
    values_are_keys: the key projection, before its norm, is the value too (`attention_k_eq_v`).
    value_last: the value is projected when the key is rotated (Gemma 3n).
    """

    scope = "attention"

    def __init__(
        self,
        hidden: int,
        heads: int,
        kv_heads: int,
        head_dim: int,
        *,
        window: int | None,
        sharing: Sharing,
        bias: bool,
        dropout: float,
        values_are_keys: bool = False,
        value_last: bool = False,
    ) -> None:
        self.value_last = value_last
        self.head_dim, self.repeats, self.dropout = head_dim, heads // kv_heads, dropout
        self.window, self.sharing = window, sharing
        self.caches = sharing != "reuse"
        self.q_proj = Linear(hidden, heads * head_dim, bias=bias, group="attention")
        self.q_norm = PowerRMSNorm(head_dim)
        self.v_proj: Linear | None = None
        if sharing != "reuse":
            self.k_norm = PowerRMSNorm(head_dim)
            self.v_norm = PowerRMSNorm(head_dim, with_scale=False)
            self.k_proj = Linear(hidden, kv_heads * head_dim, bias=bias, group="attention")
            if not values_are_keys:
                self.v_proj = Linear(hidden, kv_heads * head_dim, bias=bias, group="attention")
        self.o_proj = Linear(heads * head_dim, hidden, bias=bias, group="attention")

    def _split(self, x: Tensor) -> Tensor:
        return ops.view(x, *x.shape[:-1], -1, self.head_dim)

    def forward(
        self, hidden: Tensor, rotation: Rotation, mask: Tensor | None, shared: SharedKeyValues
    ) -> tuple[Tensor, Tensor | None]:
        """Hidden states [b, s, h] to [b, s, h], and the probabilities where they exist."""
        query = self._split(self.q_proj(hidden))
        query = self.q_norm(query)
        query = rotated(query, rotation)
        query = ops.transpose(query, 1, 2)
        if self.sharing == "reuse":
            if self.window not in shared:
                raise UsageError(
                    "--pipeline-parallel-size cuts between layers that share keys and values, which cannot be passed "
                    "from stage to stage; leave it out."
                )
            key, value = shared[self.window]
        else:
            key = self._split(self.k_proj(hidden))
            if not self.value_last:
                value = key if self.v_proj is None else self._split(self.v_proj(hidden))
            key = self.k_norm(key)
            key = rotated(key, rotation)
            key = ops.transpose(key, 1, 2)
            if self.value_last and self.v_proj is not None:
                value = self._split(self.v_proj(hidden))
            value = self.v_norm(value)
            value = ops.transpose(value, 1, 2)
            if (cache := run_context(query).cache) is not None:
                key, value = cache.update(self, key, value, self.window)
        if self.sharing == "store":
            shared[self.window] = key, value
        out, weights = attend(query, key, value, mask, self.repeats, self.dropout)
        out = ops.contiguous(ops.reshape(out, *hidden.shape[:-1], -1))
        return self.o_proj(out), weights


class PerLayerInputs(Module):
    """A decoder that may have an input [b, s, width] for every layer: from a table, and projected from the embeddings.

    layers: the stack.
    width: 0 where there are no such inputs.
    """

    layers: Stack
    width: int = 0

    def add_layer_inputs(self, hidden: int, vocab: int, width: int) -> None:
        """Have such inputs, from a table of `vocab` tokens."""
        self.width = width
        self.embed_tokens_per_layer = ScaledEmbedding(vocab, self.layers.depth * width)
        self.per_layer_model_projection = Linear(hidden, self.layers.depth * width, group="embedding")
        self.per_layer_projection_norm = PowerRMSNorm(width)

    def of_tokens(self, ids: Tensor) -> Tensor:
        """What the table has for ids [b, s]: [b, s, layers, width]."""
        return ops.reshape(self.embed_tokens_per_layer(ids), *ids.shape, -1, self.width)

    def projected(self, embeds: Tensor, of_tokens: Tensor) -> Tensor:
        """With the projection of the embeddings [b, s, h]: [b, s, layers, width]."""
        with embeds.tape.scoped("embedding"):
            projection = self.per_layer_model_projection(embeds)
            projection = self.scaled_projection(projection)
            projection = ops.reshape(projection, *embeds.shape[:-1], -1, self.width)
            projection = self.per_layer_projection_norm(projection)
            return self.scaled_sum(ops.add(projection, of_tokens))

    def scaled_projection(self, projection: Tensor) -> Tensor:
        """The projection times a number."""
        return ops.mul_scalar(projection)

    def scaled_sum(self, total: Tensor) -> Tensor:
        """Table and projection together, times a number."""
        return ops.mul_scalar(total)


def sharing_modes(windows: list[int | None], shared: int) -> list[Sharing]:
    """What each layer does with keys and values where the last `shared` layers read those of earlier ones: the last
    layer of each window before them stores its own."""
    first = len(windows) - shared
    last = {window: index for index, window in enumerate(windows[:first])}
    return ["reuse" if i >= first else "store" if last[w] == i else None for i, w in enumerate(windows)]
