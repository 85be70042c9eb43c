"""Losses as Transformers computes them, with the copies that they make on the way."""

from __future__ import annotations

from collections.abc import Callable

from memcalc import ops
from memcalc.autograd.tensor import Tensor
from memcalc.tables.dtypes import FP32, INT64


def causal_lm_loss(
    logits: Tensor,
    labels: Tensor,
    *,
    counts_items: bool = False,
    cross_entropy: Callable[[Tensor, Tensor], Tensor] = ops.cross_entropy,
) -> Tensor:
    """Next-token cross-entropy of logits [b, s, V] in fp32; labels [b, s] are padded and shifted, never the logits.

    With `counts_items` it is a sum, divided by the number of items in the batch (`num_items_in_batch`).
    """
    logits = ops.to(logits, FP32)
    if labels.tape.ring is None:
        labels, shifted = shifted_labels(labels)
    else:  # labels are shifted before the sequence is cut
        shifted = ops.view(labels, -1)
    logits = ops.view(logits, -1, logits.shape[-1])
    loss = cross_entropy(logits, shifted)
    return ops.mul_scalar(loss) if counts_items else loss


def aligned_lm_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Cross-entropy of logits [b, t, V] in fp32 with labels [b, t] that stand where they are predicted."""
    logits = ops.to(logits, FP32)
    return ops.cross_entropy(ops.view(logits, -1, logits.shape[-1]), ops.view(labels, -1))


def shifted_logits_loss(logits: Tensor, labels: Tensor, padding: Tensor | None) -> Tensor:
    """Next-token cross-entropy of logits [b, s, V] in their own dtype, of which the last of each sequence are cut off.

    `padding` [b, s] says which tokens count, if it is given; all are taken to.
    """
    batch, length, vocab = logits.shape
    first, following = ops.narrow(logits, 1, length - 1), ops.narrow(labels, 1, length - 1)
    if padding is None:
        first, following = ops.contiguous(first), ops.contiguous(following)
    else:
        counts = ops.narrow(padding, 1, length - 1)
        first = ops.index_mask(first, ops.compare(counts), batch * (length - 1))
        following = ops.index_mask(following, ops.compare(counts), batch * (length - 1))
    return ops.cross_entropy(ops.view(first, -1, vocab), ops.view(following, -1))


def shifted_labels(labels: Tensor) -> tuple[Tensor, Tensor]:
    """Labels [b, s] padded to [b, s + 1], and from them those of the tokens that follow, flattened to [b · s]."""
    batch, length = labels.shape
    padded = labels.tape.empty((batch, length + 1), labels.dtype)
    shifted = Tensor((batch, length), padded.stride, padded.dtype, padded.storage)
    return padded, ops.view(ops.contiguous(shifted), -1)


def token_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Cross-entropy of logits [b, s, V] with labels [b, s] in the logits' own dtype (masked LM, token classes)."""
    return ops.cross_entropy(ops.view(logits, -1, logits.shape[-1]), ops.view(labels, -1))


def class_loss(logits: Tensor, labels: Tensor, problem: str = "single_label_classification") -> Tensor:
    """The loss of logits [b, classes] with labels [b] that the problem asks for (sequence and image classification)."""
    if problem == "regression":
        return ops.mse_loss(ops.squeeze(logits, -1) if logits.shape[-1] == 1 else logits, ops.view(labels, -1))
    if problem == "multi_label_classification":
        return ops.binary_cross_entropy_with_logits(logits, labels)
    return ops.cross_entropy(ops.view(logits, -1, logits.shape[-1]), ops.view(labels, -1))


def in_batch_loss(embedded: Tensor) -> Tensor:
    """Cosines of every embedding [b, h] of the batch with every other one, and cross-entropy over the rows."""
    unit = ops.div(embedded, ops.sqrt(ops.sum(ops.pow(embedded), -1, keepdim=True)))
    scores = ops.mul_scalar(ops.matmul(unit, ops.transpose(unit, 0, 1)))
    return ops.cross_entropy(scores, embedded.tape.empty(embedded.shape[:1], INT64))


def position_loss(starts: Tensor, ends: Tensor, first: Tensor, last: Tensor) -> Tensor:
    """Mean of two cross-entropies of scores [b, s] with positions [b] (question answering)."""
    first, last = (ops.add_scalar(ops.add_scalar(positions)) for positions in (first, last))
    start_loss = ops.cross_entropy(starts, first)
    end_loss = ops.cross_entropy(ends, last)
    return ops.mul_scalar(ops.add(start_loss, end_loss))


def ctc_loss(logits: Tensor, length: int) -> Tensor:
    """Connectionist temporal classification of logits [b, s, V] with `length` labels: fp32, one row of paths a vector.

    Forward keeps the probabilities of all paths [b, s, 2·length + 1], backward makes as many again.
    """
    tape, (batch, steps, _) = logits.tape, logits.shape
    attention = tape.empty((batch, steps), INT64)
    log_probs = ops.transpose(ops.log_softmax(logits, FP32), 0, 1)
    targets = tape.empty((batch * length,), INT64)
    del attention
    return ops.mul_scalar(ops.ctc_loss(log_probs, targets, length))


def with_z_loss(loss: Tensor, logits: Tensor) -> Tensor:
    """The loss and a number times the mean of the squared normalisers of logits [b, s, V]."""
    normalisers = ops.pow(ops.to(ops.logsumexp(logits), loss.dtype))
    z_loss = ops.reshape(ops.mean(ops.reshape(normalisers, -1)))
    del normalisers
    return ops.add(loss, ops.mul_scalar(z_loss))
