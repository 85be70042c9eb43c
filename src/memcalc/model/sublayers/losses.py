"""Losses as Transformers computes them, with the copies that they make on the way."""

from __future__ import annotations

from memcalc.model import ops
from memcalc.model.ops.views import is_contiguous
from memcalc.model.tensor import Tensor
from memcalc.tables.dtypes import FP32


def causal_lm_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Next-token cross-entropy of logits [b, s, V] in fp32; the labels [b, s] are padded and shifted, never the logits."""
    logits = ops.to(logits, FP32)
    tape = labels.tape
    batch, length = labels.shape
    labels = tape.new((batch, length + 1), labels.dtype)
    shifted = Tensor((batch, length), labels.stride, labels.dtype, labels.storage)
    if not is_contiguous(shifted.shape, shifted.stride):
        shifted = ops.clone(shifted, contiguous=True)
    logits = ops.view(logits, -1, logits.shape[-1])
    shifted = ops.view(shifted, -1)
    return ops.cross_entropy(logits, shifted)


def token_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Cross-entropy of logits [b, s, V] with labels [b, s] in the logits' own dtype (masked LM, token classification)."""
    return ops.cross_entropy(ops.view(logits, -1, logits.shape[-1]), ops.view(labels, -1))


def class_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Cross-entropy of logits [b, classes] with labels [b] (sequence and image classification)."""
    return ops.cross_entropy(ops.view(logits, -1, logits.shape[-1]), ops.view(labels, -1))
