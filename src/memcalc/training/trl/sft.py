"""Supervised fine-tuning as SFTTrainer runs it.

Source: `SFTTrainer.compute_loss` in trl/trainer/sft_trainer.py of TRL 1.16.
"""

from __future__ import annotations

from memcalc import ops
from memcalc.autograd.tape import OVERHEAD, Tape
from memcalc.autograd.tensor import Tensor
from memcalc.nn.model import Batch, Network
from memcalc.setup.setup import TrainingSetup
from memcalc.tables.dtypes import INT64
from memcalc.training.step import autocast_of

LOSS = "LM head and loss"


def sft(tape: Tape, network: Network, setup: TrainingSetup, length: int) -> Tensor:
    """The loss of the tokens that count, from the fused head's log-probabilities."""
    ids, _mask, _labels = (
        tape.external_tensor((setup.batch, length), INT64, OVERHEAD, "token ids, masks and labels") for _ in range(3)
    )
    scored = min(setup.completion_len or length, length - 1)
    batch = Batch(
        ids,
        None,
        setup.padding_mask,
        setup.target_len,
        setup.images,
        setup.image_size,
        scored_tokens=scored,
        token_outputs=("entropy", "is_top1"),
    )
    with tape.autocasting(autocast_of(setup)):
        outputs = network(batch)
    log_probs, *_metrics = outputs.returned
    with tape.scoped(LOSS):
        per_token = ops.negative(log_probs)
        return ops.divide(ops.sum_over(ops.reshape(per_token, -1), 0), tape.empty((), INT64))
