"""Losses of a language model besides Transformers' own: fused with the head, in chunks, smoothed, with a z-loss."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from memcalc import ops
from memcalc.autograd.tensor import Tensor
from memcalc.errors import UsageError
from memcalc.nn.layers.linear import Linear
from memcalc.nn.layers.losses import causal_lm_loss, shifted_labels
from memcalc.nn.module import Module, TrainedCopy
from memcalc.tables.dtypes import BOOL, FP32, INT64

Head = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class LanguageLoss:
    """How hidden states [b, s, h] become a loss.

    eager: all logits, and their copy in fp32. liger: Liger's fused linear. liger-cross-entropy: the copy in fp32 turns
    into its gradient. chunked: all logits, and in fp32 one of `chunks` after another. cut-cross-entropy: Apple's
    kernel. `keep` is how many of the last tokens count. `smoothing` and `z_loss` cost nothing in Liger's kernel.
    """

    kind: Literal["eager", "liger", "liger-cross-entropy", "chunked", "cut-cross-entropy", "tiled"] = "eager"
    chunks: int = 8
    keep: int | None = None
    smoothing: bool = False
    z_loss: bool = False

    @property
    def is_behind(self) -> bool:
        """Whether the model gives logits alone, and its caller makes the loss."""
        return self.smoothing and self.kind == "eager"

    def __call__(
        self, head: Module, logits_of: Head, hidden: Tensor, labels: Tensor
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """The loss, and the logits where the model's output object has them."""
        if self.keep is not None:
            hidden = ops.narrow(hidden, 1, self.keep)
            labels = ops.narrow(labels, 1, self.keep)
        if self.kind == "liger":
            labels, shifted = shifted_labels(labels)
            rows = ops.reshape(hidden, -1, hidden.shape[-1])
            return ops.fused_linear_cross_entropy(rows, head_weight(head), shifted), ()
        if self.kind == "cut-cross-entropy":
            return ops.cut_cross_entropy(hidden, head_weight(head), labels), ()
        if self.kind == "chunked":
            pieces = [logits_of(piece) for piece in _pieces(hidden, self.chunks)]
            return _chunked(pieces, _following(labels, self.chunks)), tuple(pieces)
        logits = logits_of(hidden)
        if self.z_loss:
            return _with_z_loss(logits, labels), (logits,)
        loss = ops.in_place_cross_entropy if self.kind == "liger-cross-entropy" else ops.cross_entropy
        return causal_lm_loss(logits, labels, cross_entropy=loss), (logits,)

    def loss_from_logits(self, logits: Tensor, labels: Tensor) -> Tensor:
        """The loss where the caller of the model makes it of the logits, outside autocast."""
        return _smoothed(logits, labels if self.keep is None else ops.narrow(labels, 1, self.keep))


def head_weight(head: Module) -> Tensor:
    """The head's weight, which a fused loss reads past the head's own forward."""
    if not isinstance(head, (Linear, TrainedCopy)):
        raise UsageError(
            "a loss that is fused with the head reads the head's weight past its adapter; "
            "leave lm_head out of --lora-targets, or use --loss-implementation eager."
        )
    return head.weight


def _pieces(x: Tensor, count: int) -> list[Tensor]:
    """x [b, s, ...] in up to `count` pieces of equal length along its tokens, the last maybe shorter."""
    length = x.shape[1]
    size = -(-length // count)
    return ops.split(x, [min(size, length - start) for start in range(0, length, size)], 1)


def _following(labels: Tensor, count: int) -> list[Tensor]:
    """The labels of the tokens that follow, in pieces."""
    _padded, shifted = shifted_labels(labels)
    return _pieces(ops.view(shifted, *labels.shape), count)


def _chunked(logits: Sequence[Tensor], labels: Sequence[Tensor]) -> Tensor:
    """The sum of the losses of pieces, each in fp32 for itself (torchtune's CEWithChunkedOutputLoss)."""
    total = None
    for piece, target in zip(logits, labels, strict=True):
        rows = ops.to(ops.reshape(piece, -1, piece.shape[-1]), FP32)
        loss = ops.cross_entropy(rows, ops.reshape(target, -1))
        total = loss if total is None else ops.add(total, loss)
        del rows, loss
    assert total is not None
    return ops.mul_scalar(total)


def _smoothed(logits: Tensor, labels: Tensor) -> Tensor:
    """Hugging Face Trainer's label smoothing: the last token's logits are cut off, which copies all others."""
    logits = ops.contiguous(ops.narrow(logits, 1, logits.shape[1] - 1))
    labels = ops.contiguous(ops.narrow(labels, 1, labels.shape[1] - 1))
    log_probs = ops.neg(ops.log_softmax(logits))
    labels = ops.unsqueeze(labels, -1)
    ignored = ops.empty_like(labels, BOOL)
    labels = ops.empty_like(labels)
    nll = ops.gather(log_probs, labels)
    smooth = ops.sum(log_probs, keepdim=True, dtype=FP32)
    nll = ops.masked_fill_(nll, ignored)
    smooth = ops.masked_fill_(smooth, ignored)
    count = ops.add_scalar(_sum(ops.empty_like(ignored, INT64)))
    nll = ops.div(_sum(nll), count)
    smooth = ops.div(_sum(smooth), ops.mul_scalar(count))
    return ops.add(ops.mul_scalar(nll), ops.mul_scalar(smooth))


def _sum(x: Tensor) -> Tensor:
    """The sum of all elements."""
    flat = ops.reshape(x, -1)
    return ops.sum(flat, 0)


def _with_z_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Cross-entropy in fp32 plus the mean of the squared log-sum-exp (PaLM, OLMo)."""
    labels, shifted = shifted_labels(labels)
    logits = ops.reshape(ops.to(logits, FP32), -1, logits.shape[-1])
    loss = ops.cross_entropy(logits, shifted)
    z_loss = ops.mul_scalar(ops.mean(ops.pow(ops.logsumexp(logits)), 0, keepdim=False))
    return ops.add(loss, z_loss)
