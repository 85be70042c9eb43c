"""Vision transformers that read the patches of all images in one row: Qwen-VL's.

Images may have any size, so that there is no batch: hidden states are [n, h], and attention goes image by image, or
window by window.
"""

from __future__ import annotations

from collections.abc import Callable
from math import prod

from memcalc import ops
from memcalc.autograd.tensor import Tensor
from memcalc.errors import ConfigError
from memcalc.nn.layers.attention_backends import attend
from memcalc.nn.layers.equal_pieces import Lengths, Repeat, each_piece
from memcalc.nn.layers.linear import Linear
from memcalc.nn.layers.rotary import Rotation, rotate_half
from memcalc.nn.module import Buffer, Module, Parameter
from memcalc.nn.run_context import run_context
from memcalc.tables.dtypes import FP32


class PackedPatchEmbedding(Module):
    """A convolution as large as a patch of a few frames: rows of pixels [n, c · t · p · p] to vectors [n, h]."""

    scope = "embedding"
    is_input_embedding = True

    def __init__(self, channels: int, hidden: int, frames: int, patch: int, *, bias: bool) -> None:
        self.weight = Parameter(hidden, channels, frames, patch, patch, group="embedding")
        self.bias = Parameter(hidden, group="embedding") if bias else None

    @property
    def pixels(self) -> int:
        """How many numbers a patch has."""
        return prod(self.weight.shape[1:])

    def forward(self, pixels: Tensor) -> Tensor:
        """Rows of pixels to [n, h]."""
        blocks = ops.view(pixels, -1, *self.weight.shape[1:])
        blocks = ops.to(blocks, self.weight.dtype)
        return ops.view(ops.convolution(blocks, self.weight, self.bias), -1, self.weight.shape[0])


class AxialRotary(Module):
    """cos and sin [n, d] from rows and columns [n, 2]: half of the angles by each, in fp32 unless `cast`.

    With `halves`, all angles are computed for both, and half of them are taken (Pixtral). With `flipped`, rows and
    columns take turns (Kimi).
    """

    scope = "rotary embedding"

    def __init__(self, head_dim: int, *, halves: bool = False, cast: bool = False, flipped: bool = False) -> None:
        if head_dim % 4:
            raise ConfigError(f"a vision tower's heads have {head_dim} elements, but must have a multiple of four.")
        count = head_dim // 2 if halves else head_dim // 4
        self.inv_freq = Buffer(count)
        self.original_inv_freq = Buffer(count)
        self.halves, self.cast, self.flipped = halves, cast, flipped

    def forward(self, x: Tensor, places: Tensor) -> Rotation:
        """The pair for `places`; `x` gives its dtype where it is cast."""
        freqs = ops.mul(ops.to(ops.unsqueeze(places, -1), FP32), self.inv_freq)
        cos = ops.mul_scalar(ops.cos(freqs))
        sin = ops.mul_scalar(ops.sin(freqs))
        cos = self._both(cos)
        sin = self._both(sin)
        return (ops.to(cos, x.dtype), ops.to(sin, x.dtype)) if self.cast else (cos, sin)

    def _both(self, freqs: Tensor) -> Tensor:
        if self.flipped:
            turns = ops.reshape(ops.empty_like(ops.transpose(freqs, 1, 2)), freqs.shape[0], -1)
            return ops.cat((turns, turns), -1)
        row, column = ops.chunk(freqs, 2, -1) if self.halves else (freqs, freqs)
        row, column = ops.select(row, 1), ops.select(column, 1)
        angles = ops.cat((row, column), -1)
        return ops.cat((angles, angles), -1)


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return ops.add(ops.mul(x, cos), ops.mul(rotate_half(x), sin))


def rotary_in_fp32(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Query and key [n, heads, d] rotated in fp32, and cast back."""
    wide_query, wide_key = ops.to(query, FP32), ops.to(key, FP32)
    cos, sin = ops.unsqueeze(cos, -2), ops.unsqueeze(sin, -2)
    query_out = _rotated(wide_query, cos, sin)
    key_out = _rotated(wide_key, cos, sin)
    query_out = ops.to(query_out, query.dtype)
    key_out = ops.to(key_out, key.dtype)
    return query_out, key_out


class PackedAttention(Module):
    """Attention of [n, h] within stretches of the row; query, key and value are one projection.

    norm: makes norms of query and key (GLM-OCR).
    """

    scope = "attention"

    def __init__(
        self,
        hidden: int,
        heads: int,
        *,
        bias: bool = True,
        out_bias: bool = True,
        norm: Callable[[int], Module] | None = None,
    ) -> None:
        if hidden % heads:
            raise ConfigError(f"the vision tower's {heads} heads do not divide its width {hidden}; correct one.")
        self.heads = heads
        self.q_norm = None if norm is None else norm(hidden // heads)
        self.k_norm = None if norm is None else norm(hidden // heads)
        self.qkv = Linear(hidden, 3 * hidden, bias=bias, group="attention")
        self.proj = Linear(hidden, hidden, bias=out_bias, group="attention")

    def _heads(self, hidden: Tensor, rotation: Rotation) -> tuple[Tensor, Tensor, Tensor]:
        """Query, key and value [1, heads, n, d]."""
        count = hidden.shape[0]
        query, key, value = ops.unbind(
            ops.permute(ops.reshape(self.qkv(hidden), count, 3, self.heads, -1), 1, 0, 2, 3), 0
        )
        if self.q_norm is not None and self.k_norm is not None:
            query = self.q_norm(query)
            key = self.k_norm(key)
        cos, sin = rotation
        query, key = rotary_in_fp32(query, key, cos, sin)
        query = ops.unsqueeze(ops.transpose(query, 0, 1), 0)
        key = ops.unsqueeze(ops.transpose(key, 0, 1), 0)
        value = ops.unsqueeze(ops.transpose(value, 0, 1), 0)
        return query, key, value

    def forward(self, hidden: Tensor, lengths: Lengths, rotation: Rotation) -> Tensor:
        """[n, h] to [n, h]; `lengths` are those of the stretches."""
        count = hidden.shape[0]
        query, key, value = self._heads(hidden, rotation)
        if run_context(hidden).attention == "flash":  # one call that knows where stretches begin
            out, _ = attend(query, key, value, None)
        else:
            outs = each_piece(lambda q, k, v: attend(q, k, v, None)[0], lengths, (query, key, value), 2)
            out = ops.cat(outs, 1)
        out = ops.contiguous(ops.reshape(out, count, -1))
        return self.proj(out)


class SplitPackedAttention(PackedAttention):
    """The same with three projections, and a batch of one from the start (Kimi)."""

    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__(hidden, heads)
        del self.qkv
        self.q_proj = Linear(hidden, hidden, bias=True, group="attention")
        self.k_proj = Linear(hidden, hidden, bias=True, group="attention")
        self.v_proj = Linear(hidden, hidden, bias=True, group="attention")

    def _heads(self, hidden: Tensor, rotation: Rotation) -> tuple[Tensor, Tensor, Tensor]:
        shape = (1, hidden.shape[0], self.heads, -1)
        query = ops.reshape(self.q_proj(hidden), *shape)
        key = ops.reshape(self.k_proj(hidden), *shape)
        value = ops.reshape(self.v_proj(hidden), *shape)
        query, key = rotary_in_fp32(query, key, *rotation)
        query = ops.transpose(query, 2, 1)
        key = ops.transpose(key, 2, 1)
        value = ops.transpose(value, 2, 1)
        return query, key, value


class ApartPackedAttention(PackedAttention):
    """The same with three projections, called q, k and v (Qwen2.5-Omni)."""

    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__(hidden, heads)
        del self.qkv
        self.q = Linear(hidden, hidden, bias=True, group="attention")
        self.k = Linear(hidden, hidden, bias=True, group="attention")
        self.v = Linear(hidden, hidden, bias=True, group="attention")

    def _heads(self, hidden: Tensor, rotation: Rotation) -> tuple[Tensor, Tensor, Tensor]:
        shape = (hidden.shape[0], self.heads, -1)
        query = ops.reshape(self.q(hidden), *shape)
        key = ops.reshape(self.k(hidden), *shape)
        value = ops.reshape(self.v(hidden), *shape)
        query, key = rotary_in_fp32(query, key, *rotation)
        query = ops.unsqueeze(ops.transpose(query, 0, 1), 0)
        key = ops.unsqueeze(ops.transpose(key, 0, 1), 0)
        value = ops.unsqueeze(ops.transpose(value, 0, 1), 0)
        return query, key, value


class PackedBlock(Module):
    """Norm, attention, add; norm, MLP, add."""

    scope = "residual stream"

    def __init__(self, norm1: Module, norm2: Module, attn: PackedAttention, mlp: Module) -> None:
        self.norm1 = norm1
        self.norm2 = norm2
        self.attn = attn
        self.mlp = mlp

    def forward(self, hidden: Tensor, lengths: Lengths, rotation: Rotation, cu_seqlens: Tensor | None = None) -> Tensor:
        """[n, h] to [n, h]. `cu_seqlens` are where stretches begin, if that lies on the GPU."""
        hidden = ops.add(hidden, self.attn(self.norm1(hidden), lengths=lengths, rotation=rotation))
        return ops.add(hidden, self.mlp(self.norm2(hidden)))


class PatchMerger(Module):
    """Neighbouring patches side by side through an MLP: [n, h] to [n / side², out].

    norm: over each patch, or with `norm_merged` over all patches of a square together.
    names: attribute names of the norm and of the two projections.
    """

    def __init__(
        self, norm: Module, hidden: int, side: int, out: int, names: tuple[str, str, str], *, norm_merged: bool = False
    ) -> None:
        self.width = hidden * side**2
        self.names = names
        self.norm_merged = norm_merged
        setattr(self, names[0], norm)
        setattr(self, names[1], Linear(self.width, self.width, bias=True))
        setattr(self, names[2], Linear(self.width, out, bias=True))

    def forward(self, hidden: Tensor) -> Tensor:
        """[n, h] to [n / side², out]."""
        norm, first, second = (vars(self)[name] for name in self.names)
        hidden = ops.view(hidden, -1, self.width) if self.norm_merged else hidden
        hidden = ops.view(norm(hidden), -1, self.width)
        return second(ops.gelu(first(hidden)))  # type: ignore[no-any-return]


def window_lengths(rows: int, columns: int, side: int, unit: int) -> Lengths:
    """Lengths of the windows of `side` by `side` places in rows · columns of them, those at the edges being smaller.

    A place counts for `unit`.
    """

    def row(height: int) -> list[int | Repeat]:
        return _cut(columns, side, lambda width: height * width * unit)

    return [Repeat(row(side), rows // side), *(row(rows % side) if rows % side else [])]


def _cut(count: int, size: int, length: Callable[[int], int]) -> list[int | Repeat]:
    whole = Repeat([length(size)], count // size)
    return [whole, length(count % size)] if count % size else [whole]
