"""What a traced step holds: its tape, the model, and what stands around them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import TYPE_CHECKING, Any, NamedTuple

from memcalc.autograd.reduce_kernel import rows_scratch
from memcalc.autograd.tape import Allocation, Tape
from memcalc.common.assumption import Assumption
from memcalc.common.sizes import rounded
from memcalc.nn.model import Network
from memcalc.nn.module import Buffer, Module, Parameter
from memcalc.nn.run_context import run_context
from memcalc.optim.weight import Weight
from memcalc.parallel.engine import Engine
from memcalc.setup.setup import InferenceSetup, TrainingSetup
from memcalc.tables.cuda_devices import CudaDevice
from memcalc.tables.optimizers import OPTIMIZERS, Optimizer, spelled
from memcalc.training.trainer_loop import clipping_bytes, runs_trainer, scalar_bytes

if TYPE_CHECKING:
    from memcalc.parallel.placement import Placement


@dataclass(frozen=True)
class ObjectiveExtras:
    """Additions of an objective other than sft: extra model weights, bytes held until the optimizer steps, resolved
    options, notes; the other models themselves, and what is held."""

    extra_weights: Mapping[str, int] = field(default_factory=dict)
    held_until_step_bytes: int = 0
    resolved_options: Mapping[str, Any] = field(default_factory=dict)
    notes: tuple[Assumption, ...] = ()
    companions: tuple[Module, ...] = ()
    held_until_step: tuple[Allocation, ...] = ()


class Tracing(NamedTuple):
    """How a step is traced: what stands on its tape, beside what the job decides.

    device: the GPU whose kernels run: what they allocate themselves is on the tape too. None leaves it out, as
        PyTorch's trackers on shape-only tensors do.
    every_block: let no block of the model stand for others.
    like_tracker: sum meeting activation gradients out of place, as those trackers make it do; on a GPU the engine adds
        in place.
    decoded: tokens of a generation, in order and counted from 1, that are decoded beside the last one.
    """

    device: CudaDevice | None = None
    every_block: bool = False
    like_tracker: bool = False
    decoded: tuple[int, ...] = ()


PLAIN = Tracing()
"""What PyTorch's trackers would count, but for sums in place."""


@dataclass(frozen=True)
class Step:
    """A traced step of training, or of generation."""

    tape: Tape
    network: Network
    tensors: tuple[tuple[str, Parameter], ...]
    """Parameters and buffers with their names, in torch's order; a stack's block stands for all of its kind."""
    setup: TrainingSetup | InferenceSetup
    optimizer: Optimizer | None
    """None in generation."""
    forward_end: int
    """The tick at which forward had finished and its outputs were still held."""
    seq_len: int
    target_len: int | None = None
    """Tokens of the target that an encoder-decoder is trained on."""
    trained: tuple[Weight, ...] = ()
    """The trained weights as the optimizer sees them: those that the loss reaches."""
    update_order: tuple[Weight, ...] = ()
    """The trained weights in the order of updates; identical blocks come twice (the first, the rest)."""
    update_groups: tuple[int, ...] = ()
    """How many of `update_order` the optimizer has in each of its parameter groups, if it has several."""
    phases: tuple[str, ...] = ("forward", "backward", "step")
    cache_bytes: int = 0
    """Bytes of keys, values and states after prefill."""
    preallocated_cache: Mapping[str, int] = field(default_factory=dict)
    """Bytes of caches allocated before the first token (a pool of pages), by name; they are not on the tape."""
    cache_for: Callable[[int, int], int] | None = None
    """Bytes that a pool of pages needs for so many sequences of so many tokens; None where there is none."""
    loading_bytes: int = 0
    """Bytes beyond the weights that are there for a moment while they are loaded on the GPU."""
    weights: Mapping[str, int] | None = None
    """Bytes of the weights by what they are; None: those of the network."""
    components: Mapping[str, int] = field(default_factory=dict)
    """Bytes of the weights of a pipeline's components, wherever they lie, by their parts of the box."""
    running: Mapping[str, str] = field(default_factory=dict)
    """The component of a pipeline that runs in a phase, where it is one."""
    extra_weights: Mapping[str, int] = field(default_factory=dict)
    """Bytes of other models' weights, by name (reference model, adapter)."""
    held_until_step_bytes: int = 0
    """Bytes that the trainer holds from forward until the optimizer has stepped."""
    left_by_backward: int = 0
    """Bytes of what the graph keeps beside gradients until the loss goes: leaves that checkpointing asked for."""
    resolved_options: Mapping[str, Any] = field(default_factory=dict)
    """Values of options that were not given, by name."""
    notes: tuple[Assumption, ...] = ()
    """Assumptions made while the model was prepared."""
    stage: int = 0
    """The stage of a serving engine's pipeline."""
    placement: Placement | None = None
    """The GPUs of this process that the model is spread over; None where it lies on one."""
    cache_on_card: Mapping[int, int] = field(default_factory=dict)
    """Bytes of keys and values by GPU, where they are several."""
    companions: tuple[Module, ...] = ()
    """Other models that the job has on the GPU, in the order in which they are loaded."""
    held_until_step: tuple[Allocation, ...] = ()
    """What the trainer holds from forward until the optimizer has stepped."""
    first_run: Step | None = None
    """The micro-batch of a job's first step, where a library learned from it how to run later ones."""
    engine: Engine | None = None
    """What this rank does as one of several; None on a single GPU."""

    @property
    def training(self) -> bool:
        """Whether this is a step of training."""
        return isinstance(self.setup, TrainingSetup)

    def resolved(self) -> dict[str, Any]:
        """Every option with the value that was used."""
        length = self.seq_len if self.network.reads_text and self.network.source_is_text else None
        used = {
            "seq_len": length,
            "target_len": self.target_len,
            "attention": run_context(self.tape).attention,
            **self.resolved_options,
        }
        if self.training:
            assert isinstance(self.setup, TrainingSetup)
            used["optimizer"] = spelled(self.setup.optimizer).row
            used["optimizer_impl"] = self.implementation
            used["optimizer_in_backward"] = (
                self.setup.optimizer_in_backward or spelled(self.setup.optimizer).in_backward
            )
        return {"mode": "training" if self.training else "inference", **self.setup.model_dump(), **used}

    @property
    def implementation(self) -> str:
        """The implementation of the optimizer step: the one asked for, or the optimizer's own default."""
        assert isinstance(self.setup, TrainingSetup)
        return implementation_of(self.setup)

    @property
    def optimizer_scratch(self) -> tuple[str, int]:
        """Name and bytes of the most that the optimizer's step has alive at once."""
        if not self.trained or self.optimizer is None:
            return "optimizer step", 0
        return max(self._after_backward(), key=lambda part: part[1])

    def _after_backward(self) -> Iterator[tuple[str, int]]:
        """What comes one after another between backward and the next step: only the largest stands in the peak."""
        assert self.optimizer is not None
        assert isinstance(self.setup, TrainingSetup)
        groups = self._parameter_groups() if self.engine is None else self.engine.parameter_groups(self.update_order)
        reduction = rows_scratch(self.tape.device)
        nbytes = max(self.optimizer.step[self.implementation](group, reduction) for group in groups)
        yield f"{self.optimizer.name} step ({self.implementation})", nbytes
        clips = clipping_bytes(self.setup, self.trained)
        yield "norms of gradients (clipping)", self.engine.clipping() if clips and self.engine else clips
        if runs_trainer(self.setup) and self.left_by_backward:
            scalars = scalar_bytes(self.setup, "backward") - scalar_bytes(self.setup, "step")
            yield "leaves of the graph, until the loss goes", self.left_by_backward + scalars

    def _parameter_groups(self) -> list[Sequence[Weight]]:
        """The trained weights as the optimizer is given them: it steps over one group after another."""
        left, groups = iter(self.update_order), [tuple[Weight, ...]()] * 0
        for size in self.update_groups or (len(self.update_order),):
            groups.append(tuple(islice(left, size)))
        return [*groups]

    @property
    def steps_in_backward(self) -> bool:
        """Whether weights are stepped during backward, so that gradients never stand all at once."""
        return isinstance(self.setup, TrainingSetup) and steps_in_backward(self.setup)

    @property
    def input_bytes(self) -> int:
        """Bytes of the batch that PyTorch's trackers do not see: Trainer has all micro-batches of a step at once."""
        seen = sum(rounded(allocation.raw_nbytes) for allocation in self.tape.inputs if allocation.aliased)
        one = sum(rounded(allocation.raw_nbytes) for allocation in self.tape.inputs)
        if (
            self.tape.ring is not None and not self.tape.ring.exchanges_heads
        ):  # ids, labels, shifted labels and positions: whole, as cut, and the last cut twice
            cut = self.tape.inputs[0].raw_nbytes
            one = 4 * rounded(cut * self.tape.ring.ranks) + 5 * rounded(cut)
        batches = self.setup.grad_accum if isinstance(self.setup, TrainingSetup) and runs_trainer(self.setup) else 1
        return one * batches - seen

    @property
    def parameters(self) -> list[tuple[str, Parameter]]:
        """Parameters without buffers."""
        return [(name, value) for name, value in self.tensors if not isinstance(value, Buffer)]


def steps_in_backward(setup: TrainingSetup) -> bool:
    """Whether the optimizer steps each weight during backward."""
    name = spelled(setup.optimizer)
    return setup.optimizer_in_backward or name.in_backward or OPTIMIZERS[name.row].in_backward


def implementation_of(setup: TrainingSetup) -> str:
    """The implementation of the optimizer step: the one asked for, or the optimizer's own default."""
    name = spelled(setup.optimizer)
    default: str = next(iter(OPTIMIZERS[name.row].step))
    return setup.optimizer_impl or name.impl or default
