"""What the loop of Hugging Face Trainer keeps beside a plain one; TRL's trainers are subclasses of it.

Sources: transformers/trainer.py and trainer_pt_utils.py of Transformers 5.24, accelerate 1.15; the counts of scalars
were read off live tensors at the peaks of runs of the libraries themselves.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from memcalc.autograd.graph import AccumulateGrad
from memcalc.autograd.tape import BEFORE, Tape
from memcalc.autograd.tensor import Tensor
from memcalc.common.assumption import Assumption
from memcalc.common.sizes import ALIGNMENT, rounded
from memcalc.optim.weight import Weight
from memcalc.setup.setup import TrainingSetup
from memcalc.tables.dtypes import BF16, FP16, DType
from memcalc.tables.precisions import PRECISIONS, PrecisionRecipe

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
    return setup.trainer_used in ("hf", "trl")


def trainer_notes(asked: TrainingSetup, used: TrainingSetup) -> Iterator[Assumption]:
    """What the trainer decides for the user, for the Assumptions: `used` is `asked` with the trainer's defaults."""
    if not runs_trainer(used):
        return
    name = "TRL 1.16" if used.trainer_used == "trl" else "Hugging Face Trainer (Transformers 5.24)"
    chosen = []
    if used.activation_checkpointing != asked.activation_checkpointing:
        chosen.append("activation checkpointing (--activation-checkpointing)")
    if used.optimizer_impl != asked.optimizer_impl:
        chosen.append("fused AdamW (--optimizer-impl)")
    defaults = f", with its defaults: {' and '.join(chosen)}" if chosen else ""
    yield Assumption("training_loop", f"the training loop is that of {name}{defaults}")


def scalar_bytes(setup: TrainingSetup, phase: str) -> int:
    """Bytes of tensors of one element that the loop keeps during `phase`."""
    if setup.trainer == "diffusers" and setup.autocast == "fp16":  # its loops keep no other
        return ALIGNMENT * _SCALER[phase]
    if not runs_trainer(setup):
        return 0
    count = _SCALARS[phase] - (setup.objective not in COUNTS_ITEMS)
    if setup.precision == "mixed-fp16" or setup.autocast == "fp16":
        count += _SCALER[phase]
    return ALIGNMENT * count


def clips(setup: TrainingSetup) -> bool:
    """Whether norms of gradients are computed: Trainer does so even where it clips nothing."""
    return runs_trainer(setup) or bool(setup.max_grad_norm)


def clipping_bytes(setup: TrainingSetup, weights: Iterable[Weight]) -> int:
    """Scratch of `torch.nn.utils.clip_grad_norm_` over the trained weights, which goes before the optimizer steps.

    A norm for each tensor, and partial sums of the multi-tensor kernel, as many for each as the largest one has chunks;
    these go before the norms are stacked and their norm is taken.
    """
    if not clips(setup):
        return 0
    groups: dict[int, list[tuple[int, int]]] = {}
    for weight in weights:
        groups.setdefault(weight.itemsize, []).append((weight.count, weight.copies))
    count = most = 0
    for sizes in sorted(groups.values(), key=partial_sums, reverse=True):  # one dtype after another
        count += sum(copies for _, copies in sizes)
        most = max(most, ALIGNMENT * count + partial_sums(sizes))
    return max(most, ALIGNMENT * count + rounded(4 * count) + ALIGNMENT) if count else 0


def partial_sums(sizes: Sequence[tuple[int, int]]) -> int:
    """Bytes of the multi-tensor kernel's partial sums over tensors of (elements, copies)."""
    chunks = -(-max(size for size, _ in sizes) // NORM_CHUNK)
    return rounded(4 * sum(copies for _, copies in sizes) * chunks)


def autocast_of(setup: TrainingSetup, recipe: PrecisionRecipe | None = None) -> DType | None:
    """The dtype of torch.autocast around forward: what was asked for, or what the recipe has (that of --precision)."""
    if setup.autocast is not None:
        return {"bf16": BF16, "fp16": FP16}[setup.autocast]
    return (recipe or PRECISIONS[setup.precision]).autocast


def left_by_backward_of(tape: Tape) -> int:
    """Bytes that the graph's leaves keep alive after backward: a tensor that was made to need a gradient, and that."""
    leaves = [kept for kept in tape.kept_by_graph if isinstance(kept, AccumulateGrad)]
    storages = [leaf.context for leaf in leaves if leaf.context is not None]
    storages += [leaf.gradient.storage for leaf in leaves if leaf.gradient is not None]
    for kept in tape.kept_by_graph:  # keywords of blocks under reentrant checkpointing
        if isinstance(kept, dict):
            storages += [tensor.storage for tensor in _tensors(kept.values())]
    distinct = {id(storage): storage.allocation for storage in storages}
    return sum(allocation.nbytes for allocation in distinct.values() if allocation.born != BEFORE)


def _tensors(values: Iterable[object]) -> Iterator[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, tuple | list):
            yield from _tensors(value)
