"""What the loop of Hugging Face Trainer keeps beside a plain one; TRL's trainers are subclasses of it.

Sources: transformers/trainer.py and trainer_pt_utils.py of Transformers 5.24, accelerate 1.15; the counts of scalars
were read off live tensors at the peaks of runs of the libraries themselves.
"""

from __future__ import annotations

from collections.abc import Iterable

from memcalc.common.sizes import ALIGNMENT, rounded
from memcalc.optim.weight import Weight
from memcalc.setup.setup import TrainingSetup

NORM_CHUNK = 65536
"""Elements that one block of the multi-tensor norm kernel sums up (chunk size of `_foreach_norm`)."""

_SCALARS = {"forward": 4, "backward": 5, "step": 3}
"""The running loss, the number of items in the batch and the detached loss of the step, with what autograd adds."""

_SCALER = {"forward": 2, "backward": 3, "step": 3}
"""GradScaler's scale and growth tracker, and its found_inf from backward on."""

COUNTS_ITEMS = ("sft", "grpo", "rloo", "distillation", "gkd")
"""Objectives whose loss is divided by the number of items in the batch, a tensor that Trainer makes."""


def runs_trainer(setup: TrainingSetup) -> bool:
    """Whether the loop is Trainer's or a subclass's."""
    return setup.trainer in ("hf", "trl")


def scalar_bytes(setup: TrainingSetup, phase: str) -> int:
    """Bytes of tensors of one element that the loop keeps during `phase`."""
    if not runs_trainer(setup):
        return 0
    count = _SCALARS[phase] - (setup.objective not in COUNTS_ITEMS)
    if setup.precision == "mixed-fp16" or setup.autocast == "fp16":
        count += _SCALER[phase]
    return ALIGNMENT * count


def clipping_bytes(setup: TrainingSetup, weights: Iterable[Weight]) -> int:
    """Scratch of `torch.nn.utils.clip_grad_norm_` over the trained weights, which goes before the optimizer steps.

    A norm for each tensor, and partial sums of the multi-tensor kernel, as many for each as the largest one has chunks;
    these go before the norms are stacked and their norm is taken.
    Trainer computes the norm even where it clips nothing.
    """
    if not (runs_trainer(setup) or setup.max_grad_norm):
        return 0
    sizes = [(weight.count, weight.copies) for weight in weights]
    count = sum(copies for _, copies in sizes)
    if not count:
        return 0
    chunks = -(-max(size for size, _ in sizes) // NORM_CHUNK)
    return ALIGNMENT * count + max(rounded(4 * count * chunks), rounded(4 * count) + ALIGNMENT)
