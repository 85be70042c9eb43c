"""What every trainer of TRL 1.16 does with a batch: score the labels that count, with the trained or a frozen model."""

from __future__ import annotations

from memcalc import ops
from memcalc.autograd.tensor import Tensor
from memcalc.nn.model import Batch, Network
from memcalc.nn.run_context import run_context, training_mode
from memcalc.tables.dtypes import INT64
from memcalc.training.objectives.rollout import Rollout


def input_ids(rollout: Rollout, rows: int, *, names: int = 3) -> Tensor:
    """Token ids [rows, s] of a collator that gives `names` tensors of that shape (ids, mask, labels or their mask)."""
    ids, *_others = (rollout.input_tensor(rows, rollout.length) for _ in range(names))
    return ids


def masked_labels(ids: Tensor) -> Tensor:
    """Labels [b, s]: ids with -100 where no completion is, a copy."""
    return ops.empty_like(ids, INT64)


def score(rollout: Rollout, ids: Tensor, outputs: tuple[str, ...]) -> list[Tensor]:
    """Log-probabilities [b, s - 1] under the trained model, then each of `outputs`, then the mask of labels."""
    return _score(rollout, rollout.policy, ids, outputs)


def score_frozen(rollout: Rollout, ids: Tensor) -> Tensor:
    """Log-probabilities [b, s - 1] under the reference model; the caller switches gradients off."""
    assert rollout.frozen is not None
    run = run_context(rollout.tape)
    checkpointing, run.checkpointing = run.checkpointing, False
    with run.attention_backend(rollout.frozen.attention), training_mode(rollout.tape, rollout.frozen.trains):
        log_probs, *_more = _score(rollout, rollout.frozen.network, ids, ())
    run.checkpointing = checkpointing
    return log_probs


def _score(rollout: Rollout, network: Network, ids: Tensor, outputs: tuple[str, ...]) -> list[Tensor]:
    setup = rollout.setup
    rollout.mark_padding(ids)
    batch = Batch(
        ids,
        None,
        setup.padding_mask,
        setup.target_len,
        setup.images_per_sequence,
        setup.image,
        scored_tokens=rollout.completion,
        token_outputs=outputs,
    )
    with rollout.tape.autocasting(rollout.autocast):
        return list(network(batch).returned)
