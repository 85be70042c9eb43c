"""What PyTorch's trackers themselves keep alive in backward, on top of what a GPU would.

`MemTracker` follows modules with `register_multi_grad_hook`: for a module called with two or more positional tensors
that need gradients, it holds the gradient of each until the gradients of all of them exist. Encoders in BERT's manner
call their output modules so (hidden states, residual). Measured rows contain these gradients; memcalc, which answers
for a GPU, does not. `as_tracked()` adds them, so that tests can compare every byte.

The instrument also packs what is saved with a hook that gives the tensor itself. A node that saves its own output
(exp) then holds itself, until backward runs it; where backward never comes (the last state of RWKV's recurrence), it
stays for good, with all that made its output. `as_tracked()` keeps such nodes.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

from memcalc import ops
from memcalc.autograd import engine
from memcalc.autograd.graph import AccumulateGrad, Node
from memcalc.autograd.tape import BEFORE, Allocation, Tape
from memcalc.autograd.tensor import Storage, Tensor
from memcalc.common.sizes import rounded
from memcalc.nn.layers.linear import Embedding, Linear
from memcalc.nn.module import Module, TrainedCopy
from memcalc.peak.untraced_blocks import UntracedBlocks
from memcalc.setup.setup import TrainingSetup
from memcalc.training.step import _trace
from memcalc.training.traced_step import Step


class _Group:
    """The arguments of one call: gradients seen so far, and how many there will be."""

    def __init__(self, expected: int) -> None:
        self.expected = expected
        self.held: list[Tensor | None] = []

    def see(self, gradient: Tensor | None) -> None:
        self.held.append(gradient)
        if len(self.held) == self.expected:
            self.held.clear()


def _tensors(value: object) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        if value.node is not None:
            yield value
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from _tensors(item)


_FED: dict[int, list[int]] = {}
"""Bytes of the leaves that the input embeddings of towers gave, by tape."""


def _leaf(x: Tensor) -> bool:
    """Whether `x` is a leaf that needs a gradient, or a view of one."""
    node = x.node
    while node is not None and x.is_view and node.edges:
        node = None if node.edges[0] is None else node.edges[0][0]
    return isinstance(node, AccumulateGrad)


@contextmanager
def as_tracked(*, hooked: bool = True, packs: bool = True) -> Iterator[None]:
    """Run as under the tracker; where it is not `hooked`, what it puts on modules is left out.

    `packs` says whether what is saved went through the hook that gives the tensor itself.
    """
    hooks: dict[int, list[tuple[int, _Group]]] = {}
    _FED.clear()
    call, run, save = Module.__call__, engine._run, Node.save

    def hooked_save(self: Node, kept: Tensor | Storage, *, output: bool = False) -> None:
        save(self, kept, output=output)
        if packs and isinstance(kept, Tensor) and kept.node is self and self.tape.checkpoint is None:
            _holding_themselves(self.tape)[id(self)] = self

    _trace.cache_clear()  # what was traced without the hooks

    def hooked_call(self: Module, *args: Any, **kwargs: Any) -> Any:
        if not any(isinstance(arg, Tensor) and arg.tape.phase == "backward" for arg in args):
            needed = list(_tensors(args))
            if len(needed) > 1:
                group = _Group(len(needed))
                for tensor in needed:
                    hooks.setdefault(id(tensor.node), []).append((tensor.slot, group))
                del tensor
            del needed
        out = call(self, *args, **kwargs)
        if self.is_input_embedding and isinstance(out, Tensor) and _leaf(out):
            _FED.setdefault(id(out.tape), []).append(out.storage.allocation.nbytes)
        return out

    def hooked_run(tape: Tape, node: Node) -> Any:
        _holding_themselves(tape).pop(id(node), None)
        for slot, group in hooks.pop(id(node), ()):
            received = node.received or []
            group.see(received[slot] if slot < len(received) else None)
            del received
        return run(tape, node)

    with (
        patch.object(Module, "__call__", hooked_call if hooked else call),
        patch.object(engine, "_run", hooked_run if hooked else run),
        patch.object(Node, "save", hooked_save),
        patch.object(TrainedCopy, "__call__", copied_module),
        patch.object(Linear, "forward", copied_linear),
    ):
        yield
    _trace.cache_clear()


def _holding_themselves(tape: Tape) -> dict[int, Node]:
    """Nodes that hold themselves."""
    found: dict[int, Node] = vars(tape).setdefault("holding_themselves", {})
    return found


def _never_released(step: Step) -> int:
    """Bytes that one micro-batch leaves behind in nodes that hold themselves."""
    waiting, seen = list(_holding_themselves(step.tape).values()), set[int]()
    held: dict[int, Allocation] = {}
    while waiting:
        node = waiting.pop()
        if id(node) not in seen:
            seen.add(id(node))
            waiting.extend(edge[0] for edge in node.edges if edge is not None)
            held.update((id(kept.allocation), kept.allocation) for kept in node.saved if isinstance(kept, Storage))
    untraced = UntracedBlocks(step.tape)
    return sum(a.nbytes * untraced.copies(a.born) for a in held.values() if a.born != BEFORE)


def dropped(step: Step) -> int:
    """What was saved for backward and dropped before the end of forward: the instrument counts all that was packed."""
    made = step.tape.allocations[: step.forward_end]
    untraced = UntracedBlocks(step.tape)
    return sum(
        allocation.raw_nbytes * untraced.copies(allocation.born)
        for allocation in made
        if allocation.saved and allocation.dies <= step.forward_end
    )


def kept_leaves(step: Step) -> dict[str, int]:
    """Token embeddings that need a gradient, and that gradient, of every micro-batch that the instrument ran before.

    Its hook on such a leaf keeps both alive for good. Without it they go with the loss (seen with weak references). So
    it is with the patches of frozen towers, with the zero biases of T5's cross-attention, which checkpointing makes
    leaves, and with the samples of a recording, which wav2vec 2.0 makes one (`Tape.leaves`). A table that encoder and
    decoder share stands in the network once more, under its own name.
    """
    setup, leaves = step.setup, 0
    assert isinstance(setup, TrainingSetup)
    replaced = {
        id(inner)
        for _, module in step.network.modules()
        if isinstance(module, TrainedCopy)
        for _, inner in module.original_module.modules()
    }
    tables = [module for _, module in step.network.modules() if isinstance(module, Embedding)]
    for number, module in enumerate(tables):
        weight, shared = module.weight, tables.count(module) > 1
        if not module.output_needs_gradient or (shared and module not in tables[:number]):
            continue
        if not weight.trainable and id(module) not in replaced:
            leaves += 2 * rounded(setup.sequences * step.seq_len * weight.shape[1] * weight.dtype.itemsize)
    inputs = {id(allocation) for allocation in step.tape.inputs}  # of these only the gradient is kept besides
    for allocation in (leaf.storage.allocation for leaf in step.tape.leaves):
        leaves += allocation.nbytes * (1 if id(allocation) in inputs else 2)
    leaves += 2 * sum(_FED.get(id(step.tape), ()))
    runs = 2 * setup.grad_accum  # the second optimizer step is the measured one
    asked = leaves // 2 * runs if setup.reference_used == "shared" else 0  # a reference's have no gradient
    leaves += _never_released(step)
    before, after = leaves * (runs - 1) + asked, leaves * runs + asked
    return {"forward": before, "backward": before, "step": after}


def copied_linear(layer: Linear, x: Tensor) -> Tensor:
    """A linear layer in a `modules_to_save` copy: its transposed weight is a new tensor to the instrument.

    Not under autocast, which casts the weight first.
    """
    weight = layer.weight
    if not hasattr(layer, "copied") or x.tape.autocast is not None:
        return ops.linear(x, weight, layer.bias)
    seen = x.tape.empty(weight.shape, weight.dtype)
    seen.node = weight.node
    return ops.linear(x, seen, layer.bias)


def copied_module(copy: TrainedCopy, x: Tensor, *args: Any, **kwargs: Any) -> Any:
    """Run a `modules_to_save` copy with `copied_linear` in it."""
    for _, module in copy.trained.modules():
        if isinstance(module, Linear):
            module.copied = True  # type: ignore[attr-defined]
    return copy.trained(x, *args, **kwargs)
