"""An all-to-all along the first dimension, whose backward is another one.

Source: `_DimZeroAllToAll` in deepspeed/sequence/layer.py of DeepSpeed 0.19.6.
"""

from __future__ import annotations

from memcalc.autograd.graph import Grads, Node, record
from memcalc.autograd.tensor import Tensor
from memcalc.ops.elementwise import empty_like
from memcalc.ops.views import contiguous

ALL_TO_ALL = "all-to-all"


def all_to_all(x: Tensor) -> Tensor:
    """x [ranks, ...] with its slices exchanged between the ranks: a new tensor of the same shape. Keeps nothing."""
    made = _exchanged(x)
    record(x.tape, made, _backward, (x,))
    return made


def _exchanged(x: Tensor) -> Tensor:
    made = empty_like(x)
    sent = contiguous(x.detach())
    x.tape.send(ALL_TO_ALL, sent.numel * sent.dtype.itemsize * (x.shape[0] - 1) // x.shape[0])
    return made


def _backward(node: Node, grads: Grads) -> list[Tensor | None]:
    (grad,) = grads
    return [None if grad is None else _exchanged(grad)]
