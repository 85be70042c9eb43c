"""ALiBi: a bias on the scores that grows with the distance, by a slope for each head."""

from __future__ import annotations

from memcalc import ops
from memcalc.autograd.tape import Tape
from memcalc.autograd.tensor import Tensor
from memcalc.tables.dtypes import BF16, FP32, INT32, INT64, DType


def alibi_slopes(tape: Tape, heads: int) -> Tensor:
    """One slope per head [heads], in fp32. Where the heads are no power of two, some are put in between."""
    power_of_two = 1 << (heads.bit_length() - 1)
    base = tape.empty((), FP32)
    powers = tape.empty((power_of_two,), INT32)
    slopes = tape.empty((power_of_two,), FP32)
    if power_of_two != heads:
        more_base = tape.empty((), FP32)
        more_powers = tape.empty((heads - power_of_two,), INT32)
        slopes = ops.cat((slopes, tape.empty((heads - power_of_two,), FP32)), 0)
        del more_base, more_powers
    del base, powers
    return slopes


def alibi_by_mask(mask: Tensor, heads: int, dtype: DType, *, rounded: bool = False) -> Tensor:
    """The bias [b · heads, 1, s] by the positions that a padding mask [b, s] counts; Falcon's slopes are `rounded`."""
    batch, length = mask.shape
    slopes = ops.unsqueeze(alibi_slopes(mask.tape, heads), -1)
    positions = ops.unsqueeze(ops.mul(ops.add_scalar(ops.to(ops.cumsum(mask), INT64)), mask), 1)
    if rounded:
        slopes = ops.to(slopes, BF16)
    bias = ops.mul(slopes, positions)
    return ops.to(ops.reshape(bias, batch * heads, 1, length), dtype)
