"""One micro-batch forward and backward through a prepared model, on shapes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from memcalc.autograd.engine import backward
from memcalc.autograd.spans import Ring
from memcalc.autograd.tape import Tape
from memcalc.autograd.tensor import Tensor
from memcalc.common.assumption import Assumption
from memcalc.errors import ConfigError, UsageError
from memcalc.models.common.causal_lm import CausalLM
from memcalc.models.registry import family
from memcalc.nn.model import Network, checked_sides
from memcalc.nn.module import Module, Parameter
from memcalc.nn.retained_graphs import restore_retained
from memcalc.nn.run_context import RunContext, run_context
from memcalc.parallel import engines
from memcalc.parallel.engine import Engine
from memcalc.parallel.setup import ParallelSetup
from memcalc.setup.defaults import DEFAULT_SEQ_LEN
from memcalc.setup.lengths import drawn_lengths
from memcalc.setup.setup import TrainingSetup
from memcalc.tables.dtypes import DType
from memcalc.training.micro_batch import model_loss
from memcalc.training.prepared_model import PreparedModel
from memcalc.training.traced_step import ObjectiveExtras, Step, Tracing
from memcalc.training.trainer_loop import autocast_of, left_by_backward_of
from memcalc.training.updated_weights import averaged_weights, update_groups, updater_of, weight_of

if TYPE_CHECKING:
    from memcalc.nn.recorder import Recorder
    from memcalc.parallel.placement import Placement

_PHASES: tuple[str, ...] = ("forward", "backward", "step")


def forward_backward(
    model: PreparedModel, tracing: Tracing, before: Engine | None = None, recorder: Recorder | None = None
) -> Step:
    """One micro-batch forward and backward through a model.

    Args:
        model: what is trained.
        tracing: what stands on the tape beside what the job decides.
        before: the engine of an earlier micro-batch, which has learned from it.
        recorder: told where allocations come from.

    Raises:
        MemcalcError: the model has no such loss, or the setup cannot be run.
    """
    spec, setup, layout, network = model.spec, model.setup, model.layout, model.network
    tape = _new_tape(model, tracing, recorder)
    trained = _trained(model)
    engine = engines.bind(
        tape,
        trained,
        network,
        layout,
        setup.precision,
        accumulates=setup.grad_accum > 1,
        words=spec.config.get("vocab_size", 0),
        before=before,
    )
    tensors = _on_their_gpus(engine, model.placement)
    if recorder is not None:
        recorder.watch(trained)
    updater = updater_of(tape, trained, setup)
    length = _length(network, setup, layout)
    if layout.context > 1:
        tape.ring = Ring(layout.context, layout.context_rank, layout.gathers_keys, layout.ulysses)
    restore_retained(network, tape)
    loss, outputs, more = _forward(tape, model, trained, engine, length)
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
    reached = [p for _, p in tensors if p.reached and not p.keeps_gradient]
    return Step(
        tape,
        network,
        tensors,
        setup,
        None,
        forward_end,
        length * layout.context,
        target_len=(setup.target_len or length) if family(spec.model_type).blocks == "encoder-decoder" else None,
        trained=engine.updated([(p, weight_of(p, p.copies, setup, model.placement)) for p in reached]),
        update_order=engine.updated([(p, weight_of(p, n, setup, model.placement)) for p, n in updated]),
        update_groups=update_groups(network, setup, updated),
        placement=model.placement,
        extra_weights={**more.extra_weights, **averaged_weights(tensors, setup)},
        held_until_step_bytes=more.held_until_step_bytes,
        left_by_backward=left_by_backward,
        phases=_phases(network, setup),
        resolved_options=more.resolved_options,
        companions=more.companions,
        held_until_step=more.held_until_step,
        notes=(*more.notes, *model.notes, *_recomputation_notes(tape, setup)),
        engine=None if layout.alone else engine,
    )


def _new_tape(model: PreparedModel, tracing: Tracing, recorder: Recorder | None) -> Tape:
    """A tape, and on it how the forward pass is run."""
    setup = model.setup
    tape = (
        Tape(sum_out_of_place=tracing.like_tracker)
        if recorder is None
        else recorder.new_tape("forward", tracing.like_tracker)
    )
    tape.device = tracing.device
    tape.run = RunContext(
        attention=family(model.spec.model_type).attention_used(setup.attention),
        checkpointing=setup.activation_checkpointing == "full",
        selective=setup.activation_checkpointing == "selective",
        reentrant=setup.checkpoint_reentrant or model.layout.engine == "megatron",
    )
    tape.offloads_inputs = setup.activation_offloading and setup.activation_checkpointing == "full"
    tape.offloading = setup.activation_offloading and not tape.offloads_inputs
    return tape


def _trained(model: PreparedModel) -> Module:
    """The model with what its objective trains beside it (a value head)."""
    if model.setup.objective == "sft":
        return model.network
    from memcalc.training.objectives import run

    return run.trained(model.network, model.spec, model.setup)


def _phases(network: Network, setup: TrainingSetup) -> tuple[str, ...]:
    if network.input_kind != "latents":
        return _PHASES
    from memcalc.training.denoising import first_phases

    return (*first_phases(setup), *_PHASES)


def _forward(
    tape: Tape, model: PreparedModel, trained: Module, engine: Engine, length: int
) -> tuple[Tensor | None, tuple[Tensor, ...], ObjectiveExtras]:
    """The loss, outputs that the loop keeps through backward, and what the objective adds."""
    spec, setup, network = model.spec, model.setup, model.network
    autocast = autocast_of(setup, engines.precision(setup.precision, model.layout))
    if network.input_kind == "latents":
        from memcalc.training.denoising import loss_of_denoiser

        return loss_of_denoiser(tape, network, spec, setup, autocast)
    if setup.objective == "sft":
        return *_sft_loss(tape, network, setup, autocast, length), ObjectiveExtras()
    from memcalc.training.objectives import run

    teacher = None if model.teacher is None else model.teacher.spec
    return run.run_objective(tape, trained, spec, setup, length, teacher, engine=engine, autocast=autocast)


def _sft_loss(
    tape: Tape, network: Network, setup: TrainingSetup, autocast: DType | None, length: int
) -> tuple[Tensor | None, tuple[Tensor, ...]]:
    """The loss of sft, and the outputs that the loop keeps through backward."""
    if setup.uses_fused_head:
        from memcalc.training.trl.sft import sft

        return sft(tape, network, setup, autocast, length), ()
    return model_loss(tape, network, setup, autocast, length)


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


def _on_their_gpus(engine: Engine, placement: Placement | None) -> tuple[tuple[str, Parameter], ...]:
    """The bound tensors; with a placement, inputs of modules are copied to the GPU of each from here on."""
    if placement is not None:
        placement.attach()
    return engine.job.tensors


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
