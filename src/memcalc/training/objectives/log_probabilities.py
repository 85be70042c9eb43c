"""Log-probabilities of chosen tokens and entropies, as `trl.trainer.utils` computes them (TRL 1.12)."""

from __future__ import annotations

from memcalc import ops
from memcalc.autograd.tensor import Tensor
from memcalc.errors import UsageError
from memcalc.tables.dtypes import BOOL, FP32

CHUNK = 128
"""Tokens whose entropy is computed at once (`entropy_from_logits`)."""

MOST_SEQUENCES = 4096
"""Sequences whose log-probabilities are followed one by one."""


def selected(logits: Tensor, labels: Tensor) -> Tensor:
    """Log-probabilities [b, s] of the tokens `labels` [b, s] under logits [b, s, V] (`selective_log_softmax`).

    In fp32 the logits themselves are kept, in 16 bits the log-softmax of each sequence.
    """
    if logits.shape[0] > MOST_SEQUENCES:
        raise UsageError(
            f"{logits.shape[0]} sequences in a micro-batch are more than the {MOST_SEQUENCES} that this objective is "
            "computed for; lower --batch."
        )
    if logits.dtype is FP32:
        chosen = ops.squeeze(ops.gather(logits, ops.unsqueeze(labels, -1)), -1)
        totals = ops.stack([ops.logsumexp(row) for row in ops.unbind(logits, 0)], 0)
        return ops.sub(chosen, totals)
    picked = []
    for row, wanted in zip(ops.unbind(logits, 0), ops.unbind(labels, 0), strict=True):
        log_probs = ops.log_softmax(row)
        one = ops.squeeze(ops.gather(log_probs, ops.unsqueeze(wanted, -1)), -1)
        picked.append(one)
    return ops.stack(picked, 0)


def entropy(logits: Tensor) -> Tensor:
    """Entropies [b, s] of logits [b, s, V], a chunk of tokens after another. All chunks alike are computed once."""
    flat = ops.reshape(logits, -1, logits.shape[-1])
    rows = flat.shape[0]
    pieces = [flat] if rows <= CHUNK else ops.split(flat, _sizes(rows), 0)
    out = []
    for index, piece in enumerate(pieces):
        start = logits.tape.clock
        log_probs = ops.log_softmax(piece)
        one = ops.neg(ops.sum(ops.mul(ops.exp(log_probs), log_probs), -1))
        out.append(one)
        if index == 1 and rows > 4 * CHUNK:
            del log_probs
            logits.tape.scale_live(range(start, logits.tape.clock), -(-rows // CHUNK) - 3)
    return ops.reshape(logits.tape.empty((rows,), flat.dtype), *logits.shape[:-1])


def _sizes(rows: int) -> list[int]:
    """Sizes of the chunks that are computed: all, or the first, one for all in the middle, and the last two."""
    count = -(-rows // CHUNK)
    last = rows - (count - 1) * CHUNK
    return [CHUNK] * (min(count, 4) - 1) + [last]


def where(x: Tensor, mask: Tensor, count: int) -> Tensor:
    """The `count` elements [n, ...] of x [b, s, ...] where mask [b, s] holds, a copy."""
    return ops.index_mask(x, ops.empty_like(mask, BOOL), count)
