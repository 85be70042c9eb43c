"""Caches of serving engines: allocated once, or in pages, or quantized; see `tables/engines.py` for who keeps which."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from memcalc import ops
from memcalc.autograd.tape import OVERHEAD, Tape
from memcalc.autograd.tensor import Tensor, contiguous_stride
from memcalc.common.sizes import Shape
from memcalc.errors import UsageError
from memcalc.nn.kv_cache import Cache
from memcalc.tables.dtypes import FP32, DType
from memcalc.tables.engines import CacheFormat, Engine

RESIDUAL = 128
"""Latest tokens that Transformers' quantized cache keeps in full precision (`residual_length`)."""


@dataclass(frozen=True)
class LayerWidth:
    """What one layer caches: elements per token of key and value, its window, and the bytes of an element.

    `fixed` tokens are those of a source: cross-attention holds them whatever is decoded.
    """

    elements: int
    itemsize: int
    window: int | None
    fixed: int | None = None
    keys: int = 0
    """Elements per token of the key alone."""


class PooledCache(Cache):
    """Keys and values in memory that stands before the first token: a pool of pages, or one piece per layer.

    Nothing is allocated on the tape; `widths` says what each layer puts into the pool, `state_bytes` what each layer's
    states take for one sequence.
    """

    def __init__(self, *, static_length: int | None = None, absorbs_latent: bool = False) -> None:
        super().__init__()
        self.static_length = static_length
        self.absorbs_latent = absorbs_latent
        self.widths: dict[int, LayerWidth] = {}
        self.state_bytes: dict[int, dict[str, int]] = {}

    def update(self, layer: object, key: Tensor, value: Tensor, window: int | None = None) -> tuple[Tensor, Tensor]:
        """Attention sees the new tokens in prefill, and all of the pool's in decode; all of a static cache always."""
        new = key.shape[-2]
        self.cards[id(layer)] = key.tape.card
        keys, values = (self._heads(layer, tensor) * tensor.shape[-1] for tensor in (key, value))
        fixed = new if id(layer) in self._fixed else None
        self.widths[id(layer)] = LayerWidth(keys + values, key.dtype.itemsize, window, fixed, keys)
        if fixed is not None:
            self._layers[id(layer)] = [_pooled(key, 0), _pooled(value, 0)]
            return key, value
        seen = self.past if self.past else self.length
        if self.static_length is not None:
            if window is not None and self.static_length > window <= seen and new == 1:
                self._roll(key, window)
            seen = self.static_capacity(window, new, seen) - new
        elif window is not None:
            seen = min(seen, window - 1)
        if not seen:
            return key, value
        return _pooled(key, seen), _pooled(value, seen)

    def update_single(self, layer: object, keys: Tensor, window: int) -> Tensor:
        """Raises UsageError: engines keep such keys in formats of their own."""
        raise UsageError(
            "memcalc does not know how engines and quantized or static caches keep compressed entries (deepseek_v4); "
            "take --engine transformers without these."
        )

    def _heads(self, layer: object, tensor: Tensor) -> int:
        """Heads of keys or values that are kept: an engine keeps one that the library repeats (Falcon's) only once."""
        heads = tensor.shape[1]
        return min(heads, getattr(layer, "kv_heads", heads)) if self.absorbs_latent else heads

    def _roll(self, key: Tensor, size: int) -> None:
        """A window that is full is moved by one token, in copies of keys and values."""
        if self.absorbs_latent:  # an engine's own kernels write into a ring
            return
        copies = [key.tape.empty((*key.shape[:-2], size, key.shape[-1]), key.dtype) for _ in range(2)]
        del copies

    def state(self, layer: object, shape: Shape, dtype: DType, like: Tensor, name: str) -> Tensor:
        """A state of `layer` for as many sequences as `shape` says; it stands in the pool."""
        self.state_bytes.setdefault(id(layer), {}).setdefault(name, prod(shape[1:]) * dtype.itemsize)
        slots = self._states.setdefault(id(layer), {})
        if name not in slots or slots[name].shape[0] != shape[0]:  # fewer sequences were prefilled at once
            slots[name] = _in_pool(like, shape, dtype)
        return slots[name]

    def nbytes(self) -> dict[int, int]:
        """Nothing: the pool is counted as a whole."""
        return {}


def _pooled(new: Tensor, past: int) -> Tensor:
    """The tokens of a layer in the pool, `new` among them."""
    return _in_pool(new, (*new.shape[:-2], past + new.shape[-2], new.shape[-1]), new.dtype)


def _in_pool(like: Tensor, shape: Shape, dtype: DType) -> Tensor:
    place = like.tape.external_tensor(shape, dtype, OVERHEAD, "KV cache")
    like.tape.inputs.pop()  # the pool is counted as a whole
    return Tensor(shape, contiguous_stride(shape), dtype, place.storage)


def pool_bytes(width: LayerWidth, engine: Engine, form: CacheFormat | None, batch: int, tokens: int) -> int:
    """Bytes that one layer takes from the pool for `batch` sequences of `tokens` tokens."""
    if width.fixed is not None:
        tokens = width.fixed
    elif width.window is not None and engine.caps_windows:
        tokens = min(tokens, width.window)
    pages = -(-tokens // engine.page) * engine.page
    elements = batch * pages * width.elements
    return elements * width.itemsize if form is None else form.nbytes(elements)


class QuantizedCache(Cache):
    """Transformers' quantized cache: old tokens in `form`, dequantised whole at every call.

    In groups, the latest tokens stay in full precision until enough have gathered; with one constant per tensor (fp8),
    each token is quantized at once.
    """

    def __init__(self, form: CacheFormat) -> None:
        super().__init__()
        self.form = form

    def update(self, layer: object, key: Tensor, value: Tensor, window: int | None = None) -> tuple[Tensor, Tensor]:
        """Dequantise, append, and quantise again once more than the residual has gathered."""
        if window is not None:
            raise UsageError(
                "Transformers quantizes the cache only of models whose layers all attend to everything, and this one "
                "has a sliding window; use --kv-dtype auto, or another --engine."
            )
        slots = self._tensors_of(layer, key)
        if not slots:
            slots.extend((self._stored(key), self._stored(value)))
            return key, value
        key, value = (self._appended(slots, index, tensor) for index, tensor in enumerate((key, value)))
        return key, value

    def _appended(self, slots: list[Tensor], index: int, new: Tensor) -> Tensor:
        shape = (*new.shape[:-2], slots[index].shape[-2], new.shape[-1])
        if self.form.group:
            old = new.tape.empty(shape, new.dtype)
            return ops.cat((old, *slots[2 + index : 3 + index], new), -2)
        slots[index] = self._stored(new, slots[index].shape[-2] + new.shape[-2], quantizing=False)
        wide = slots[index].tape.empty(slots[index].shape, FP32)
        scaled = wide.tape.empty(wide.shape, FP32)
        return ops.to(scaled, new.dtype)

    def _stored(self, tensor: Tensor, length: int | None = None, *, quantizing: bool = True) -> Tensor:
        shape = tensor.shape if length is None else (*tensor.shape[:-2], length, tensor.shape[-1])
        if quantizing and not self.form.group:
            wide = tensor.tape.empty(shape, FP32)
            scaled = wide.tape.empty(shape, FP32)
            del wide, scaled
        storage = tensor.tape.allocate(self.form.nbytes(prod(shape)), OVERHEAD, "KV cache")
        return Tensor(shape, contiguous_stride(shape), tensor.dtype, storage)

    def _grow_layer(self, slots: list[Tensor], tokens: int, window: int | None) -> None:
        """The latest of the tokens are kept in full precision."""
        recent = self._recent(tokens)
        if recent:
            slots[2:] = [_residual(tensor, recent) for tensor in slots[:2]]
        super()._grow_layer(slots, tokens, window)

    def _grown(self, tape: Tape, shape: Shape, dtype: DType, tokens: int, window: int | None) -> Tensor:
        """The residual is as long as it may be."""
        longer = (*shape[:-2], shape[-2] + tokens - self._recent(tokens), shape[-1])
        storage = tape.allocate(self.form.nbytes(prod(longer)), OVERHEAD, "KV cache")
        return Tensor(longer, contiguous_stride(longer), dtype, storage)

    def _recent(self, tokens: int) -> int:
        return min(tokens, RESIDUAL - 1) if self.form.group else 0

    def nbytes(self) -> dict[int, int]:
        """Bytes of the quantized tensors kept, by layer."""
        return {
            layer: sum(tensor.storage.allocation.raw_nbytes for tensor in kept) for layer, kept in self._layers.items()
        }


def _residual(like: Tensor, tokens: int) -> Tensor:
    shape = (*like.shape[:-2], tokens, like.shape[-1])
    storage = like.tape.allocate(prod(shape) * like.dtype.itemsize, OVERHEAD, "KV cache")
    return Tensor(shape, contiguous_stride(shape), like.dtype, storage)
