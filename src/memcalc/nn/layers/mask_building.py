"""How Transformers puts an attention mask together: positions, comparisons, and what joins them.

Source: transformers/masking_utils.py 5.24 (`sdpa_mask`, `eager_mask`). All of it dies when the mask is made, so a tape
without a device leaves it out: no peak lies there.
"""

from __future__ import annotations

from dataclasses import dataclass

from memcalc.autograd.tape import Tape
from memcalc.autograd.tensor import Tensor
from memcalc.common.sizes import Shape
from memcalc.tables.dtypes import BOOL, INT64, DType


@dataclass(frozen=True)
class MaskShape:
    """A mask of `length` queries over `seen` keys, for `batch` sequences."""

    batch: int
    length: int
    seen: int
    causal: bool
    windowed: bool = False
    padded: bool = False
    packed: bool = False
    """Rows hold several samples, which do not see each other."""
    skippable: bool = False
    """Whether Transformers looks whether it can do without: not where eager attention adds the mask."""


def build_bool_mask(tape: Tape, kind: MaskShape) -> Tensor:
    """The boolean mask [1, 1, length, seen], or [batch, 1, length, seen] where sequences are padded."""
    given = tape.empty((kind.batch, kind.seen), BOOL) if kind.padded else None
    if kind.padded and kind.skippable:
        _look_for_padding(tape, kind)
    positions = [tape.empty((count,), INT64) for count in (kind.batch, 1)]
    for count in (kind.length, kind.seen):
        positions.append(_counted(tape, count))
    mask = _padded(tape, kind) if kind.padded else _packed(tape, kind) if kind.packed else _pattern(tape, kind)
    del positions, given
    return mask


def build_float_mask(tape: Tape, kind: MaskShape, dtype: DType) -> Tensor:
    """The mask that eager attention adds, [batch, 1, length, seen] in `dtype`."""
    mask = build_bool_mask(tape, kind)
    fill = tape.empty((), dtype), tape.empty((), dtype)
    out = tape.empty((kind.batch, 1, kind.length, kind.seen), dtype)
    del mask, fill
    return out


def _look_for_padding(tape: Tape, kind: MaskShape) -> None:
    """`padding_mask.all()` of a causal mask is asked twice, through a comparison; of another, once."""
    if not kind.causal:
        tape.empty((), BOOL)
        return
    for _ in range(2):
        one = tape.empty((), INT64)
        compared = tape.empty((kind.batch, kind.seen), INT64)
        del one
        answer = tape.empty((), BOOL)
        del compared, answer


def _counted(tape: Tape, count: int) -> Tensor:
    start = tape.empty((count,), INT64)
    shifted = tape.empty((count,), INT64)
    del start
    return shifted


def _pattern(tape: Tape, kind: MaskShape) -> Tensor:
    """Which keys a query may see, before padding: [1, 1, length, seen], or [1, 1, length, 1] where it may see all."""
    square: Shape = (1, 1, kind.length, kind.seen)
    if not kind.causal:
        return tape.empty((1, 1, kind.length, 1), BOOL)
    if not kind.windowed:
        return tape.empty(square, BOOL)
    joined = tape.empty((), BOOL)
    bounds = tape.empty((1, 1, kind.length, 1), INT64)
    near = tape.empty(square, BOOL)
    del bounds
    both = tape.empty(square, BOOL)
    del joined, near
    before = tape.empty(square, BOOL)
    out = tape.empty(square, BOOL)
    del both, before
    return out


def _packed(tape: Tape, kind: MaskShape) -> Tensor:
    """The pattern joined with which sample a query and a key belong to: [batch, 1, length, seen]."""
    true = tape.empty((), BOOL)
    pattern = _pattern(tape, kind)
    joined = tape.empty(pattern.shape, BOOL)
    del true, pattern
    of_query = tape.empty((kind.batch, 1, kind.length, 1), INT64)
    of_key = tape.empty((kind.batch, 1, 1, kind.seen), INT64)
    same = tape.empty((kind.batch, 1, kind.length, kind.seen), BOOL)
    del of_query, of_key
    mask = tape.empty((kind.batch, 1, kind.length, kind.seen), BOOL)
    del joined, same
    return mask


def _padded(tape: Tape, kind: MaskShape) -> Tensor:
    """The pattern joined with the padding mask, which is picked by sequence and position: both are broadcast for it."""
    true = tape.empty((), BOOL)
    pattern = _pattern(tape, kind)
    joined = tape.empty(pattern.shape, BOOL)
    del true, pattern
    shape = (kind.batch, 1, 1, kind.seen)
    indices = tape.empty(shape, INT64), tape.empty(shape, INT64)
    picked = tape.empty(shape, BOOL)
    del indices
    mask = tape.empty((kind.batch, 1, kind.length, kind.seen), BOOL)
    del joined, picked
    return mask
