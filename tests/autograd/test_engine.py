"""The backward engine on small graphs: the order of nodes, sums of gradients, and what is alive meanwhile."""

from collections.abc import Callable

import pytest

from memcalc import ops
from memcalc.autograd.engine import backward, backward_from
from memcalc.autograd.graph import AccumulateGrad, Grads, Node, record
from memcalc.autograd.tape import GRADIENTS, NEVER, OVERHEAD, Allocation, Tape
from memcalc.autograd.tensor import Tensor
from memcalc.tables.dtypes import BF16, FP32

SIZE = 256  # elements of a tensor: two blocks of the allocator in fp32


def leaf(tape: Tape, *shape: int, name: str = "weight") -> Tensor:
    """A weight that asks for a gradient."""
    made = tape.external_tensor(shape or (SIZE,), FP32, OVERHEAD, name)
    made.node = AccumulateGrad(tape, name, None)
    return made


def step(tape: Tape, x: Tensor, name: str, ran: list[str], makes: Callable[[Tensor], Tensor] | None = None) -> Tensor:
    """An operation that notes when its backward runs; without `makes` its gradient is handed on as it is."""
    out = tape.empty(x.shape, x.dtype)

    def run(node: Node, grads: Grads) -> list[Tensor | None]:
        ran.append(name)
        (grad,) = grads
        assert grad is not None
        return [grad if makes is None else makes(grad)]

    record(tape, out, run, (x,))
    return out


def born_in_backward(tape: Tape) -> list[Allocation]:
    start = next(span.start for span in tape.spans if span.phase == "backward")
    return tape.allocations[start:]


def test_the_node_that_was_made_last_runs_first() -> None:
    tape, ran = Tape(), list[str]()
    x = leaf(tape)
    first = step(tape, x, "first", ran)
    second = step(tape, x, "second", ran)
    third = step(tape, first, "third", ran)
    loss = ops.add(second, third)
    del first, second, third
    backward(tape, loss)
    assert ran == ["third", "second", "first"]


def test_a_node_waits_for_the_gradients_of_all_that_used_it() -> None:
    tape, ran = Tape(), list[str]()
    x = step(tape, leaf(tape), "shared", ran)
    loss = ops.add(step(tape, x, "left", ran), step(tape, x, "right", ran))
    del x
    backward(tape, loss)
    assert ran == ["right", "left", "shared"]


def new(grad: Tensor) -> Tensor:
    return grad.tape.empty(grad.shape, grad.dtype)


@pytest.mark.parametrize(("out_of_place", "made"), [(False, 3), (True, 4)])
def test_gradients_that_meet_are_summed_in_the_one_that_waits(out_of_place: bool, made: int) -> None:
    """The root's gradient, one of either path, and on shape-only tensors the sum."""
    tape, ran = Tape(sum_out_of_place=out_of_place), list[str]()
    x = step(tape, leaf(tape), "shared", ran)
    loss = ops.add(step(tape, x, "left", ran, new), step(tape, x, "right", ran, new))
    del x
    backward(tape, loss)
    assert len(born_in_backward(tape)) == made


def test_a_view_that_waits_is_not_added_to_in_place() -> None:
    tape, ran = Tape(), list[str]()
    x = step(tape, leaf(tape), "shared", ran)
    loss = ops.add(step(tape, x, "left", ran, new), step(tape, x, "right", ran, lambda g: ops.view(new(g), SIZE)))
    del x
    backward(tape, loss)
    assert len(born_in_backward(tape)) == 4


def test_a_gradient_is_taken_over_by_its_leaf_and_one_that_is_shared_is_copied() -> None:
    tape, ran = Tape(), list[str]()
    own, shared = leaf(tape, name="own"), leaf(tape, name="shared")
    loss = ops.add(step(tape, own, "own", ran, new), step(tape, shared, "shared", ran))
    backward(tape, loss)
    kept = [allocation for allocation in born_in_backward(tape) if allocation.row == GRADIENTS]
    assert {(a.name, a.nbytes) for a in kept} == {("own", 4 * SIZE), ("shared", 4 * SIZE)}
    assert all(allocation.dies == NEVER for allocation in kept)
    assert len(born_in_backward(tape)) == 3  # the root's, which `shared` may not keep, its copy, and `own`'s


def test_later_gradients_are_added_into_the_first() -> None:
    tape, ran = Tape(), list[str]()
    x = leaf(tape)
    for _ in range(2):
        loss = step(tape, x, "op", ran, new)
        tape.grad_enabled = True
        backward(tape, loss)
        del loss
        tape.grad_enabled = True
    kept = [allocation for allocation in tape.allocations if allocation.row == GRADIENTS]
    assert len(kept) == 1
    alive = [allocation for allocation in tape.allocations if allocation.dies == NEVER]
    assert alive == kept


def test_what_was_broadcast_is_summed_out() -> None:
    tape, ran = Tape(), list[str]()
    row = leaf(tape, SIZE, name="row")
    wide = step(tape, leaf(tape, 8, SIZE, name="wide"), "wide", ran, new)
    loss = ops.add(wide, row)
    del wide
    backward(tape, loss)
    kept = {a.name: a.raw_nbytes for a in born_in_backward(tape) if a.row == GRADIENTS}
    assert kept == {"row": 4 * SIZE, "wide": 4 * 8 * SIZE}


def test_a_gradient_has_the_dtype_of_what_it_belongs_to() -> None:
    tape, ran = Tape(), list[str]()
    x = leaf(tape)
    narrow = ops.to(x, BF16)
    loss = step(tape, narrow, "op", ran, new)
    del narrow
    backward(tape, loss)
    assert [a.raw_nbytes for a in born_in_backward(tape) if a.row == GRADIENTS] == [4 * SIZE]


def test_what_was_saved_is_released_when_its_node_has_run() -> None:
    tape = Tape()
    a = ops.exp(leaf(tape))
    b = ops.exp(a)
    loss = ops.mul_scalar(b)
    del a, b
    backward(tape, loss)
    first, second = [allocation for allocation in tape.allocations if allocation.saved]
    root, of_loss, of_second, of_first = born_in_backward(tape)
    assert second.dies == of_first.born == of_second.born + 1
    assert first.dies == of_first.born + 1
    assert of_loss.dies == of_first.born
    assert root.dies > of_first.born  # it lives through all of backward


def test_several_outputs_run_backward_together() -> None:
    tape, ran = Tape(), list[str]()
    x = leaf(tape)
    left, right = step(tape, x, "left", ran), step(tape, x, "right", ran)
    tape.begin_span("backward", None)
    outputs = [(left, tape.empty(left.shape, FP32)), (right, tape.empty(right.shape, FP32))]
    backward_from(tape, outputs)
    assert ran == ["right", "left"]
    assert outputs == []


def test_a_loss_without_a_graph_has_no_backward() -> None:
    tape = Tape()
    backward(tape, tape.empty((1,), FP32))
    assert tape.clock == 1
