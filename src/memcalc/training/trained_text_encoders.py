"""Text encoders that are trained with a denoiser (--train_text_encoder), or whose token embedding is trained alone.

Source: examples/textual_inversion/textual_inversion.py and examples/dreambooth/train_dreambooth{,_lora,_lora_sdxl,
_lora_flux}.py of diffusers 0.42.1, and Accelerate, which runs each prepared model under autocast and makes all that it
returns fp32.
"""

from __future__ import annotations

from collections.abc import Sequence

from memcalc import ops
from memcalc.autograd.tape import Tape
from memcalc.autograd.tensor import Tensor
from memcalc.common.assumption import Assumption
from memcalc.common.sizes import rounded
from memcalc.errors import UsageError
from memcalc.models.build import build
from memcalc.models.common.denoiser import Denoiser, PromptCall, TrainedEncoder, given
from memcalc.models.registry import family
from memcalc.models.spec import ModelSpec, PipelineComponent
from memcalc.nn.model import Batch, Network
from memcalc.nn.module import Parameter
from memcalc.nn.run_context import run_context
from memcalc.nn.stack import Stack
from memcalc.peft.injection import add_lora
from memcalc.peft.targets import Lora
from memcalc.setup.setup import TrainingSetup
from memcalc.tables.dtypes import ALIASES, FP32, INT64, DType
from memcalc.training.controlnet import freeze_outside_autocast

_TARGETS = "q_proj,k_proj,v_proj,out_proj"
"""What the scripts adapt of a text encoder."""


def attach_text_encoders(model: Denoiser, spec: ModelSpec, setup: TrainingSetup, *, alone: bool) -> list[Assumption]:
    """Make the text encoders that are trained parts of `model`, unbound; returns the assumptions.

    Raises UsageError where the scripts train none with this denoiser, or the pipeline has none.
    """
    if not model.trained_encoders:
        raise UsageError(
            "--train-text-encoder trains the CLIP text encoders of Stable Diffusion, SDXL and FLUX.1; diffusers' "
            f"scripts do not train one with {spec.model_type}. Leave it out."
        )
    if not alone:
        raise UsageError("--train-text-encoder is computed on one GPU; leave out the options of several.")
    parts = trained_parts(model, spec)
    if not parts:
        raise UsageError(
            "--train-text-encoder needs the pipeline's text encoders, which memcalc does not have here; give the "
            "pipeline's folder, or leave it out."
        )
    lora = None
    if setup.lora_rank is not None:
        dtype = ALIASES[setup.lora_dtype]
        lora = Lora(setup.lora_rank, _TARGETS, dtype, setup.lora_dropout, setup.lora_bias, setup.dora)
    model.learning = tuple(_attached(model, part, lora) for part in parts)
    how = "in full" if lora is None else f"with adapters on {_TARGETS.replace(',', ', ')}"
    names = " and ".join(part.name for part in parts)
    return [Assumption("trained_text_encoders", f"{names}: trained {how} (--train-text-encoder)")]


def attach_inverted_embedding(
    model: Denoiser, spec: ModelSpec, setup: TrainingSetup, *, alone: bool
) -> list[Assumption]:
    """Freeze `model`, unbound, and let the token embedding of its text encoder be all that is trained.

    Raises UsageError for denoisers with other text encoders than one CLIP, and for several GPUs.
    """
    if model.trained_encoders != ("CLIPTextModel",) or model.told_pooled_alone:
        raise UsageError(
            "--textual-inversion is described for Stable Diffusion 1 and 2, whose denoiser reads one CLIP text "
            "encoder; leave it out."
        )
    attach_text_encoders(model, spec, setup, alone=alone)
    (encoder,) = model.learning
    freeze_outside_autocast(model, setup)
    for name, parameter in encoder.network.parameters():
        parameter.trainable, parameter.fixed_dtype = "token_embedding" in name, None
    text = "every token's embedding is trained, and all but the new ones are put back from a copy after each step"
    return [Assumption("token_embedding_trained", f"{text} (--textual-inversion)")]


def original_embeddings(model: Denoiser, setup: TrainingSetup) -> dict[str, int]:
    """The copy of the token embedding that textual inversion keeps, by what it is called."""
    if not setup.textual_inversion:
        return {}
    trained = [p for encoder in model.learning for _, p in encoder.network.parameters() if p.trainable]
    return {"token embedding as it was": sum(rounded(p.numel * p.dtype.itemsize) for p in trained)}


def trained_parts(model: Denoiser, spec: ModelSpec) -> list[PipelineComponent]:
    """The pipeline's text encoders that the scripts train, in order."""
    found = [part for part in sorted(spec.components, key=lambda part: part.name) if part.spec is not None]
    return [part for part in found if part.class_name in model.trained_encoders]


def _attached(model: Denoiser, part: PipelineComponent, lora: Lora | None) -> TrainedEncoder:
    assert part.spec is not None
    network = build(part.spec)
    for _, module in network.modules():
        if isinstance(module, Stack):
            module.rename(f"{part.name} {module.name}")
    if lora is not None:
        add_lora(network, part.spec.model_type, lora)
        # the scripts have embeddings require a gradient, for checkpointing, which their optimizer never sees
        for name, parameter in network.parameters():
            if ".embeddings." in f".{name}" and isinstance(parameter, Parameter):
                parameter.trainable = parameter.keeps_gradient = True
    setattr(model, part.name, network)
    call = model.prompt_calls.get(part.class_name, PromptCall())
    return TrainedEncoder(part.name, network, call, family(part.spec.model_type).attention_used("sdpa"))


def update_groups(model: Network, setup: TrainingSetup, updated: Sequence[tuple[Parameter, int]]) -> tuple[int, ...]:
    """How many of the `updated` weights each parameter group has: with adapters every model is a group of its own."""
    if not isinstance(model, Denoiser) or not model.learning or setup.lora_rank is None:
        return ()
    theirs = [{id(p) for _, p in encoder.network.parameters()} for encoder in model.learning]
    sizes = [sum(id(p) in ids for p, _ in updated) for ids in theirs]
    return (len(updated) - sum(sizes), *sizes)


def prompt(tape: Tape, model: Denoiser, batch: int, autocast: DType | None) -> tuple[dict[str, Tensor], list[Tensor]]:
    """What the trained text encoders tell the denoiser, by kind, and what the loop holds of it besides."""
    narrow, read = run_context(tape).weights_dtype, []
    tokens = [given(tape, batch, encoder.call.length(77), dtype=INT64) for encoder in model.learning]
    for encoder, ids in zip(model.learning, tokens, strict=True):
        read.append(_read(tape, encoder, ids, autocast))
    states, pooled = read[-1]
    if model.told_pooled_alone:
        pooled = ops.to(pooled, narrow)
        return {"pooled": ops.view(ops.repeat(ops.unsqueeze(pooled, 0), 1, 1, 1), *pooled.shape)}, []
    if len(read) == 1:
        return {"states": states if model.frozen_dtype is None else ops.to(states, model.frozen_dtype)}, []
    embeds = ops.cat([states for states, _ in read], -1)
    del states
    read.clear()
    pooled = ops.view(pooled, batch, -1)
    return {"states": ops.repeat(embeds, 1, 1, 1), "pooled": ops.repeat(pooled, 1, 1)}, [embeds, pooled]


def _read(tape: Tape, encoder: TrainedEncoder, ids: Tensor, autocast: DType | None) -> tuple[Tensor, Tensor]:
    """States [b, s, h] and the text's vector that a text encoder gives, in fp32 where Accelerate runs it."""
    run = run_context(tape)
    run.hidden_states = [] if encoder.call.hidden else None
    with run.attention_backend(encoder.attention), tape.autocasting(autocast):
        states, pooled = encoder.network(Batch(ids, None, images=0)).returned
    layers, run.hidden_states = run.hidden_states or [], None
    if autocast is None:
        return (layers[-1][0] if layers else states), pooled
    wide = ops.to(pooled, FP32), ops.to(states, FP32)
    if not layers:
        return wide[1], wide[0]
    taken = ops.to(layers[-1][0], FP32)
    count = sum(copies for _, copies in layers)  # of its input and of each layer's output, less what is taken
    others = [tape.empty(taken.shape, FP32) for _ in range(count)] if taken is not layers[-1][0] else []
    del layers, others
    return taken, wide[0]
