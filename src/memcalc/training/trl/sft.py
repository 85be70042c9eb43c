"""Supervised fine-tuning as SFTTrainer runs it.

Source: `SFTTrainer.compute_loss` in trl/trainer/sft_trainer.py of TRL 1.16.
"""

from __future__ import annotations

from dataclasses import replace

from memcalc import ops
from memcalc.autograd.tape import OVERHEAD, Tape
from memcalc.autograd.tensor import Tensor
from memcalc.nn.model import Batch, Network
from memcalc.setup.setup import TrainingSetup
from memcalc.tables.dtypes import INT64, DType
from memcalc.training.micro_batch import check_packed, pack
from memcalc.training.objectives.frozen_models import check_head

LOSS = "head and loss"


def sft(tape: Tape, network: Network, setup: TrainingSetup, autocast: DType | None, length: int) -> Tensor:
    """The loss of the tokens that count, from the fused head's log-probabilities.

    Label smoothing needs full logits: the model runs a second time, outside the graph, for the metrics alone.
    """
    check_head(network, setup)
    ids, _mask, labels = (
        tape.external_tensor((setup.batch, length), INT64, OVERHEAD, "token ids, masks and labels") for _ in range(3)
    )
    pack(tape, setup, ids)
    scored = min(setup.max_completion_length or length, length - 1)
    plain = Batch(ids, None, setup.padding_mask, setup.target_len, setup.images_per_sequence, setup.image)
    fused = replace(plain, scored_tokens=scored, token_outputs=("entropy", "is_top1"))
    if setup.label_smoothing:
        loss = _smoothed_loss(tape, network, autocast, replace(plain, labels=labels))
        with tape.no_grad(), tape.autocasting(autocast):
            network(fused)
        return loss
    with tape.autocasting(autocast):
        outputs = network(fused)
    check_packed(tape)
    log_probs, *_metrics = outputs.returned
    with tape.scoped(LOSS):
        per_token = ops.neg(log_probs)
        return ops.div(ops.sum(ops.reshape(per_token, -1), 0), tape.empty((), INT64))


def _smoothed_loss(tape: Tape, network: Network, autocast: DType | None, batch: Batch) -> Tensor:
    """LabelSmoother's loss of full logits, in fp32 where autocast is on."""
    with tape.autocasting(autocast):
        outputs = network(batch)
    if autocast is not None:
        outputs.convert_to_fp32()
    loss = outputs.compute_loss()
    assert loss is not None
    return loss
