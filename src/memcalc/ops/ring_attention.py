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
from memcalc.autograd.spans import Ring
from memcalc.autograd.tape import Tape
from memcalc.autograd.tensor import Tensor, contiguous_stride, dense_stride, is_contiguous
from memcalc.common.sizes import Shape
from memcalc.errors import UsageError
from memcalc.ops.attention_backward import gradients
from memcalc.ops.attention_forward import forward_kernel, layouts
from memcalc.ops.attention_kernels import Attention
from memcalc.ops.elementwise import empty_like, to
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
        wide = to(out, FP32)
        if self.out is None or self.lse is None:
            self.out, self.lse = wide, lse
            return
        share = _of_difference(lse)
        scaled = _of_difference(wide)
        out_sum = empty_like(wide)
        del scaled, share
        share = _of_difference(lse)
        lse_sum = empty_like(lse)
        del share
        if partial:
            self.lse = self.tape.empty(self.lse.shape, FP32)
            self.out = self.tape.empty(self.out.shape, FP32)
        else:
            self.lse, self.out = lse_sum, out_sum

    def results(self, dtype: DType) -> tuple[Tensor, Tensor]:
        """Output and log-sum-exp."""
        assert self.out is not None
        assert self.lse is not None
        return to(self.out, dtype), self.lse


def _of_difference(x: Tensor) -> Tensor:
    """What is made of a difference of `x` and another, such as its sigmoid."""
    difference = empty_like(x)
    made = empty_like(x)
    del difference
    return made


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
    of_query = to(of_query, dtype)
    arrived = returning.arrived()
    assert arrived is not None
    whole = to(arrived, dtype)
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
    return part, (_halved(of_query), *((shape, contiguous_stride(shape)) for shape, _ in others))


def _halved(layout: Layout, *, contiguous: bool = False) -> Layout:
    shape, stride = layout
    half = (*shape[:2], shape[2] // 2, shape[3])
    return half, contiguous_stride(shape) if contiguous else stride


def _split(whole: Tensor, shape: Shape) -> Tensor:
    """A view of the part of `whole` that has this shape."""
    return Tensor(shape, contiguous_stride(shape), whole.dtype, whole.storage, is_view=True)
