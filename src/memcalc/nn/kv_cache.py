"""What generation keeps between tokens: keys and values, and the states of recurrent layers.

Source: `DynamicCache` of Transformers 5.24: each layer's keys and values grow by concatenation, so that old and new are
alive together for a moment; a sliding-window layer keeps window - 1 tokens; a state is made once and updated in place.
"""

from __future__ import annotations

from collections.abc import Iterator

from memcalc import ops
from memcalc.autograd.spans import TracedBlock
from memcalc.autograd.tape import OVERHEAD, Tape
from memcalc.autograd.tensor import Tensor
from memcalc.common.sizes import Shape
from memcalc.tables.dtypes import INT64, DType


class Cache:
    """The cache of one run, layer by layer. `length` is how many tokens it has seen."""

    def __init__(self) -> None:
        self.length = 0
        self.states: Tensor | None = None
        """What the encoder of an encoder-decoder made of the source."""
        self.past = 0
        """How many tokens the decoder of an encoder-decoder has seen."""
        self.static_length: int | None = None
        """Tokens for which a static cache has room: attention sees all of it at every call. None: what is filled."""
        self.absorbs_latent = False
        """Whether kernels attend to the latent of compressed keys and values itself, without expanding it."""
        self.cards: dict[int, int] = {}
        """The GPU of each layer, where one process uses several."""
        self._fixed: set[int] = set()
        self._windows: dict[int, int] = {}
        self._layers: dict[int, list[Tensor]] = {}
        self._blocks: dict[int, TracedBlock | None] = {}
        self._scalars: dict[int, list[Tensor]] = {}
        self._states: dict[int, dict[str, Tensor]] = {}
        self._rates: dict[int, int] = {}

    def register_layer(self, layer: object, window: int | None, copies: int, like: Tensor) -> None:
        """Register `layer`, which stands for `copies` layers of this window, before the first layer runs.

        Sliding layers keep a scalar, made together with the cache. `like` gives the tape.
        """
        window = getattr(layer, "cached_window", window)
        if window is not None and id(layer) not in self._scalars:
            tape = like.tape
            self._scalars[id(layer)] = [_named(tape.empty((), INT64), "KV cache") for _ in range(copies)]

    def update(self, layer: object, key: Tensor, value: Tensor, window: int | None = None) -> tuple[Tensor, Tensor]:
        """Append key and value [b, kv, s, d] to those of `layer`; returns all that attention has to see.

        With a `window`, only its last window - 1 tokens are kept for later (the storage is cut at the next call), and
        the layer keeps the window itself as a scalar.
        """
        slots = self._tensors_of(layer, key)
        first = not slots
        if first:
            slots.extend((_empty(key), _empty(value)))
        if window is None:
            slots[0] = _append(slots[0], key)
            slots[1] = _append(slots[1], value)
            return slots[0], slots[1]
        if first:
            self._windows[id(layer)] = window
            self.register_layer(layer, window, 1, key)
            slots.append(self._scalars[id(layer)][0])
        full = _append(slots[0], key), _append(slots[1], value)
        for index, tensor in enumerate(full):
            slots[index] = ops.narrow(tensor, -2, min(tensor.shape[-2], window - 1))
        return full

    def update_single(self, layer: object, keys: Tensor, window: int) -> Tensor:
        """Append keys [b, kv, s, d] that are the values too, in a window; returns all that attention has to see."""
        slots = self._tensors_of(layer, keys)
        if not slots:
            self._windows[id(layer)] = window
            self.register_layer(layer, window, 1, keys)
            slots.extend((_empty(keys), self._scalars[id(layer)][0]))
        full = _append(slots[0], keys)
        slots[0] = ops.narrow(full, -2, min(full.shape[-2], window - 1))
        return full

    def update_entries(self, layer: object, entries: Tensor, rate: int) -> Tensor:
        """Append compressed entries [b, n, d], of which there is one for every `rate` tokens; returns all of them."""
        slots = self._tensors_of(layer, entries)
        self._rates[id(layer)] = rate
        if not slots:
            slots.append(_named(entries, "KV cache"))
        elif entries.shape[1]:
            slots[0] = _append(slots[0], entries)
        return slots[0]

    def update_index(self, layer: object, keys: Tensor) -> Tensor:
        """Append an indexer's keys [b, s, d] to those of `layer`; returns all of them."""
        slots = self._tensors_of(layer, keys)
        if not slots:
            slots.append(_empty(keys))
        slots[0] = _append(slots[0], keys)
        return slots[0]

    def _tensors_of(self, layer: object, key: Tensor) -> list[Tensor]:
        """What `layer` holds so far. The block that it runs in is kept in mind."""
        self._blocks.setdefault(id(layer), key.tape.block)
        self.cards[id(layer)] = key.tape.card
        return self._layers.setdefault(id(layer), [])

    def cross_attention_key_values(self, layer: object) -> tuple[Tensor, Tensor] | None:
        """Key and value of `layer` if it has them already (cross-attention computes them once)."""
        self._fixed.add(id(layer))
        slots = self._layers.get(id(layer))
        return None if slots is None else (slots[0], slots[1])

    def append_tokens(self, tokens: int) -> None:
        """Let `tokens` decoded tokens pass: every layer holds so many more, or as many as its window takes.

        Cross-attention holds what it had.
        """
        self.length += tokens
        self.past += tokens if self.past else 0
        for layer, slots in self._layers.items():
            if layer not in self._fixed and tokens:
                tape = slots[0].tape
                tape.begin_span(tape.phase, self._blocks.get(layer))
                tape.card = slots[0].storage.allocation.card
                self._grow_layer(slots, tokens // self._rates.get(layer, 1), self._windows.get(layer))
                tape.begin_span(tape.phase, None)

    def _grow_layer(self, slots: list[Tensor], tokens: int, window: int | None) -> None:
        """Replace key and value of one layer, inside the span of its block, so that they stand for its copies too.

        The old ones go before the last allocation: what dies with the end of a span would outlive it.
        """
        tape = slots[0].tape
        kinds = [(tensor.shape, tensor.dtype) for tensor in slots[:2] if tensor.shape]
        for index, (shape, dtype) in enumerate(kinds):
            grown = self._grown(tape, shape, dtype, tokens, window)
            slots[index : len(kinds)] = [grown] * (len(kinds) - index)

    def _grown(self, tape: Tape, shape: Shape, dtype: DType, tokens: int, window: int | None) -> Tensor:
        """Keys or values of this shape with so many tokens more."""
        length = shape[-2] + tokens
        kept = length if window is None else min(length, window)
        grown = _named(tape.empty((*shape[:-2], kept, shape[-1]), dtype), "KV cache")
        return grown if window is None else ops.narrow(grown, -2, min(kept, window - 1))

    def static_capacity(self, window: int | None, new: int, seen: int) -> int:
        """How many tokens attention sees in a static cache after `new` after `seen` ones: all that it has room for.

        A window that overflows shows what it held and the new tokens.
        """
        assert self.static_length is not None
        if window is None:
            return self.static_length
        size = min(window, self.static_length)
        return min(seen, size - 1) + new if seen + new > size else size

    def state(self, layer: object, shape: Shape, dtype: DType, like: Tensor, name: str) -> Tensor:
        """A state of `layer`, made at its first use and kept. `like` gives the tape."""
        slots = self._states.setdefault(id(layer), {})
        if name not in slots:
            slots[name] = _named(like.tape.empty(shape, dtype), name)
        return slots[name]

    def set_state(self, layer: object, name: str, state: Tensor) -> None:
        """Keep this tensor itself as a state of `layer`, in place of what was kept."""
        self._states.setdefault(id(layer), {})[name] = _named(state, name)

    def get_state(self, layer: object, name: str) -> Tensor:
        """A state of `layer` that is there."""
        return self._states[id(layer)][name]

    def has_state(self, layer: object, name: str) -> bool:
        """Whether this state of `layer` was made already: whether a token was seen before."""
        return name in self._states.get(id(layer), {})

    def key_values(self) -> Iterator[list[Tensor]]:
        """Keys and values, layer by layer. States are not among them: they do not grow with the tokens."""
        return iter(self._layers.values())

    def nbytes(self) -> dict[int, int]:
        """Bytes of the tensors kept, by layer (identity of the module)."""
        return {
            layer: sum(tensor.numel * tensor.dtype.itemsize for tensor in kept) for layer, kept in self._layers.items()
        }


def _empty(like: Tensor) -> Tensor:
    """No tokens yet: a storage of no bytes."""
    return Tensor((*like.shape[:-2], 0, like.shape[-1]), like.stride, like.dtype, like.tape.allocate(0))


def _append(old: Tensor, new: Tensor) -> Tensor:
    return _named(ops.cat((old, new), -2), "KV cache")


def _named(tensor: Tensor, name: str) -> Tensor:
    allocation = tensor.storage.allocation
    allocation.row, allocation.name = OVERHEAD, name
    return tensor
