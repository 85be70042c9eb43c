"""What generation keeps between tokens: keys and values, and the states of recurrent layers.

Source: `DynamicCache` of Transformers 5.24: each layer's keys and values grow by concatenation, so that old and new are
alive together for a moment; a sliding-window layer keeps window - 1 tokens; a state is made once and updated in place.
"""

from __future__ import annotations

from memcalc.model import ops
from memcalc.model.tape import OVERHEAD
from memcalc.model.tensor import Shape, Tensor
from memcalc.tables.dtypes import DType


class Cache:
    """The cache of one run, layer by layer. `length` is how many tokens it has seen."""

    def __init__(self) -> None:
        self.length = 0
        self._layers: dict[int, tuple[Tensor, ...]] = {}

    def update(self, layer: object, key: Tensor, value: Tensor, window: int | None = None) -> tuple[Tensor, Tensor]:
        """Append key and value [b, kv, s, d] to those of `layer`; returns all that attention has to see.

        With a `window`, only its last window - 1 tokens are kept for later.
        """
        old = self._layers.get(id(layer))
        if old is None:
            full = _append(None, key), _append(None, value)
        else:
            full = _append(old[0], key), _append(old[1], value)
        kept = full
        if window is not None and full[0].shape[-2] > window - 1:
            kept = ops.narrow(full[0], -2, window - 1), ops.narrow(full[1], -2, window - 1)
        self._layers[id(layer)] = kept
        return full

    def state(self, layer: object, shape: Shape, dtype: DType, like: Tensor, name: str) -> Tensor:
        """A state of `layer`, made at its first use and kept. `like` lends the tape."""
        slots = self._layers.get(id(layer), ())
        for slot in slots:
            if slot.shape == shape and slot.storage.allocation.name == name:
                return slot
        made = like.tape.new(shape, dtype)
        _name(made, name)
        self._layers[id(layer)] = (*slots, made)
        return made

    def nbytes(self) -> dict[int, int]:
        """Bytes of the tensors kept, by layer (identity of the module)."""
        return {
            layer: sum(tensor.numel * tensor.dtype.itemsize for tensor in kept) for layer, kept in self._layers.items()
        }


def _append(old: Tensor | None, new: Tensor) -> Tensor:
    out = ops.cat((new,), -2) if old is None else ops.cat((old, new), -2)
    _name(out, "KV cache")
    return out


def _name(tensor: Tensor, name: str) -> None:
    allocation = tensor.storage.allocation
    allocation.row, allocation.name = OVERHEAD, name
