"""The auxiliary loss that keeps the experts of a mixture equally busy (Switch Transformer, 2101.03961).

Source: `load_balancing_loss_func` of transformers 5.24, which goes layer by layer.
"""

from __future__ import annotations

from memcalc import ops
from memcalc.autograd.spans import TracedBlock
from memcalc.autograd.tape import Tape
from memcalc.autograd.tensor import Tensor
from memcalc.nn.layers.masks import padding_input
from memcalc.nn.layers.routers import Router
from memcalc.nn.run_context import Routed
from memcalc.nn.stack import Stack
from memcalc.tables.dtypes import FP32, INT32


def load_balancing_loss(ids: Tensor, routed: list[Routed], *, padding: bool) -> Tensor:
    """The loss of all `routed` layers of a batch `ids` [b, s], a scalar; padded tokens do not count.

    The layers are a stack of their own: the loss of one that was traced stands for that of all it answers for.
    """
    tape, experts = ids.tape, routed[0].logits.shape[-1]
    busy = tape.empty((experts,), FP32)
    likely = tape.empty((experts,), FP32)
    mask = ops.to(ops.reshape(padding_input(ids), -1), FP32) if padding else None
    rows: Tensor | None = None
    for layer in routed:
        _enter(tape, layer.block)
        weights = ops.softmax(layer.logits)
        _values, chosen = ops.topk(weights, layer.per_token)
        if mask is None:
            busy = ops.add(busy, _histogram(chosen, experts))
            likely = ops.add(likely, ops.sum(ops.to(weights, FP32), 0))
        else:
            busy = ops.add(busy, _counts(chosen, mask, experts))
            likely = ops.add(likely, ops.sum(ops.mul(ops.to(weights, FP32), ops.unsqueeze(mask, -1)), 0))
            total = ops.sum(mask)
            rows = ops.add_scalar(total) if rows is None else ops.add(rows, total)
            del total
        for tensor in (_values, chosen, busy, likely, rows, None if weights.requires_grad else weights):
            if tensor is not None:  # it goes when the next layer puts another in its place
                tensor.storage.allocation.handed_over = True
    tape.begin_span(tape.phase, None)
    busy = _over(busy, rows)
    likely = _over(likely, rows)
    loss = ops.sum(ops.mul(busy, ops.unsqueeze(likely, 0)))
    return ops.mul_scalar(ops.reshape(loss))


def part_first_routed(layers: Stack) -> None:
    """Let the first layer with a router be traced by itself: the loop over layers starts with it."""
    routed = [p for p, block in layers.positions if any(isinstance(part, Router) for _, part in block.modules())]
    layers.split([position == min(routed, default=0) for position in range(layers.depth)])


def _enter(tape: Tape, block: TracedBlock | None) -> None:
    alike = (
        None if block is None else TracedBlock("router loss", block.depth, block.kind, block.position, block.positions)
    )
    tape.begin_span(tape.phase, alike)


def _over(sums: Tensor, rows: Tensor | None) -> Tensor:
    return ops.mul_scalar(sums) if rows is None else ops.div(sums, rows)


def _histogram(chosen: Tensor, experts: int) -> Tensor:
    flat = ops.to(ops.reshape(chosen, -1), INT32)
    return flat.tape.empty((experts,), INT32)


def _counts(chosen: Tensor, mask: Tensor, experts: int) -> Tensor:
    tape = chosen.tape
    counts = tape.empty((experts,), FP32)
    _indices, _repeated = ops.reshape(chosen, -1), tape.empty((chosen.numel,), FP32)
    return counts
