"""Rotary position embedding: the table of cos and sin, and the ways in which families apply it.

The ways differ in what is cast, sliced and copied on the way, and so in what stays for backward and what is alive
meanwhile; each is written in the order in which Transformers computes it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from memcalc import ops
from memcalc.autograd.tensor import Tensor
from memcalc.errors import ConfigError
from memcalc.nn.module import Buffer, Module
from memcalc.tables.dtypes import FP32

Rotation = tuple[Tensor, Tensor]
"""cos and sin [rows, s, dim]."""

Rotate = Callable[[Tensor, Tensor, Tensor, Tensor], tuple[Tensor, ...]]
"""Query and key [b, h, s, d], cos and sin, to rotated query and key; what else it returns stays with its caller."""


def spread(x: Tensor) -> Tensor:
    """Every element of the last dimension twice (torch.repeat_interleave), a copy."""
    wide = ops.expand(ops.unsqueeze(x, -1), *x.shape, 2)
    return ops.view(ops.clone(wide, contiguous=True), *x.shape[:-1], -1)


class RotaryEmbedding(Module):
    """cos and sin [rows, s, dim] from positions [rows, s], in the dtype of the hidden states.

    Two buffers of inverse frequencies belong to it (the second is kept to undo dynamic scaling). With `pairs`,
    neighbouring elements share an angle, else those half the dimension apart; with `once`, each angle comes once and
    dim is half the heads'. With `fp32`, the pair stays in fp32. A third buffer has the frequencies of long sequences
    where there are such (`long`: Phi-3's longrope).
    """

    scope = "rotary embedding"

    def __init__(
        self, dim: int, *, pairs: bool = False, once: bool = False, fp32: bool = False, long: bool = False
    ) -> None:
        if dim % 2:
            raise ConfigError(
                f"a rotary embedding turns pairs, but a head has {dim} elements; give an even 'head_dim'."
            )
        self.inv_freq = Buffer(dim // 2)
        self.original_inv_freq = Buffer(dim // 2)
        self.long_inv_freq = Buffer(dim // 2) if long else None
        self.pairs = pairs
        self.once = once
        self.fp32 = fp32

    def forward(self, x: Tensor, position_ids: Tensor) -> Rotation:
        """The pair for `position_ids`; `x` only gives its dtype."""
        freqs = ops.mul(ops.to(ops.unsqueeze(position_ids, -1), FP32), self.inv_freq)
        emb = freqs if self.once else spread(freqs) if self.pairs else ops.cat((freqs, freqs), -1)
        cos = ops.mul_scalar(ops.cos(emb))
        sin = ops.mul_scalar(ops.sin(emb))
        if self.fp32:
            return cos, sin
        return ops.to(cos, x.dtype), ops.to(sin, x.dtype)


class ComplexRotaryEmbedding(Module):
    """Complex numbers of length one [rows, s, dim / 2], from positions [rows, s] (DeepSeek-V2, Llama 4)."""

    scope = "rotary embedding"

    def __init__(self, dim: int) -> None:
        self.inv_freq = Buffer(dim // 2)
        self.original_inv_freq = Buffer(dim // 2)

    def forward(self, x: Tensor, position_ids: Tensor) -> tuple[Tensor]:
        """The table for `position_ids`; `x` is not used."""
        freqs = ops.mul(ops.to(ops.unsqueeze(position_ids, -1), FP32), self.inv_freq)
        table = ops.polar(freqs)
        return (ops.mul_scalar(table),)


class RotaryByWindow(Module):
    """A table of its own for the layers of each sliding window (None: full attention)."""

    def __init__(self, windows: Sequence[int | None], table: Callable[[], RotaryEmbedding]) -> None:
        self.windows = tuple(windows)
        self.tables = [table() for _ in self.windows]

    def forward(self, x: Tensor, position_ids: Tensor) -> dict[int | None, Rotation]:
        """The pair of every window."""
        return {window: table(x, position_ids) for window, table in zip(self.windows, self.tables, strict=True)}


def rotate_half(x: Tensor) -> Tensor:
    """The second half of the last dimension negated, then the first."""
    half = x.shape[-1] // 2
    first = ops.narrow(x, -1, half)
    second = ops.narrow(x, -1, x.shape[-1] - half)
    return ops.cat((ops.neg(second), first), -1)


def _halves(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return ops.add(ops.mul(x, cos), ops.mul(rotate_half(x), sin))


def sliced(x: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """The `width` elements of the last dimension that are rotated, and the others."""
    return ops.narrow(x, -1, width), ops.narrow(x, -1, x.shape[-1] - width)


def apply_rotary(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor, dim: int = 1) -> tuple[Tensor, Tensor]:
    """Llama's: all of each head; `dim` is where cos and sin [b, s, d] get their head dimension."""
    cos = ops.unsqueeze(cos, dim)
    sin = ops.unsqueeze(sin, dim)
    query_out = _halves(query, cos, sin)
    key_out = _halves(key, cos, sin)
    return query_out, key_out


def rotary_of_halves(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """gpt-oss's: both halves of each head rotated by a table of half the width, and put together."""
    cos = ops.unsqueeze(cos, 1)
    sin = ops.unsqueeze(sin, 1)
    query_out = _rotated_halves(query, cos, sin)
    key_out = _rotated_halves(key, cos, sin)
    return query_out, key_out


def _rotated_halves(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = ops.chunk(x, 2, -1)
    first_out = ops.sub(ops.mul(first, cos), ops.mul(second, sin))
    second_out = ops.add(ops.mul(second, cos), ops.mul(first, sin))
    return ops.cat((first_out, second_out), -1)


def rotary_complex(query: Tensor, key: Tensor, table: Tensor, dim: int = 1) -> tuple[Tensor, Tensor]:
    """DeepSeek-V2's: neighbours in fp32 as complex numbers, rotated, and cast back; `dim` is where the heads are."""
    query_pairs = ops.view_as_complex(ops.reshape(ops.to(query, FP32), *query.shape[:-1], -1, 2))
    key_pairs = ops.view_as_complex(ops.reshape(ops.to(key, FP32), *key.shape[:-1], -1, 2))
    table = ops.unsqueeze(table, dim)
    query_out = ops.to(_flat(ops.view_as_real(ops.mul_complex(query_pairs, table))), query.dtype)
    key_out = ops.to(_flat(ops.view_as_real(ops.mul_complex(key_pairs, table))), key.dtype)
    return query_out, key_out


def _flat(pairs: Tensor) -> Tensor:
    return ops.reshape(pairs, *pairs.shape[:-2], -1)


def rotary_cast_back(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """OLMo's: cos and sin in fp32, and so the rotation; the results are cast back."""
    query_dtype, key_dtype = query.dtype, key.dtype
    cos = ops.unsqueeze(cos, 1)
    sin = ops.unsqueeze(sin, 1)
    query_out = _halves(query, cos, sin)
    key_out = _halves(key, cos, sin)
    return ops.to(query_out, query_dtype), ops.to(key_out, key_dtype)


def rotary_in_fp32(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """ModernBERT's and ESM's: query and key each cast to fp32 twice, and the results cast back."""
    dtype = query.dtype
    cos = ops.unsqueeze(cos, 1)
    sin = ops.unsqueeze(sin, 1)
    query_out = _wide(query, cos, sin)
    key_out = _wide(key, cos, sin)
    return ops.to(query_out, dtype), ops.to(key_out, dtype)


def _wide(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return ops.add(ops.mul(ops.to(x, FP32), cos), ops.mul(rotate_half(ops.to(x, FP32)), sin))


def rotary_head_of_each(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Phi-3's: the first elements of each head, as many as cos has; the others are put after them at once."""
    cos = ops.unsqueeze(cos, 1)
    sin = ops.unsqueeze(sin, 1)
    width = cos.shape[-1]
    query_rot, query_pass = sliced(query, width)
    key_rot, key_pass = sliced(key, width)
    query_out = ops.cat([_halves(query_rot, cos, sin), query_pass], -1)
    key_out = ops.cat([_halves(key_rot, cos, sin), key_pass], -1)
    return query_out, key_out


def rotary_of_part(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """GLM 4.5's: the first elements of query and key; each result is bound anew with the others after it."""
    cos = ops.unsqueeze(cos, 1)
    sin = ops.unsqueeze(sin, 1)
    width = cos.shape[-1]
    query_rot, query_pass = sliced(query, width)
    key_rot, key_pass = sliced(key, width)
    query_out = _halves(query_rot, cos, sin)
    key_out = _halves(key_rot, cos, sin)
    query_out = ops.cat([query_out, query_pass], -1)
    key_out = ops.cat([key_out, key_pass], -1)
    return query_out, key_out


def rotary_then_rest(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Nemotron's: the first elements of query and key, then the others put after both."""
    cos = ops.unsqueeze(cos, 1)
    sin = ops.unsqueeze(sin, 1)
    width = cos.shape[-1]
    query, query_pass = sliced(query, width)
    key, key_pass = sliced(key, width)
    query_out = _halves(query, cos, sin)
    key_out = _halves(key, cos, sin)
    return ops.cat((query_out, query_pass), -1), ops.cat((key_out, key_pass), -1)


def rotary_held(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, ...]:
    """StableLM's: both parts stay bound in the attention that puts them together."""
    width = cos.shape[-1]
    query_rot, query_pass = sliced(query, width)
    key_rot, key_pass = sliced(key, width)
    query_rot, key_rot = apply_rotary(query_rot, key_rot, cos, sin)
    query = ops.cat((query_rot, query_pass), -1)
    key = ops.cat((key_rot, key_pass), -1)
    return query, key, query_rot, query_pass, key_rot, key_pass


def scaled_by_position(query: Tensor) -> Tensor:
    """Queries [b, heads, s, d] times a number that grows with the position, as each layer computes (Ministral 3)."""
    return ops.mul(query, ops.to(_position_scale(query), query.dtype))


def _position_scale(query: Tensor) -> Tensor:
    """[1, 1, s, 1]: 1 + a·log(1 + floor(position / b))."""
    ratio = query.tape.empty((1, query.shape[2]), FP32)
    scale = ops.add_scalar(ops.mul_scalar(ops.log(ops.add_scalar(ops.mul_scalar(ratio)))))
    return ops.unsqueeze(ops.unsqueeze(scale, 1), -1)
