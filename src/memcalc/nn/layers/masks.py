"""Attention masks: when Transformers makes one, and of which shape and dtype."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from memcalc import ops
from memcalc.autograd.tape import OVERHEAD
from memcalc.autograd.tensor import Tensor
from memcalc.common.assumption import Assumption
from memcalc.nn.layers.mask_building import MaskShape, build_bool_mask, build_float_mask
from memcalc.nn.run_context import run_context
from memcalc.tables.dtypes import BOOL, INT64

RECURRENT: Final = -1
"""In place of a sliding window: a layer that attends to nothing and has states of its own."""

OWN_ONES_NOTE: Final = Assumption(
    "own_mask_of_ones",
    "the mask of ones that this model makes for itself counts, as PyTorch's trackers see it; on a GPU Transformers "
    "reads its values and skips it where no sequence is padded, which takes a little less",
)
"""For models that make a padding mask where they get none: whether it hides anything depends on its values."""

SAME: Final = -2
"""In place of another window: the same."""


def padding_input(ids: Tensor) -> Tensor:
    """The mask [b, s] that says which of `ids` are padding: an input of the step, counted once something aliases it.

    Where the trainer made the mask itself, it is that one.
    """
    if (padding := run_context(ids).padding) is not None:
        return padding
    return ids.tape.external_tensor(ids.shape, INT64, OVERHEAD, "padding mask")


def causal_mask(
    hidden: Tensor,
    padding: bool,
    window: int | None = None,
    *,
    past: int | None = None,
    always: bool = False,
    cached: int | None = SAME,
    chunked: bool = False,
) -> Tensor | None:
    """The causal mask for `hidden` [b, s, h] over all tokens seen so far, in layers with a sliding `window` or without.

    Eager attention always adds a float one, in the dtype of the embeddings. SDPA takes a boolean one, and skips it
    where the kernel's own causal flag does: no sequence is padded, and every window is longer than the sequence. Flash
    attention takes none. With `always`, nothing is skipped. A window of zero is one that no layer has, but for which
    the model makes a mask of all tokens. `cached` is the window of the layer whose cache says how many tokens there
    are: the first one's, where no layer has this mask's. A `chunked` window, whose chunks begin after the padding, has
    a mask for every sequence.
    """
    run, length = run_context(hidden), hidden.shape[1]
    run.causal = True
    kept = window if cached == SAME else cached
    if past is None:
        past = run.past_length
    static = run.cache is not None and run.cache.static_length is not None
    seen = past + length
    if run.cache is not None and static:
        seen = run.cache.static_capacity(kept or None, length, past)
    elif kept and run.cache is not None:
        seen = min(past, kept - 1) + length
    alone = length == 1 and not static
    skip = not always and (window is None or seen < window) and (alone or seen == length)
    packed = run.position_ids is not None
    kind = MaskShape(
        hidden.shape[0], length, seen, causal=True, windowed=window is not None, padded=padding, packed=packed
    )
    return _mask(hidden, kind, skip=skip, every=chunked or packed)


def recurrent_mask(ids: Tensor, padding: bool) -> Tensor | None:
    """The padding mask [b, s] as recurrent layers take it: as it is, and for more than one token only."""
    if not padding or ids.shape[1] == 1:
        return None
    return ops.narrow(padding_input(ids), 1, ids.shape[1])


def bidirectional_mask(
    hidden: Tensor, padding: bool, seen: int | None = None, *, window: int | None = None
) -> Tensor | None:
    """The mask of an encoder over `hidden` [b, s, h], or of cross-attention over `seen` encoder states.

    There is none at all unless sequences are padded, or longer than a `window` that tokens see on either side.
    """
    length, tape = hidden.shape[1], hidden.tape
    if not padding and (window is None or length < window):
        return None
    if window is not None and run_context(tape).attention != "flash":
        with tape.scoped("attention mask"):
            distance = tape.empty((1, 1, length, length), INT64)
            absolute = tape.empty((1, 1, length, length), INT64)
            del distance, absolute
    kind = MaskShape(hidden.shape[0], length, seen or length, causal=False, padded=padding)
    return _mask(hidden, kind, skip=False)


def _mask(hidden: Tensor, kind: MaskShape, *, skip: bool, every: bool = False) -> Tensor | None:
    tape, attention = hidden.tape, run_context(hidden).attention
    with tape.scoped("attention mask"):
        if attention == "eager":
            if tape.device is not None:
                return build_float_mask(tape, kind, hidden.dtype)
            return tape.empty((kind.batch, 1, kind.length, kind.seen), hidden.dtype)
        if attention == "sdpa" and (kind.padded or kind.packed or not skip):
            if tape.device is not None and (not every or kind.packed):
                return build_bool_mask(tape, replace(kind, skippable=True))
            return tape.empty((kind.batch if kind.padded or every else 1, 1, kind.length, kind.seen), BOOL)
    return None
