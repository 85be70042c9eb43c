"""One micro-batch: its inputs, and the loss that the model computes of its labels, plain or as Trainer asks for it."""

from __future__ import annotations

from dataclasses import replace

from memcalc.autograd.tape import OVERHEAD, Tape
from memcalc.autograd.tensor import Tensor
from memcalc.errors import UsageError
from memcalc.models.common.causal_lm import CausalLM
from memcalc.nn.model import Batch, Network
from memcalc.nn.run_context import run_context
from memcalc.setup.setup import InferenceSetup, TrainingSetup
from memcalc.tables.dtypes import INT64, DType
from memcalc.training.trainer_loop import runs_trainer


def micro_batch(ids: Tensor, labels: Tensor | None, setup: TrainingSetup | InferenceSetup) -> Batch:
    """The micro-batch of a setup around token ids [b, s]."""
    return Batch(ids, labels, setup.padding_mask, setup.target_len, setup.images_per_sequence, setup.image)


def model_loss(
    tape: Tape, network: Network, setup: TrainingSetup, autocast: DType | None, length: int
) -> tuple[Tensor | None, tuple[Tensor, ...]]:
    """The loss that the model computes of a micro-batch, and the outputs that the loop holds through backward."""
    ids = labels = tape.external_tensor((setup.batch, length), INT64, OVERHEAD, "token ids and labels")
    counts_items = runs_trainer(setup) and any(isinstance(module, CausalLM) for module in network.all_modules)
    if counts_items:
        labels = tape.external_tensor(ids.shape, INT64, OVERHEAD, "token ids and labels")
    if not network.reads_text:
        tape.inputs.clear()  # their shape alone is asked for
    if setup.padding_mask:
        run_context(tape).padding = tape.external_tensor(ids.shape, INT64, OVERHEAD, "padding mask")
    pack(tape, setup, ids)
    with tape.autocasting(autocast):
        outputs = network(replace(micro_batch(ids, labels, setup), counts_items=counts_items))
    if runs_trainer(setup) and autocast is not None:
        outputs.convert_to_fp32()
    run_context(tape).padding = None
    check_packed(tape)
    loss = outputs.compute_loss()
    return loss, outputs.returned if setup.keep_logits else ()


def pack(tape: Tape, setup: TrainingSetup, ids: Tensor) -> None:
    """Let the positions of packed rows come with `ids`, as DataCollatorWithFlattening and TRL's packing have it."""
    if setup.packing:
        run_context(tape).position_ids = tape.external_tensor(ids.shape, INT64, OVERHEAD, "position ids")


def check_packed(tape: Tape) -> None:
    """Raise UsageError where the model did not take the positions of packed rows."""
    run = run_context(tape)
    if run.position_ids is not None and not run.packing_read:
        raise UsageError(
            "--packing is described for decoders whose attention is told the positions of a row; this model has no use "
            "for them: leave it out."
        )
