"""Attention of a sequence that several GPUs share: keys and values go round, and each turn's result is merged.

Source: torch/distributed/tensor/experimental/_context_parallel/_attention.py of PyTorch 2.14, with its defaults:
results and gradients are summed in fp32, and causal work is balanced, so that each rank has one chunk of the first half
of the sequence and one of the second. Turns up to the rank's own number need half of the keys, later ones half of the
queries.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import prod

from memcalc.autograd.graph import Grads, Node, record
from memcalc.autograd.tape import Ring, Tape
from memcalc.autograd.tensor import Tensor, dense_stride, is_contiguous
from memcalc.common.sizes import Shape
from memcalc.errors import UsageError
from memcalc.ops.attention_backward import gradients
from memcalc.ops.attention_forward import forward_kernel, layouts
from memcalc.ops.attention_kernels import Attention
from memcalc.tables.dtypes import FP32, DType

Layout = tuple[Shape, Shape]
"""Shape and strides."""


def ring_attention(query: Tensor, key: Tensor, value: Tensor, call: Attention, kernel: str) -> Tensor:
    """Causal attention of this rank's queries [b, h, s, d] over the keys of all ranks: [b, h, s, d].

    Keeps what attention keeps on one GPU: query, key, value, output, log-sum-exp and random state.

    Raises:
        UsageError: it is not causal, or no fused kernel takes it.
    """
    if not call.is_causal or call.has_mask or kernel == "math":
        raise UsageError(
            "context parallel attends causally, without masks and with a fused kernel, and this model does not; leave "
            "out --context-parallel-size."
        )
    tape = query.tape
    assert tape.ring is not None
    ring, spread = tape.ring, layouts(query, key, value)
    merger = _Merger(tape)
    local = [_contiguous(tape, layout, key.dtype) for layout in spread[1:]]
    travelling = _Travelling(tape, ring, _elements(spread[1:]), key.dtype)
    first: list[Tensor] | None = None
    for turn in range(ring.ranks):
        if turn:
            local = [travelling.arrived()]
        if turn < ring.ranks - 1:
            travelling.send(travelling.joined())
        part, shown = _part(call, ring, turn, query)
        out, lse, random = forward_kernel(shown, part, kernel)
        first = random if first is None else first
        merger.add(out, lse, partial=part.length < call.length)
    del local, travelling
    result, lse = merger.results(query.dtype)
    node = record(tape, result, _ring_backward, (query, key, value), (kernel, call, ring, spread, result.stride))
    if node is not None:
        for tensor in (query, key, value):
            node.save(tensor)
        for tensor in (result, lse, *(first or ())):
            node.save(tensor, output=True)
    return result


def _part(call: Attention, ring: Ring, turn: int, query: Tensor) -> tuple[Attention, Tensor]:
    """What a turn computes: the sizes of its call, and the queries that it takes (a view)."""
    if turn == 0:
        return call, query
    if turn <= ring.rank:
        return replace(call, key_length=call.key_length // 2, is_causal=False), query
    half = (*query.shape[:2], call.length // 2, query.shape[3])
    shown = Tensor(half, query.stride, query.dtype, query.storage, is_view=True)
    return replace(call, length=call.length // 2, is_causal=False), shown


def _elements(spread: Sequence[Layout]) -> int:
    return sum(prod(shape) for shape, _ in spread)


def _contiguous(tape: Tape, layout: Layout, dtype: DType) -> Tensor | None:
    """The copy that `contiguous()` makes; None where it makes none."""
    return None if is_contiguous(*layout) else tape.empty(layout[0], dtype)


class _Travelling:
    """Keys and values on their way, flattened into one tensor: gathered from all ranks at once, or passed on.

    What was sent lives until the rank waits for what comes.
    """

    def __init__(self, tape: Tape, ring: Ring, elements: int, dtype: DType) -> None:
        self.tape, self.ring, self.elements, self.dtype = tape, ring, elements, dtype
        self.sent: Tensor | None = None
        self.buffer: Tensor | None = None

    def joined(self) -> Tensor:
        """What this rank sends, flattened."""
        return self.tape.empty((self.elements,), self.dtype)

    def send(self, joined: Tensor) -> None:
        """Start the exchange."""
        if not self.ring.gathers or self.buffer is None:
            turns = self.ring.ranks - 1 if self.ring.gathers else 1
            collective = "all-gather" if self.ring.gathers else "all-to-all"
            self.tape.send(collective, turns * self.elements * self.dtype.itemsize)
        if not self.ring.gathers:
            self.buffer, self.sent = self.tape.empty((self.elements,), self.dtype), joined
        elif self.buffer is None:
            self.buffer, self.sent = self.tape.empty((self.ring.ranks * self.elements,), self.dtype), joined

    def arrived(self) -> Tensor | None:
        """Wait for what comes: the tensor that holds it."""
        self.sent = None
        return self.buffer


class _Merger:
    """The result so far and its log-sum-exp, in fp32."""

    def __init__(self, tape: Tape) -> None:
        self.tape = tape
        self.out: Tensor | None = None
        self.lse: Tensor | None = None

    def add(self, out: Tensor, lse: Tensor, *, partial: bool) -> None:
        """Merge a turn's result; a `partial` one is that of the second half of the queries."""
        wide = self._to(out, FP32)
        if self.out is None or self.lse is None:
            self.out, self.lse = wide, lse
            return
        share = self._weight(lse)
        scaled = self._scaled(wide, share)
        out_sum = self._like(wide)
        del scaled, share
        shares = self._weight(lse)
        lse_sum = self._like(lse)
        del shares
        if partial:
            self.lse = self.tape.empty(self.lse.shape, FP32)
            self.out = self.tape.empty(self.out.shape, FP32)
        else:
            self.lse, self.out = lse_sum, out_sum

    def results(self, dtype: DType) -> tuple[Tensor, Tensor]:
        """Output and log-sum-exp."""
        assert self.out is not None
        assert self.lse is not None
        return self._to(self.out, dtype), self.lse

    def _weight(self, lse: Tensor) -> Tensor:
        """A sigmoid of a difference of log-sum-exps."""
        difference = self._like(lse)
        weight = self._like(lse)
        del difference
        return weight

    def _scaled(self, wide: Tensor, share: Tensor) -> Tensor:
        """`share` times a difference of outputs."""
        difference = self._like(wide)
        scaled = self._like(wide)
        del difference, share
        return scaled

    def _like(self, tensor: Tensor) -> Tensor:
        return self.tape.empty(tensor.shape, FP32, dense_stride(tensor.shape, tensor.stride))

    def _to(self, tensor: Tensor, dtype: DType) -> Tensor:
        if tensor.dtype is dtype:
            return tensor
        return self.tape.empty(tensor.shape, dtype, dense_stride(tensor.shape, tensor.stride))


def _ring_backward(node: Node, grads: Grads) -> list[Tensor | None]:
    """Gradients of query, key and value: those of keys travel with them, in fp32, and are cast at the end."""
    (grad,) = grads
    if grad is None:
        return [None] * len(node.edges)
    tape = node.tape
    kernel, call, ring, spread, out_stride = node.context
    elements, dtype = _elements(spread[1:]), call.dtype
    of_query, *of_local = (tape.empty(shape, FP32, dense_stride(shape, stride)) for shape, stride in spread)
    local = [_contiguous(tape, layout, dtype) for layout in spread[1:]]
    travelling = _Travelling(tape, ring, elements, dtype)
    returning = _Travelling(tape, replace(ring, gathers=False), elements, FP32)
    found: list[Tensor] = []
    joined = sums = None
    for turn in range(ring.ranks):
        if turn:
            local = [travelling.arrived()]
        if turn < ring.ranks - 1:
            joined = travelling.joined()
            travelling.send(joined)
        part, shapes = _backward_part(call, ring, turn, spread)
        lse = tape.empty((call.batch, call.heads, part.length, 1), FP32) if part.length < call.length else None
        found = gradients(tape, kernel, part, shapes, (grad, out_stride))
        del lse
        if turn:
            arrived = returning.arrived()
            assert arrived is not None
            of_local = [_split(arrived, shape) for shape, _ in spread[1:]]
            del arrived
            if turn <= ring.rank:
                of_local[0] = tape.empty(spread[1][0], FP32)
                of_local[1] = tape.empty(spread[2][0], FP32)
        flat = [_contiguous(tape, (tensor.shape, tensor.stride), FP32) for tensor in of_local]
        sums = returning.joined()
        del flat
        returning.send(sums)
        if turn > ring.rank:
            of_query = tape.empty(spread[0][0], FP32)
    of_query = _cast(tape, of_query, dtype)
    arrived = returning.arrived()
    assert arrived is not None
    whole = _cast(tape, arrived, dtype)
    del found, joined, sums, local
    return [of_query, *(_split(whole, shape) for shape, _ in spread[1:])]


def _backward_part(
    call: Attention, ring: Ring, turn: int, spread: Sequence[Layout]
) -> tuple[Attention, Sequence[Layout]]:
    """The sizes of a turn's call, and the shapes of its gradients."""
    of_query, *others = spread
    if turn == 0:
        return call, spread
    if turn <= ring.rank:
        part = replace(call, key_length=call.key_length // 2, is_causal=False)
        return part, (of_query, *(_halved(layout, contiguous=True) for layout in others))
    part = replace(call, length=call.length // 2, is_causal=False)
    return part, (_halved(of_query), *(((shape, _rows(shape))) for shape, _ in others))


def _halved(layout: Layout, *, contiguous: bool = False) -> Layout:
    shape, stride = layout
    half = (*shape[:2], shape[2] // 2, shape[3])
    return half, _rows(shape) if contiguous else stride


def _rows(shape: Shape) -> Shape:
    """Strides of a row-major tensor."""
    return (shape[1] * shape[2] * shape[3], shape[2] * shape[3], shape[3], 1)


def _split(whole: Tensor, shape: Shape) -> Tensor:
    """A view of the part of `whole` that has this shape."""
    return Tensor(shape, _rows(shape), whole.dtype, whole.storage, is_view=True)


def _cast(tape: Tape, tensor: Tensor, dtype: DType) -> Tensor:
    if tensor.dtype is dtype:
        return tensor
    return tape.empty(tensor.shape, dtype, dense_stride(tensor.shape, tensor.stride))
