"""Losses. Under autocast they run in fp32.

Source of the saved tensors: tools/autograd/derivatives.yaml of PyTorch 2.14.
"""

from __future__ import annotations

from memcalc.autograd.graph import Grads, Node, record
from memcalc.autograd.tensor import Tensor
from memcalc.ops.elementwise import empty_like, fp32_under_autocast
from memcalc.ops.reduction import log_softmax


def cross_entropy(logits: Tensor, target: Tensor) -> Tensor:
    """Cross-entropy of rows of logits [N, V] with target [N]: keeps the log-probabilities and the target.

    Under autocast the log-softmax keeps its own dtype and only the negative log-likelihood is cast to fp32.
    """
    if logits.tape.shards_logits:
        from memcalc.ops.loss_parallel import loss_parallel_cross_entropy

        return loss_parallel_cross_entropy(logits, target)
    log_probs = log_softmax(logits, logits.dtype)
    return nll_loss(log_probs, target)


def nll_loss(log_probs: Tensor, target: Tensor) -> Tensor:
    """Negative log-likelihood: keeps its input, the target and the total weight, a scalar."""
    log_probs = fp32_under_autocast(log_probs)
    tape = log_probs.tape
    loss, total_weight = tape.empty((), log_probs.dtype), tape.empty((), log_probs.dtype)
    node = record(tape, loss, _full_size, (log_probs,), log_probs.shape)
    if node is not None:
        for tensor in (log_probs, target, total_weight):
            node.save(tensor)
    return loss


def mse_loss(x: Tensor, target: Tensor) -> Tensor:
    """Mean squared error: keeps both.

    The scalar is written into the memory of the squares, as large as x, and keeps it (ATen resizes its output; on
    shape-only tensors it is new).
    """
    x = fp32_under_autocast(x)
    tape = x.tape
    count = 1 if tape.sum_out_of_place else x.numel
    loss = Tensor((), (), x.dtype, tape.allocate(count * x.dtype.itemsize))
    if not tape.sum_out_of_place:
        empty_like(x)  # the squares again, inside the reduction
    node = record(x.tape, loss, _full_size, (x,), x.shape)
    if node is not None:
        node.save(x)
        node.save(target)
    return loss


def binary_cross_entropy_with_logits(logits: Tensor, target: Tensor) -> Tensor:
    """Binary cross-entropy of logits: keeps both."""
    logits = fp32_under_autocast(logits)
    inside = () if logits.tape.sum_out_of_place else (empty_like(logits), empty_like(logits))
    loss = logits.tape.empty((), logits.dtype)
    del inside
    node = record(logits.tape, loss, _full_size, (logits,), logits.shape)
    if node is not None:
        node.save(logits)
        node.save(target)
    return loss


def _full_size(node: Node, grads: Grads) -> list[Tensor | None]:
    (grad,) = grads
    return [None if grad is None else node.tape.empty(node.context, grad.dtype)]
