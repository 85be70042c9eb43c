"""One optimizer step as memory sees it: the tape of forward and backward, and what stands around it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import lru_cache, partial
from typing import TYPE_CHECKING

from memcalc.autograd.engine import backward
from memcalc.autograd.tape import Ring, Tape
from memcalc.autograd.tensor import Tensor
from memcalc.common.assumption import Assumption
from memcalc.common.sizes import rounded
from memcalc.errors import ConfigError, UsageError
from memcalc.models.build import build
from memcalc.models.common.causal_lm import CausalLM
from memcalc.models.registry import autoencoders, denoisers, family
from memcalc.models.spec import ModelSpec, SpecKey
from memcalc.nn.model import Network, checked_sides
from memcalc.nn.module import Buffer, Module, Parameter
from memcalc.nn.retained_graphs import record_retained, restore_retained, retaining_modules
from memcalc.nn.run_context import RunContext, run_context
from memcalc.nn.stack import every_block_by_itself
from memcalc.optim.weight import Weight
from memcalc.parallel import engines
from memcalc.parallel.engine import Engine
from memcalc.parallel.layout import layout_of
from memcalc.parallel.setup import ParallelSetup
from memcalc.setup.defaults import DEFAULT_SEQ_LEN
from memcalc.setup.lengths import drawn_lengths
from memcalc.setup.setup import TrainingSetup
from memcalc.tables.dtypes import DType
from memcalc.tables.optimizers import optimizer
from memcalc.training.input_sizes import check_sizes, with_frames
from memcalc.training.micro_batch import model_loss
from memcalc.training.optimizer_in_backward import StepOnGradient, StepOnNextGradient, step_in_backward
from memcalc.training.prepare_model import adapt
from memcalc.training.traced_step import PLAIN, ObjectiveExtras, Step, Tracing, implementation_of, steps_in_backward
from memcalc.training.trainer_loop import autocast_of, left_by_backward_of, runs_trainer, trainer_notes

if TYPE_CHECKING:
    from memcalc.nn.recorder import Recorder
    from memcalc.parallel.placement import Placement


def _weight(parameter: Parameter, copies: int, setup: TrainingSetup, placement: Placement | None) -> Weight:
    by_embedding = runs_trainer(setup) and parameter.group == "embedding"
    device = 0 if placement is None else placement.device(parameter)
    card = device if isinstance(device, int) else 0
    return Weight(
        parameter.shape, parameter.dtype.itemsize, copies, parameter.group, setup.galore_rank, by_embedding, card
    )


def _length(network: Network, setup: TrainingSetup, layout: ParallelSetup) -> int:
    """Tokens of a sequence that this rank has. Raises UsageError for a model whose sequences cannot be shared."""
    usual = network.default_length or DEFAULT_SEQ_LEN
    drawn = None if setup.lengths is None else max(map(max, drawn_lengths(setup)))
    if drawn is not None and not (network.reads_text and network.source_is_text):
        raise UsageError("--lengths are those of texts, and this model reads none; leave it out.")
    image = checked_sides(network, setup.image)
    length = setup.seq_len or drawn or usual + network.image_tokens(setup.images_per_sequence, image)
    if not network.source_is_text:
        length = setup.target_len or length
    length = -(-length // setup.pad_to_multiple_of) * setup.pad_to_multiple_of
    if layout.context > 1 and not isinstance(network, CausalLM):
        option = "--sequence-parallel-size" if layout.ulysses else "--context-parallel-size"
        raise UsageError(f"{option} is described for decoders of text; leave it out.")
    return length // layout.context


def _target(spec: ModelSpec, network: Network, setup: TrainingSetup, length: int) -> int | None:
    """Tokens of the target of an encoder-decoder; None for other models."""
    if family(spec.model_type).blocks != "encoder-decoder":
        return None
    return setup.target_len or network.longest_target or length


def _updater(tape: Tape, network: Module, setup: TrainingSetup) -> StepOnGradient | None:
    if not steps_in_backward(setup):
        return None
    row = optimizer(setup.optimizer)
    updater = (StepOnNextGradient if row.in_backward else StepOnGradient)(tape, row.step[implementation_of(setup)])
    step_in_backward(network, updater)
    return updater


_UNTRACED = {
    "optimizer": "galore-adamw",
    "optimizer_impl": None,
    "cuda_context": None,
    "cublas_workspace": None,
    "cudnn_workspace": None,
    "allocator_reserve": None,
    "alloc_conf": None,
}
"""Fields of a setup that change nothing in forward and backward, with a value that stands for all.

The optimizer is one that takes the options of all others.
"""

UNTRACED_OPTIONS = frozenset(_UNTRACED)
"""Their names: setups that differ in nothing else share one traced step."""


def trace(
    spec: ModelSpec,
    setup: TrainingSetup,
    *,
    layout: ParallelSetup | None = None,
    tracing: Tracing = PLAIN,
    teacher: ModelSpec | None = None,
    recorder: Recorder | None = None,
) -> Step:
    """Run one micro-batch forward and backward on shapes, as one rank of `layout` does (None: the setup's own).

    Setups that differ in what no tape holds (the optimizer) share one run. A `recorder` is told where each allocation
    comes from; its run is shared with nobody.
    """
    asked, setup = setup, setup.with_trainer_defaults()
    if spec.model_type in denoisers():
        from memcalc.training.denoising import as_scripts_train  # language models do not pay for importing it

        setup = as_scripts_train(setup, spec)
    elif spec.model_type in autoencoders():
        raise UsageError(
            f"{spec.model_type} is the autoencoder of a diffusion pipeline, whose training memcalc does not know; use "
            "--mode inference, or give the pipeline or its denoiser."
        )
    layout = layout_of(setup, spec.config) if layout is None else layout
    shared = {} if steps_in_backward(setup) else _UNTRACED
    own = engines.adapter_dtype(setup, layout)
    same = setup.model_copy(update=shared | own | {"grad_accum": min(setup.grad_accum, 2)})
    given = frozenset(same.model_fields_set)  # setups are equal by their values alone, whoever gave them
    run = _trace if recorder is None else partial(_trace.__wrapped__, recorder=recorder)
    step = run(spec.key, same, given, layout, tracing, None if teacher is None else teacher.key)
    notes = (*trainer_notes(asked, setup), *step.notes)
    return replace(step, setup=setup, optimizer=optimizer(setup.optimizer), notes=notes)


_PHASES: tuple[str, ...] = ("forward", "backward", "step")


@lru_cache(maxsize=64)
def _trace(  # noqa: PLR0913 (all that decides what a step is)
    key: SpecKey,
    setup: TrainingSetup,
    given: frozenset[str],
    layout: ParallelSetup,
    tracing: Tracing,
    teacher: SpecKey | None,
    recorder: Recorder | None = None,
) -> Step:
    spec = key.spec
    if setup.objective != "sft":  # the default does not pay for importing what others need
        from memcalc.training.objectives import run

        spec = run.trained_spec(spec, setup)
    with every_block_by_itself() if tracing.every_block else nullcontext():
        network = engines.prepare(spec, layout, build)
    mapped = None
    if layout.device_map is not None:
        from memcalc.training.spread_model import spread  # the others do not pay for it

        mapped = spread(network, setup, layout)
    setup = with_frames(network, setup)
    check_sizes(network, setup)
    notes = adapt(network, spec, setup)
    if network.input_kind == "latents":
        from memcalc.training.denoising import prepare_denoiser

        notes += prepare_denoiser(network, spec, setup, alone=layout.alone)
    if layout.expert > 1:
        from memcalc.parallel.expert_parallel import divide_experts

        divide_experts(network, layout)
    placement = None if mapped is None else mapped(network)
    run_once = partial(
        _run_micro_batch, spec, network, notes, setup, layout, tracing, teacher, placement=placement, recorder=recorder
    )
    step = run_once()
    if step.engine is not None and step.engine.learns:
        step = replace(run_once(before=step.engine), first_run=step)
    if keeping := retaining_modules(network):  # what a step leaves behind is there when the next one begins
        record_retained(keeping)
        step = run_once()
        run_context(step.tape).retained_bytes = record_retained(keeping)
    return step


def _run_micro_batch(  # noqa: PLR0913 (the key of a cached run, taken apart)
    spec: ModelSpec,
    network: Network,
    notes: Sequence[Assumption],
    setup: TrainingSetup,
    layout: ParallelSetup,
    tracing: Tracing,
    teacher: SpecKey | None,
    before: Engine | None = None,
    placement: Placement | None = None,
    recorder: Recorder | None = None,
) -> Step:
    """One micro-batch forward and backward through a model."""
    if setup.objective != "sft":
        from memcalc.training.objectives import run
    recipe = engines.precision(setup.precision, layout)
    tape = (
        Tape(sum_out_of_place=tracing.like_tracker)
        if recorder is None
        else recorder.new_tape("forward", tracing.like_tracker)
    )
    tape.device = tracing.device
    tape.run = RunContext(
        attention=family(spec.model_type).attention_used(setup.attention),
        checkpointing=setup.activation_checkpointing == "full",
        selective=setup.activation_checkpointing == "selective",
        reentrant=setup.checkpoint_reentrant or layout.engine == "megatron",
    )
    tape.offloads_inputs = setup.activation_offloading and setup.activation_checkpointing == "full"
    tape.offloading = setup.activation_offloading and not tape.offloads_inputs
    trained = network if setup.objective == "sft" else run.trained(network, spec, setup)
    accumulates = setup.grad_accum > 1
    words = spec.config.get("vocab_size", 0)
    engine = engines.bind(
        tape, trained, network, layout, setup.precision, accumulates=accumulates, words=words, before=before
    )
    tensors = _on_their_gpus(engine, placement)
    if recorder is not None:
        recorder.watch(trained)
    updater = _updater(tape, trained, setup)
    length = _length(network, setup, layout)
    if layout.context > 1:
        tape.ring = Ring(layout.context, layout.context_rank, layout.gathers_keys, layout.ulysses)
    restore_retained(network, tape)
    loss: Tensor | None
    phases = _PHASES
    if network.input_kind == "latents":
        from memcalc.training.denoising import first_phases, loss_of_denoiser

        phases = (*first_phases(setup), *_PHASES)
        loss, outputs, more = loss_of_denoiser(tape, network, spec, setup, autocast_of(setup, recipe))
    elif setup.objective == "sft":
        (loss, outputs), more = _loss(tape, network, setup, autocast_of(setup, recipe), length), ObjectiveExtras()
    else:
        loss, outputs, more = run.run_objective(
            tape,
            trained,
            spec,
            setup,
            length,
            None if teacher is None else teacher.spec,
            engine=engine,
            autocast=autocast_of(setup, recipe),
        )
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
    left_by_backward = left_by_backward_of(tape)
    tape.kept_by_graph.clear()
    del loss, outputs
    tape.finish()
    in_order = list(trained.parameters_in_update_order(set()))
    updated = [(p, n) for p, n in in_order if p.reached and not p.keeps_gradient]
    return Step(
        tape,
        network,
        tensors,
        setup,
        None,
        forward_end,
        length * layout.context,
        target_len=_target(spec, network, setup, length),
        trained=engine.updated(
            [(p, _weight(p, p.copies, setup, placement)) for _, p in tensors if p.reached and not p.keeps_gradient]
        ),
        update_order=engine.updated([(p, _weight(p, n, setup, placement)) for p, n in updated]),
        update_groups=_update_groups(network, setup, updated),
        placement=placement,
        extra_weights={**more.extra_weights, **_averaged(tensors, setup)},
        held_until_step_bytes=more.held_until_step_bytes,
        left_by_backward=left_by_backward,
        phases=phases,
        resolved_options=more.resolved_options,
        companions=more.companions,
        held_until_step=more.held_until_step,
        notes=(*more.notes, *notes, *_recomputation_notes(tape, setup)),
        engine=None if layout.alone else engine,
    )


def _on_their_gpus(engine: Engine, placement: Placement | None) -> tuple[tuple[str, Parameter], ...]:
    """The bound tensors; with a placement, inputs of modules are copied to the GPU of each from here on."""
    if placement is not None:
        placement.attach()
    return engine.job.tensors


def _update_groups(network: Network, setup: TrainingSetup, updated: Sequence[tuple[Parameter, int]]) -> tuple[int, ...]:
    """How many of the `updated` weights the optimizer has in each of its groups, where it has several."""
    if network.input_kind != "latents":
        return ()
    from memcalc.training.trained_text_encoders import update_groups

    return update_groups(network, setup, updated)


def _averaged(tensors: Sequence[tuple[str, Parameter]], setup: TrainingSetup) -> dict[str, int]:
    """The moving average of a denoiser's weights (EMAModel of diffusers): a copy of each."""
    if not setup.use_ema:
        return {}
    weights = [p for _, p in tensors if not isinstance(p, Buffer)]
    return {"EMA of the weights": sum(rounded(p.numel * p.dtype.itemsize) * p.copies for p in weights)}


def _loss(
    tape: Tape, network: Network, setup: TrainingSetup, autocast: DType | None, length: int
) -> tuple[Tensor | None, tuple[Tensor, ...]]:
    """The loss of sft, and the outputs that the loop keeps through backward."""
    if setup.uses_fused_head:
        from memcalc.training.trl.sft import sft

        return sft(tape, network, setup, autocast, length), ()
    return model_loss(tape, network, setup, autocast, length)


def _recomputation_notes(tape: Tape, setup: TrainingSetup) -> Iterator[Assumption]:
    """Notes on activations that are recomputed. Raises UsageError where nothing was checkpointed."""
    run = run_context(tape)
    if run.selective:
        if not run.recomputed_attentions:
            raise UsageError(
                "--activation-checkpointing selective recomputes scores of attention, which this model does not have "
                "as memcalc knows them; use full."
            )
        if run.attention != "eager":
            yield Assumption(
                "selective_checkpointing_without_scores",
                f"--attention {run.attention} keeps no scores anyway, so selective checkpointing saves next to nothing",
            )
