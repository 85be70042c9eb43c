"""TRL's fused head around a decoder: log-probabilities of the labels that count, and no logits.

Source: `add_fused_lm_head` in trl/trainer/utils.py of TRL 1.16.
"""

from __future__ import annotations

from memcalc import ops
from memcalc.autograd.tensor import Tensor
from memcalc.models.common.lm_losses import head_weight
from memcalc.nn.model import Batch, Outputs
from memcalc.nn.module import Module
from memcalc.tables.dtypes import BOOL, INT64


def fused_lm_head(head: Module, hidden: Tensor, batch: Batch) -> Outputs:
    """Per-token outputs [b, s - 1] of hidden states [b, s, h]: log-probabilities, what else was asked for, the mask.

    Only the last `batch.scored_tokens` tokens of each sequence are projected; the others are zero.
    """
    assert batch.scored_tokens is not None
    rows, length = batch.ids.shape
    tape = hidden.tape
    shifted = ops.narrow(hidden, 1, length - 1)
    labels = ops.narrow(batch.ids, 1, length - 1)
    mask = tape.empty(labels.shape, BOOL)
    count = rows * batch.scored_tokens
    weight = head_weight(head)
    weight = weight.storage.full_tensor(weight)
    hidden_rows = ops.index_mask(shifted, mask, count)
    targets = ops.index_mask(labels, mask, count)
    log_probs, more = ops.chunked_log_probs(hidden_rows, weight, targets, batch.token_outputs)
    del hidden_rows, targets
    log_probs = _scattered(log_probs, mask)
    outputs = [_scattered(more.pop(name), mask) for name in batch.token_outputs]
    _sum = ops.sum(ops.reshape(log_probs, -1), 0)
    _count = ops.sum(ops.reshape(ops.empty_like(mask, INT64), -1), 0)
    loss = ops.div(ops.neg(_sum), _count)
    return Outputs(loss, (log_probs, *outputs, mask))


def _scattered(values: Tensor, mask: Tensor) -> Tensor:
    """Values [n] at the places [b, s] where the mask holds, zeros elsewhere."""
    zeros = values.tape.empty(mask.shape, values.dtype)
    return ops.masked_scatter(zeros, mask, values)
