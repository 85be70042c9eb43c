"""The backward engine: which node runs when, and what is alive meanwhile.

Source: torch/csrc/autograd/engine.cpp of PyTorch 2.14. A node is ready when the gradients of all its outputs that
will come have come; of the ready ones, the one created last in forward runs first.
"""

from __future__ import annotations

from heapq import heapify, heappop, heappush
from sys import getrefcount

from memcalc.autograd.graph import Node, unpack
from memcalc.autograd.tape import Tape
from memcalc.autograd.tensor import Tensor, dense_stride
from memcalc.common.sizes import Shape


def backward(tape: Tape, loss: Tensor) -> None:
    """Run the graph of `loss` backward. The caller must not hold the loss's intermediate tensors itself."""
    root = loss.node
    if root is None:
        return
    _count_dependencies([root])
    tape.begin_span("backward", None)
    tape.grad_enabled = False
    with tape.scoped(root.scope):
        root.received = [tape.empty(loss.shape, loss.dtype)]
    keep = root.received[0]  # the root gradient lives through the whole of backward, as does the loss
    _run_all(tape, [root])
    tape.begin_span("backward", None)
    for callback in tape.final_callbacks:
        callback()
    del keep
    for callback in tape.after_backward:
        callback()


def backward_from(tape: Tape, outputs: list[tuple[Tensor, Tensor]]) -> None:
    """Run the graph of several tensors backward, each with its gradient, inside another backward."""
    roots = list(dict.fromkeys(output.node for output, _ in outputs if output.node is not None))
    _count_dependencies(roots)
    for output, gradient in outputs:
        if output.node is not None:
            _add_gradient(tape, output.node, output.slot, gradient)
    outputs.clear()
    _run_all(tape, [root for root in roots if root.pending == 0])


def _run_all(tape: Tape, roots: list[Node]) -> None:
    """Run every node that hangs on `roots`, which have their gradients."""
    ready: list[tuple[int, Node]] = [(-root.sequence, root) for root in roots]
    heapify(ready)
    roots.clear()
    while ready:
        node = heappop(ready)[1]
        if node.block is not tape.block and node.edges:
            tape.begin_span("backward", node.block)
        tape.scope, tape.card = node.scope, node.card
        results = _run(tape, node)
        while results:  # each gradient is moved out of the list, so that a sum can release it
            target, slot, gradient = results.pop()
            _add_gradient(tape, target, slot, gradient)
            target.pending -= 1
            if target.pending == 0:
                heappush(ready, (-target.sequence, target))
            del gradient


def _count_dependencies(roots: list[Node]) -> None:
    """Set `pending` of every node that the backward of `roots` reaches to the number of gradients it will get."""
    seen, stack = set(roots), list(roots)
    while stack:
        for edge in stack.pop().edges:
            if edge is not None:
                target = edge[0]
                target.pending += 1
                if target not in seen:
                    seen.add(target)
                    stack.append(target)


def _run(tape: Tape, node: Node) -> list[tuple[Node, int, Tensor | None]]:
    """Compute one node; its saved tensors and incoming gradients are released before the results are handed on."""
    received, node.received = node.received, None
    for hook in node.hooks:
        hook()
    node.hooks = ()
    node.unpacked = saved = unpack(node)
    outputs = node.backward(node, received or [None])
    saved.clear()
    delivered: list[tuple[Node, int, Tensor | None]] = []
    for index, edge in enumerate(node.edges):
        if edge is None:
            continue
        target, slot, shape, dtype = edge
        gradient = outputs[index]
        outputs[index] = None
        if gradient is not None and gradient.shape != shape:
            gradient = _sum_to_shape(tape, gradient, shape)
        if gradient is not None and gradient.dtype is not dtype:
            gradient = tape.empty(shape, dtype, dense_stride(shape, gradient.stride))
        delivered.append((target, slot, gradient))
        del gradient
    node.saved = []
    node.edges = []
    delivered.reverse()
    return delivered


def _sum_to_shape(tape: Tape, gradient: Tensor, shape: Shape) -> Tensor:
    """The gradient with what was broadcast summed out."""
    lead = len(gradient.shape) - len(shape)  # leading dimensions are summed even where they are of size one
    summed = tape.empty((1,) * lead + shape, gradient.dtype)
    wide = zip(gradient.shape, summed.shape, strict=True)
    tape.reduce(gradient, [dim for dim, (have, left) in enumerate(wide) if dim < lead or have != left])
    return Tensor(shape, summed.stride[lead:], summed.dtype, summed.storage, is_view=lead > 0)


def _add_gradient(tape: Tape, target: Node, slot: int, gradient: Tensor | None) -> None:
    """Put a gradient into its target's buffer; where one waits already, the two are summed.

    The sum goes into the one that waits if nothing else refers to its storage, which a view's base does. Source:
    torch/csrc/autograd/input_buffer.cpp, `can_accumulate_inplace`.
    """
    if target.received is None:
        target.received = []
    while len(target.received) <= slot:
        target.received.append(None)
    waiting = target.received[slot]
    if waiting is None or gradient is None:
        target.received[slot] = waiting if gradient is None else gradient
    elif tape.sum_out_of_place or waiting.is_view or _is_shared(waiting):
        tape.card = target.card
        target.received[slot] = tape.empty(gradient.shape, gradient.dtype, dense_stride(gradient.shape, waiting.stride))


def _is_shared(waiting: Tensor) -> bool:
    """Whether something else refers to a gradient that waits: a node that it went to as well, a view, what is saved."""
    return getrefcount(waiting) > _SOLE_TENSOR or getrefcount(waiting.storage) > _SOLE_STORAGE


_SOLE_TENSOR, _SOLE_STORAGE = 4, 2
"""References that count where nobody else has a waiting gradient: the buffer, locals, arguments; and to its storage."""
