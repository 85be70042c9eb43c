"""One optimizer step as memory sees it: the tape of forward and backward, and what stands around it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from typing import Any

from memcalc.autograd.engine import backward
from memcalc.autograd.tape import Tape
from memcalc.autograd.tensor import Tensor
from memcalc.common.sizes import rounded
from memcalc.config.reader import Config
from memcalc.errors import ConfigError, UsageError
from memcalc.models.registry import family
from memcalc.models.spec import ModelSpec, SpecKey
from memcalc.nn.model import Network
from memcalc.nn.module import Buffer, Module, Parameter
from memcalc.nn.retained_graphs import record_retained, retaining_modules
from memcalc.optim.weight import Weight
from memcalc.setup.defaults import DEFAULT_SEQ_LEN
from memcalc.setup.setup import InferenceSetup, TrainingSetup
from memcalc.tables.optimizers import Optimizer, optimizer
from memcalc.tables.precisions import PRECISIONS
from memcalc.training.micro_batch import model_loss
from memcalc.training.optimizer_in_backward import StepOnArrival, StepOnNext, step_in_backward
from memcalc.training.prepare_model import adapt
from memcalc.training.trainer_loop import left_by_backward_of, runs_trainer


@dataclass(frozen=True)
class Aims:
    """What an objective of its own adds to a step: weights beside the trained, what outlasts it, options, notes."""

    beside: Mapping[str, int] = field(default_factory=dict)
    outlasting: int = 0
    used: Mapping[str, Any] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


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
    """The trained weights in the order in which the optimizer updates them; those of equal blocks come twice."""
    phases: tuple[str, ...] = ("forward", "backward", "step")
    cache_bytes: int = 0
    """Bytes of keys, values and states after prefill."""
    standing_cache: Mapping[str, int] = field(default_factory=dict)
    """Bytes of caches that stand before the first token (a pool of pages), which the tape does not hold, by name."""
    weights: Mapping[str, int] | None = None
    """Bytes of the weights by what they are; None where they are those of the network."""
    beside: Mapping[str, int] = field(default_factory=dict)
    """Bytes of further weights, by name."""
    outlasting: int = 0
    """Bytes of what a trainer made in forward and holds until the optimizer has stepped."""
    left_by_backward: int = 0
    """Bytes of what the graph keeps beside gradients until the loss goes: leaves that checkpointing asked for."""
    used: Mapping[str, Any] = field(default_factory=dict)
    """Options that were chosen for the user, by name."""
    notes: tuple[str, ...] = ()
    """What was taken for granted when the model was adapted, for the Assumptions."""

    @property
    def training(self) -> bool:
        """Whether this is a step of training."""
        return isinstance(self.setup, TrainingSetup)

    def resolved(self) -> dict[str, Any]:
        """Every option with the value that was used."""
        length = self.seq_len if self.network.reads_text and self.network.source_is_text else None
        used = {"seq_len": length, "target_len": self.target_len, "attention": self.tape.attention, **self.used}
        if self.training:
            used["optimizer_impl"] = self.implementation
        return {"mode": "training" if self.training else "inference", **self.setup.model_dump(), **used}

    @property
    def implementation(self) -> str:
        """The implementation of the optimizer step: the one asked for, or the optimizer's own default."""
        assert isinstance(self.setup, TrainingSetup)
        return _implementation(self.setup)

    @property
    def steps_in_backward(self) -> bool:
        """Whether weights are stepped during backward, so that gradients never stand all at once."""
        return isinstance(self.setup, TrainingSetup) and _steps_in_backward(self.setup)

    @property
    def input_bytes(self) -> int:
        """Bytes of the batch that PyTorch's trackers do not see: Trainer has all micro-batches of a step at once."""
        seen = sum(rounded(allocation.raw_nbytes) for allocation in self.tape.inputs if allocation.aliased)
        one = sum(rounded(allocation.raw_nbytes) for allocation in self.tape.inputs)
        batches = self.setup.grad_accum if isinstance(self.setup, TrainingSetup) and runs_trainer(self.setup) else 1
        return one * batches - seen

    @property
    def parameters(self) -> list[tuple[str, Parameter]]:
        """Parameters without buffers."""
        return [(name, value) for name, value in self.tensors if not isinstance(value, Buffer)]


def build(spec: ModelSpec) -> Network:
    """The model of a spec, unbound. Raises ConfigError where the config lacks or contradicts itself."""
    kin = family(spec.model_type)
    config = Config(spec.config, kin.defaults, kin.aliases)
    network = kin.build(config, spec.architecture)
    config.check_unread(spec.model_type)
    return network


def _weight(parameter: Parameter, copies: int, setup: TrainingSetup) -> Weight:
    wide = runs_trainer(setup) and parameter.group == "embedding"
    return Weight(parameter.shape, parameter.dtype.itemsize, copies, parameter.group, setup.galore_rank, wide)


def _steps_in_backward(setup: TrainingSetup) -> bool:
    return setup.optimizer_in_backward or optimizer(setup.optimizer).in_backward


def _implementation(setup: TrainingSetup) -> str:
    default: str = next(iter(optimizer(setup.optimizer).step))
    return setup.optimizer_impl or default


def _updater(tape: Tape, network: Module, setup: TrainingSetup) -> StepOnArrival | None:
    if not _steps_in_backward(setup):
        return None
    row = optimizer(setup.optimizer)
    updater = (StepOnNext if row.in_backward else StepOnArrival)(tape, row.step[_implementation(setup)])
    step_in_backward(network, updater)
    return updater


_UNTRACED = {
    "optimizer": "galore-adamw",
    "optimizer_impl": None,
    "cuda_context": None,
    "cublas_workspace": None,
    "allocator_reserve": None,
}
"""Fields of a setup that change nothing in forward and backward, with a value that stands for all.

The optimizer is one that takes the options of all others.
"""


def trace(
    spec: ModelSpec, setup: TrainingSetup, *, like_tracker: bool = False, teacher: ModelSpec | None = None
) -> Step:
    """Run one micro-batch forward and backward on shapes.

    `like_tracker` sums meeting activation gradients out of place, as PyTorch's trackers on shape-only tensors make it
    do; on a GPU the engine adds in place. Setups that differ in what no tape holds (the optimizer) share one run.
    """
    setup = setup.with_trainer_defaults()
    shared = {} if _steps_in_backward(setup) else _UNTRACED
    same = setup.model_copy(update=shared | {"grad_accum": min(setup.grad_accum, 2)})
    step = _trace(spec.key, same, like_tracker, None if teacher is None else teacher.key)
    return replace(step, setup=setup, optimizer=optimizer(setup.optimizer))


@lru_cache(maxsize=64)
def _trace(key: SpecKey, setup: TrainingSetup, like_tracker: bool, teacher: SpecKey | None) -> Step:
    spec = key.spec
    if setup.objective != "sft":  # the default does not pay for importing what others need
        from memcalc.training.objectives import run

        spec = run.pursuer(spec, setup)
    network = build(spec)
    notes = adapt(network, spec, setup)
    walk = partial(_walk, spec, network, notes, setup, like_tracker, teacher)
    step = walk()
    if keeping := retaining_modules(network):  # what a step leaves behind is there when the next one begins
        record_retained(keeping)
        step = walk()
        step.tape.retained_bytes = record_retained(keeping)
    return step


def _walk(
    spec: ModelSpec,
    network: Network,
    notes: Sequence[str],
    setup: TrainingSetup,
    like_tracker: bool,
    teacher: SpecKey | None,
) -> Step:
    """One micro-batch forward and backward through a model."""
    if setup.objective != "sft":
        from memcalc.training.objectives import run
    recipe = PRECISIONS[setup.precision]
    tape = Tape(sum_out_of_place=like_tracker)
    tape.attention = family(spec.model_type).attention_used(setup.attention)
    tape.checkpointing = setup.activation_checkpointing == "full"
    tape.selective = setup.activation_checkpointing == "selective"
    tape.reentrant = setup.checkpoint_reentrant
    tape.offloads_inputs = setup.activation_offloading and tape.checkpointing
    tape.offloading = setup.activation_offloading and not tape.checkpointing
    trained = network if setup.objective == "sft" else run.trained(network, spec, setup)
    tensors = trained.bind(tape, recipe.weights, accumulated=setup.grad_accum > 1)
    updater = _updater(tape, trained, setup)
    usual = network.default_length or DEFAULT_SEQ_LEN
    length = setup.seq_len or usual + network.image_tokens(setup.images_per_sequence, setup.image_size)
    if not network.source_is_text:
        length = setup.target_len or length
    inherited = [storage for module in retaining_modules(network) for storage in module.restore_retained(tape)]
    loss: Tensor | None
    if setup.objective == "sft":
        (loss, held), more = _loss(tape, network, setup, length), Aims()
    else:
        loss, held, more = run.pursue(tape, trained, spec, setup, length, None if teacher is None else teacher.spec)
    forward_end = tape.clock
    if loss is None:
        head = f" as {spec.architecture}" if spec.architecture else ""
        raise ConfigError(
            f"{spec.model_type} has no loss{head}; use --mode inference, or let 'architectures' name a head that has "
            "one."
        )
    backward(tape, loss)
    if updater is not None:
        updater.finish()
    left_by_backward = left_by_backward_of(tape)
    tape.kept_by_graph.clear()
    del loss, held, inherited
    tape.finish()
    return Step(
        tape,
        network,
        tensors,
        setup,
        None,
        forward_end,
        length,
        left_by_backward=left_by_backward,
        target_len=(setup.target_len or length) if family(spec.model_type).blocks == "encoder-decoder" else None,
        trained=tuple(_weight(p, p.copies, setup) for _, p in tensors if p.reached),
        update_order=tuple(_weight(p, n, setup) for p, n in trained.parameters_in_update_order(set()) if p.reached),
        beside=more.beside,
        outlasting=more.outlasting,
        used=more.used,
        notes=(*more.notes, *notes, *_of_recomputation(tape, setup)),
    )


def _loss(tape: Tape, network: Network, setup: TrainingSetup, length: int) -> tuple[Tensor | None, tuple[Tensor, ...]]:
    """The loss of sft, and the outputs that the loop keeps through backward."""
    if setup.uses_fused_head:
        from memcalc.training.trl.sft import sft

        return sft(tape, network, setup, length), ()
    return model_loss(tape, network, setup, length)


def _of_recomputation(tape: Tape, setup: TrainingSetup) -> Iterator[str]:
    """What is to be said of activations that are not kept. Raises UsageError where nothing was checkpointed."""
    if tape.selective:
        if not tape.recomputed_attentions:
            raise UsageError(
                "--activation-checkpointing selective recomputes scores of attention, which this model does not have "
                "as memcalc knows them; use full."
            )
        if tape.attention != "eager":
            yield (
                f"--attention {tape.attention} keeps no scores anyway, so selective checkpointing saves next to nothing"
            )
