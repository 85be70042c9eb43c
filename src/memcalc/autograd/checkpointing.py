"""Activation checkpointing: blocks, or attention alone, that keep their inputs and run again in backward.

Source: torch/utils/checkpoint.py of PyTorch 2.14, transformers 5.24 (modeling_layers.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

from memcalc.autograd.engine import backward_from
from memcalc.autograd.graph import (
    AccumulateGrad,
    CheckpointFrame,
    CheckpointSlot,
    Grads,
    Node,
    Offloaded,
    record,
    unpack,
)
from memcalc.autograd.offloading import offload
from memcalc.autograd.tape import ACTIVATIONS, TEMPORARY, Tape
from memcalc.autograd.tensor import Storage, Tensor
from memcalc.common.sizes import Shape
from memcalc.errors import UsageError
from memcalc.tables.dtypes import DType

_NAME = "inputs of checkpointed blocks"


def checkpointed(tape: Tape, module: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Run `module` keeping only its arguments (torch.utils.checkpoint, use_reentrant=False).

    Positional tensors are saved for backward, or copied to host memory where the tape offloads; keyword arguments are
    kept alive by the closure alone. Inside another checkpointed call, that one makes the positional tensors again.
    """
    autocast, scope, outer = tape.autocast, tape.scope, tape.checkpoint
    hold = _KeptInput if outer is None else partial(_RecomputedInput, outer)
    kept = [hold(arg) if isinstance(arg, Tensor) else arg for arg in args]

    def rerun() -> object:
        again = [arg.again() if isinstance(arg, (_KeptInput, _RecomputedInput)) else arg for arg in kept]
        with tape.scoped(scope), tape.autocasting(autocast):
            return module(*again, **kwargs)

    tape.checkpoint = CheckpointFrame(rerun)
    try:
        return module(*args, **kwargs)
    finally:
        tape.checkpoint = outer


class _KeptInput:
    """A positional tensor of a checkpointed call, on the device or in host memory."""

    def __init__(self, tensor: Tensor) -> None:
        self.tape = tensor.tape
        self.tensor: Tensor | None = tensor
        if self.tape.offloads_inputs:
            offload(self.tape, tensor)
            self.layout = tensor.shape, tensor.dtype, tensor.node, tensor.slot
            self.tensor = None
        else:
            mark_saved(tensor.storage)

    def again(self) -> Tensor:
        """The tensor, for the block to run once more."""
        if self.tensor is not None:
            return self.tensor
        shape, dtype, node, slot = self.layout
        back = self.tape.empty(shape, dtype)
        back.storage.allocation.name = _NAME
        back.node, back.slot = node, slot
        return back


class _RecomputedInput:
    """A positional tensor of a checkpointed call inside another: running the outer one again brings it back."""

    def __init__(self, outer: CheckpointFrame, tensor: Tensor) -> None:
        self.tape = tensor.tape
        self.layout = tensor.shape, tensor.stride, tensor.dtype
        self.node, self.slot = tensor.node, tensor.slot
        self.saved: list[Storage | CheckpointSlot | Offloaded] = []
        outer.pack(self, tensor.storage)

    def again(self) -> Tensor:
        """The tensor, for the inner call to run once more."""
        storage = unpack(self)[0] if isinstance(self.saved[0], CheckpointSlot) else self.saved[0]
        assert isinstance(storage, Storage)
        return Tensor(*self.layout, storage, self.node, self.slot)


def mark_saved(storage: Storage) -> None:
    """Count `storage` as an input of a checkpointed block that is kept for backward."""
    allocation = storage.allocation
    allocation.saved = True
    if allocation.row == TEMPORARY:
        allocation.row, allocation.name = ACTIVATIONS, _NAME


# -- reentrant --------------------------------------------------------------------------------------------------------


class _Layout(NamedTuple):
    """What a saved tensor is made of again."""

    shape: Shape
    stride: Shape
    dtype: DType
    needed: bool
    """Whether its gradient is asked for."""


@dataclass(frozen=True)
class _Call:
    """A call that backward repeats: positional tensors come from what was saved."""

    module: Callable[..., Any]
    args: Sequence[Any]
    kwargs: Mapping[str, Any]
    autocast: DType | None
    scope: str


def reentrant(tape: Tape, module: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Run `module` outside the graph as one node, whose backward runs it again and goes through its graph
    (torch.utils.checkpoint, use_reentrant=True).
    """
    refuse_keywords(kwargs.values())
    tape.grad_enabled = False
    try:
        out = module(*args, **kwargs)
    finally:
        tape.grad_enabled = True
    inputs = [arg for arg in args if isinstance(arg, Tensor)]
    layouts = [
        _Layout(arg.shape, arg.stride, arg.dtype, arg.requires_grad) if isinstance(arg, Tensor) else arg for arg in args
    ]
    outputs = [value for value in (out if isinstance(out, tuple) else (out,)) if isinstance(value, Tensor)]
    call = _Call(module, layouts, kwargs, tape.autocast, tape.scope)
    node = record(tape, outputs[0], _run_again, inputs, call)
    for slot, value in enumerate(outputs):
        value.node, value.slot = node, slot
    if node is not None:
        tape.kept_by_graph.append(kwargs)
        for tensor in inputs:
            if tape.offloads_inputs:
                node.saved.append(Offloaded(offload(tape, tensor)))
            else:
                node.save(tensor)
                mark_saved(tensor.storage)
    return out


def refuse_keywords(values: Iterable[Any]) -> None:
    """Refuse keyword arguments that need a gradient: reentrant checkpointing would lose it. Raises UsageError."""
    if any(isinstance(value, Tensor) and value.requires_grad for value in values):
        raise UsageError(
            "reentrant checkpointing loses the gradients of tensors that blocks of this family take by keyword; "
            "leave out --checkpoint-reentrant."
        )


def _run_again(node: Node, grads: Grads) -> list[Tensor | None]:
    tape, call = node.tape, node.context
    storages = iter(node.saved_storages())
    args = [_leaf(tape, arg, next(storages)) if isinstance(arg, _Layout) else arg for arg in call.args]
    del storages
    tape.grad_enabled = True
    kept_before = len(tape.kept_by_graph)
    try:
        with tape.scoped(call.scope), tape.autocasting(call.autocast):
            out = call.module(*args, **call.kwargs)
    finally:
        tape.grad_enabled = False
    outputs = [value for value in (out if isinstance(out, tuple) else (out,)) if isinstance(value, Tensor)]
    del out
    backward_from(tape, [(value, grad) for value, grad in zip(outputs, grads, strict=False) if grad is not None])
    del tape.kept_by_graph[kept_before:]  # this run's graph goes
    return [_gradient(arg) for arg in args if isinstance(arg, Tensor)]


def _leaf(tape: Tape, layout: _Layout, storage: Storage) -> Tensor:
    made = Tensor(layout.shape, layout.stride, layout.dtype, storage)
    if layout.needed:
        made.node = AccumulateGrad(tape, tape.scope, None, TEMPORARY)
    return made


def _gradient(leaf: Tensor) -> Tensor | None:
    return leaf.node.gradient if isinstance(leaf.node, AccumulateGrad) else None
