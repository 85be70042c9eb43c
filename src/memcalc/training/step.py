"""One optimizer step as memory sees it: the tape of forward and backward, and what stands around it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import field, replace
from functools import lru_cache, partial
from typing import Any

from memcalc.autograd.engine import backward
from memcalc.autograd.tape import OVERHEAD, Tape
from memcalc.autograd.tensor import Tensor
from memcalc.common.records import frozen
from memcalc.common.sizes import rounded
from memcalc.config.reader import Config
from memcalc.errors import ConfigError, UsageError
from memcalc.models.registry import family
from memcalc.models.spec import ModelSpec, SpecKey
from memcalc.nn.model import Batch, Network
from memcalc.nn.module import Buffer, Module, Parameter
from memcalc.nn.retained_graphs import record_retained, retaining_modules
from memcalc.nn.run_context import RunContext, run_context
from memcalc.optim.weight import Weight
from memcalc.parallel import engines
from memcalc.parallel.engine import Engine
from memcalc.parallel.setup import SINGLE, ParallelSetup
from memcalc.setup.setup import DEFAULT_SEQ_LEN, InferenceSetup, TrainingSetup
from memcalc.tables.dtypes import INT64
from memcalc.tables.optimizers import Optimizer, optimizer
from memcalc.tables.precisions import PrecisionRecipe
from memcalc.training.optimizer_in_backward import StepOnArrival, StepOnNext, step_in_backward
from memcalc.training.prepare_model import adapt


@frozen
class Aims:
    """What an objective of its own adds to a step: weights beside the trained, what outlasts it, options, notes."""

    beside: Mapping[str, int] = field(default_factory=dict)
    outlasting: int = 0
    used: Mapping[str, Any] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


@frozen
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
    """Bytes of the weights by what they are; None: those of the network."""
    beside: Mapping[str, int] = field(default_factory=dict)
    """Bytes of further weights, by name."""
    outlasting: int = 0
    """Bytes of what a trainer made in forward and holds until the optimizer has stepped."""
    used: Mapping[str, Any] = field(default_factory=dict)
    """Options that were chosen for the user, by name."""
    notes: tuple[str, ...] = ()
    """What was taken for granted when the model was adapted, for the Assumptions."""
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
            **self.used,
        }
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
        """Bytes of the batch that PyTorch's trackers do not see."""
        return sum(rounded(allocation.raw_nbytes) for allocation in self.tape.inputs if not allocation.aliased)

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
    return Weight(parameter.shape, parameter.dtype.itemsize, copies, parameter.group, setup.galore_rank)


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


def batch(ids: Tensor, labels: Tensor | None, setup: TrainingSetup | InferenceSetup) -> Batch:
    """The micro-batch of a setup around token ids [b, s]."""
    return Batch(ids, labels, setup.padding_mask, setup.target_len, setup.images, setup.image_size)


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
    spec: ModelSpec,
    setup: TrainingSetup,
    *,
    layout: ParallelSetup = SINGLE,
    like_tracker: bool = False,
    teacher: ModelSpec | None = None,
) -> Step:
    """Run one micro-batch forward and backward on shapes, as one rank of `layout` does.

    `like_tracker` sums meeting activation gradients out of place, as PyTorch's trackers on shape-only tensors make it
    do; on a GPU the engine adds in place. Setups that differ in what no tape holds (the optimizer) share one run.
    """
    shared = {} if _steps_in_backward(setup) else _UNTRACED
    same = setup.model_copy(update=shared | {"grad_accum": min(setup.grad_accum, 2)})
    step = _trace(spec.key, same, layout, like_tracker, None if teacher is None else teacher.key)
    return replace(step, setup=setup, optimizer=optimizer(setup.optimizer))


@lru_cache(maxsize=64)
def _trace(
    key: SpecKey, setup: TrainingSetup, layout: ParallelSetup, like_tracker: bool, teacher: SpecKey | None
) -> Step:
    spec = key.spec
    if setup.objective != "sft":  # the default does not pay for importing what others need
        from memcalc.training.objectives import run

        spec = run.pursuer(spec, setup)
    network = build(spec)
    engines.prepare(network, layout)
    notes = adapt(network, spec, setup)
    walk = partial(_walk, spec, network, notes, setup, layout, like_tracker, teacher)
    step = walk()
    if keeping := retaining_modules(network):  # what a step leaves behind is there when the next one begins
        record_retained(keeping)
        step = walk()
        run_context(step.tape).retained_bytes = record_retained(keeping)
    return step


def _walk(
    spec: ModelSpec,
    network: Network,
    notes: Sequence[str],
    setup: TrainingSetup,
    layout: ParallelSetup,
    like_tracker: bool,
    teacher: SpecKey | None,
) -> Step:
    """One micro-batch forward and backward through a model."""
    if setup.objective != "sft":
        from memcalc.training.objectives import run
    recipe = engines.precision(setup.precision, layout)
    tape = Tape(sum_out_of_place=like_tracker)
    tape.run = RunContext(
        attention=family(spec.model_type).attention_used(setup.attention),
        checkpointing=setup.activation_checkpointing == "full",
        selective=setup.activation_checkpointing == "selective",
        reentrant=setup.checkpoint_reentrant,
    )
    tape.offloads_inputs = setup.activation_offload and setup.activation_checkpointing == "full"
    tape.offloading = setup.activation_offload and not tape.offloads_inputs
    trained = network if setup.objective == "sft" else run.trained(network, spec, setup)
    engine = engines.bind(tape, trained, network, layout, setup.precision, accumulates=setup.grad_accum > 1)
    tensors = engine.job.tensors
    updater = _updater(tape, trained, setup)
    usual = network.default_length or DEFAULT_SEQ_LEN
    length = setup.seq_len or usual + network.image_tokens(setup.images, setup.image_size)
    if not network.source_is_text:
        length = setup.target_len or length
    inherited = [storage for module in retaining_modules(network) for storage in module.restore_retained(tape)]
    loss: Tensor | None
    if setup.objective == "sft":
        (loss, held), more = _own_loss(tape, network, recipe, setup, length), Aims()
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
    if updater:
        updater.finish()
    tape.kept_by_graph.clear()
    del loss, held, inherited
    tape.finish()
    in_order = trained.parameters_in_update_order(set())
    return Step(
        tape,
        network,
        tensors,
        setup,
        None,
        forward_end,
        length,
        target_len=(setup.target_len or length) if family(spec.model_type).blocks == "encoder-decoder" else None,
        trained=engine.updated([(p, _weight(p, p.copies, setup)) for _, p in tensors if p.reached]),
        update_order=engine.updated([(p, _weight(p, n, setup)) for p, n in in_order if p.reached]),
        beside=more.beside,
        outlasting=more.outlasting,
        used=more.used,
        notes=(*more.notes, *notes, *_of_recomputation(tape, setup)),
        engine=None if layout.alone else engine,
    )


def _own_loss(
    tape: Tape, network: Network, recipe: PrecisionRecipe, setup: TrainingSetup, length: int
) -> tuple[Tensor | None, tuple[Tensor, ...]]:
    """The loss that the model computes of a micro-batch, and the outputs that the loop holds through backward."""
    ids = tape.external_tensor((setup.batch, length), INT64, OVERHEAD, "token ids and labels")
    with tape.autocasting(recipe.autocast):
        outputs = network(batch(ids, ids, setup))
    loss = outputs.compute_loss()
    return loss, outputs.returned if setup.hold_outputs else ()


def _of_recomputation(tape: Tape, setup: TrainingSetup) -> Iterator[str]:
    """What is to be said of activations that are not kept. Raises UsageError where nothing was checkpointed."""
    run = run_context(tape)
    if run.selective:
        if not run.recomputed_attentions:
            raise UsageError(
                "--activation-checkpointing selective recomputes scores of attention, which this model does not have "
                "as memcalc knows them; use full."
            )
        if run.attention != "eager":
            yield (
                f"--attention {run.attention} keeps no scores anyway, so selective checkpointing saves next to nothing"
            )
