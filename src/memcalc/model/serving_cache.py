"""Caches of serving engines: allocated once, or in pages, or quantized; see `tables/engines.py` for who keeps which."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from memcalc.model import ops
from memcalc.model.cache import Cache
from memcalc.model.tape import OVERHEAD
from memcalc.model.tensor import Tensor, contiguous_stride
from memcalc.tables.engines import CacheFormat, Engine

RESIDUAL = 128
"""Latest tokens that Transformers' quantized cache keeps in full precision (`residual_length`)."""


@dataclass(frozen=True, slots=True)
class LayerWidth:
    """What one layer caches: elements per token of key and value, its window, and the bytes of an element."""

    elements: int
    itemsize: int
    window: int | None


class PooledCache(Cache):
    """Keys and values in memory that stands before the first token: a pool of pages, or one piece per layer.

    Nothing is allocated on the tape; `widths` says what each layer puts into the pool.
    """

    def __init__(self) -> None:
        super().__init__()
        self.widths: dict[int, LayerWidth] = {}

    def update(self, layer: object, key: Tensor, value: Tensor, window: int | None = None) -> tuple[Tensor, Tensor]:
        """Attention sees the new tokens in prefill, and all of the pool's in decode."""
        per_token = sum(prod(tensor.shape) // (tensor.shape[0] * tensor.shape[-2]) for tensor in (key, value))
        self.widths[id(layer)] = LayerWidth(per_token, key.dtype.itemsize, window)
        if self.length == 0:
            return key, value
        seen = self.length if window is None else min(self.length, window - 1)
        return _pooled(key, seen), _pooled(value, seen)


def _pooled(new: Tensor, past: int) -> Tensor:
    """The tokens of a layer in the pool, `new` among them."""
    shape = (*new.shape[:-2], past + new.shape[-2], new.shape[-1])
    place = new.tape.untracked(shape, new.dtype, OVERHEAD, "KV cache")
    new.tape.inputs.pop()  # the pool is counted as a whole
    return Tensor(shape, contiguous_stride(shape), new.dtype, place.storage)


def pool_bytes(width: LayerWidth, engine: Engine, form: CacheFormat | None, batch: int, tokens: int) -> int:
    """Bytes that one layer takes from the pool for `batch` sequences of `tokens` tokens."""
    if width.window is not None and engine.caps_windows:
        tokens = min(tokens, width.window)
    pages = -(-tokens // engine.page) * engine.page
    elements = batch * pages * width.elements
    return elements * width.itemsize if form is None else form.nbytes(elements)


class QuantizedCache(Cache):
    """Transformers' quantized cache: old tokens in `form`, dequantised whole at every call, the latest in full precision."""

    def __init__(self, form: CacheFormat) -> None:
        super().__init__()
        self.form = form

    def update(self, layer: object, key: Tensor, value: Tensor, window: int | None = None) -> tuple[Tensor, Tensor]:
        """Dequantise, append, and quantise again once more than the residual has gathered."""
        held = self._layers.setdefault(id(layer), [])
        if not held:
            held.extend((self._stored(key), self._stored(value)))
            return key, value
        full = []
        for tensor in (key, value):
            shape = (*tensor.shape[:-2], self.length, tensor.shape[-1])
            old = tensor.tape.new(shape, tensor.dtype)
            full.append(ops.cat((old, tensor), -2))
        return full[0], full[1]

    def _stored(self, tensor: Tensor) -> Tensor:
        storage = tensor.tape.allocate(self.form.nbytes(tensor.numel), OVERHEAD, "KV cache")
        return Tensor(tensor.shape, tensor.stride, tensor.dtype, storage)

    def nbytes(self) -> dict[int, int]:
        """Bytes of the quantized tensors kept, by layer."""
        return {
            layer: sum(tensor.storage.allocation.raw_nbytes for tensor in kept) for layer, kept in self._layers.items()
        }
