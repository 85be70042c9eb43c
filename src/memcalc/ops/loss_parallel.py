"""Cross-entropy of logits that are sharded over the vocabulary (`torch.distributed.tensor.parallel.loss_parallel`).

Source: torch/distributed/tensor/parallel/loss.py of PyTorch 2.14: eager operations on this rank's columns.
"""

from __future__ import annotations

from memcalc.autograd.graph import Grads, Node, record
from memcalc.autograd.tensor import Tensor
from memcalc.tables.dtypes import BOOL, INT64


def loss_parallel_cross_entropy(logits: Tensor, target: Tensor) -> Tensor:
    """Cross-entropy of this rank's columns [N, V / ranks] of logits with target [N]."""
    return _nll_loss(_log_softmax(logits), target)


def _log_softmax(x: Tensor) -> Tensor:
    tape, column = x.tape, (x.shape[0], 1)
    largest = tape.empty(column, x.dtype)
    largest = tape.empty(column, x.dtype)  # of all ranks
    shifted = tape.empty(x.shape, x.dtype)
    exponentials = tape.empty(x.shape, x.dtype)
    sums = tape.empty(column, x.dtype)
    del exponentials
    sums = tape.empty(column, x.dtype)  # of all ranks
    logarithms = tape.empty(column, x.dtype)
    out = tape.empty(x.shape, x.dtype)
    node = record(tape, out, _as_it_comes, (x,))
    if node is not None:
        node.save(out)
    del largest, shifted, sums, logarithms
    return out


def _as_it_comes(node: Node, grads: Grads) -> list[Tensor | None]:
    return [grads[0]]


def _nll_loss(log_probs: Tensor, target: Tensor) -> Tensor:
    tape, rows = log_probs.tape, target.shape[0]
    safe_target = tape.empty((rows,), INT64)
    mask, partial_target = tape.empty((rows, 1), BOOL), tape.empty((rows, 1), INT64)
    picked = tape.empty((rows, 1), log_probs.dtype)
    reduced = tape.empty((rows, 1), log_probs.dtype)
    negated = tape.empty((rows,), log_probs.dtype)
    result = tape.empty((rows,), log_probs.dtype)
    total_weight, loss = tape.empty((), log_probs.dtype), tape.empty((), log_probs.dtype)
    node = record(tape, loss, _nll_and_softmax_backward, (log_probs,), log_probs.shape)
    if node is not None:
        for tensor in (log_probs, target, total_weight):
            node.save(tensor)
    del safe_target, mask, partial_target, picked, reduced, negated, result
    return loss


def _nll_and_softmax_backward(node: Node, grads: Grads) -> list[Tensor | None]:
    """(gradient + exp(x)) times the incoming one: each a tensor of its own."""
    (grad,) = grads
    if grad is None:
        return [None]
    tape, shape = node.tape, node.context
    scaled = tape.empty((), grad.dtype)
    safe_target = tape.empty(shape[:1], INT64)
    of_input = tape.empty(shape, grad.dtype)
    mask, masked_target = tape.empty(shape[:1], BOOL), tape.empty(shape[:1], INT64)
    update, rows = tape.empty(shape[:1], grad.dtype), tape.empty(shape[:1], INT64)
    exponentials = tape.empty(shape, grad.dtype)
    summed = tape.empty(shape, grad.dtype)
    del exponentials
    out = tape.empty(shape, grad.dtype)
    del scaled, safe_target, of_input, mask, masked_target, update, rows, summed
    return [out]
