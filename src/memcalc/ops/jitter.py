"""Noise that multiplies a tensor in place.

Source: `hidden_states *= torch.empty_like(hidden_states).uniform_(...)` in Transformers' mixtures of experts;
torch/csrc/autograd/functions/tensor.cpp (CopySlices) for what an in-place operation on a view does in backward.
"""

from __future__ import annotations

from memcalc.autograd.graph import Grads, Node, record
from memcalc.autograd.tensor import Tensor
from memcalc.ops.elementwise import empty_like
from memcalc.ops.unary import backward_temporaries


def jitter_(x: Tensor, *, of_view: bool = False) -> Tensor:
    """x times random numbers, in place: keeps those.

    Where x is a view (`of_view`), backward copies the gradient of the whole first, and then the part that it changes.
    """
    noise = empty_like(x.detach())
    out = Tensor(x.shape, x.stride, x.dtype, x.storage, x.node, x.slot)
    node = record(x.tape, out, _view_backward if of_view else backward_temporaries(1), (x,))
    if node is not None:
        node.save(noise)
    return out


def _view_backward(node: Node, grads: Grads) -> list[Tensor | None]:
    (grad,) = grads
    if grad is None:
        return [None]
    whole = empty_like(grad)
    part = empty_like(grad)
    changed = empty_like(grad)
    del part, changed
    return [whole]
