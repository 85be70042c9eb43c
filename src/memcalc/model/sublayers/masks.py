"""Attention masks: when Transformers makes one, and of which dtype."""

from __future__ import annotations

from memcalc.model import ops
from memcalc.model.tensor import Tensor
from memcalc.tables.dtypes import BOOL


def causal_mask(hidden: Tensor, padding: bool) -> Tensor | None:
    """The causal mask [b, 1, s, s] for `hidden` [b, s, h].

    Eager attention always adds one, in the dtype of the embeddings. SDPA skips it unless sequences are padded; then
    it is boolean, and each layer makes a float one of it. Flash attention takes none.
    """
    tape = hidden.tape
    batch, length = hidden.shape[0], hidden.shape[1]
    with tape.scoped("attention mask"):
        if tape.attention == "eager":
            return tape.new((batch, 1, length, length), hidden.dtype)
        if padding and tape.attention == "sdpa":
            return tape.new((batch, 1, length, length), BOOL)
    return None


def additive(mask: Tensor | None, query: Tensor) -> Tensor | None:
    """The float mask that a fused kernel takes, in the dtype of `query`: two scalars are alive while it is filled.

    The memory-efficient kernel (fp32) wants rows of a multiple of eight, so it copies an odd one.
    """
    if mask is None or mask.dtype is not BOOL:
        return mask
    tape = query.tape
    filled = tape.new(mask.shape, query.dtype)
    length = mask.shape[-1]
    if query.dtype.itemsize == 4 and length % 8:
        wide = tape.new((*mask.shape[:-1], -(-length // 8) * 8), query.dtype)
        return Tensor(mask.shape, wide.stride, query.dtype, wide.storage)
    return filled


__all__ = ["additive", "causal_mask", "ops"]
