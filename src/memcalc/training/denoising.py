"""One micro-batch of diffusers' training scripts: noise, a noisy latent, the prediction, the mean squared error.

Source: examples/{text_to_image,dreambooth} of diffusers 0.42.1, with latents and text embeddings cached.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from memcalc import ops
from memcalc.autograd.tape import Tape
from memcalc.autograd.tensor import Tensor
from memcalc.common.assumption import Assumption
from memcalc.models.common.denoiser import Denoiser, Picture, given
from memcalc.models.spec import ModelSpec
from memcalc.nn.model import Network
from memcalc.nn.run_context import run_context
from memcalc.setup.setup import InferenceSetup, TrainingSetup
from memcalc.tables.dtypes import FP32, DType
from memcalc.training.controlnet import attach_controlnet, controlled
from memcalc.training.frozen_components import PHASE, FrozenComponents, runs_in_step
from memcalc.training.traced_step import ObjectiveExtras
from memcalc.training.trained_text_encoders import (
    attach_inverted_embedding,
    attach_text_encoders,
    original_embeddings,
    prompt,
)


def picture(model: Denoiser, setup: TrainingSetup | InferenceSetup) -> Picture:
    """What a job gives its denoiser. Raises UsageError for sizes that it cannot have."""
    asked = model.picture(
        setup.batch,
        setup.height or setup.resolution,
        setup.width or setup.resolution,
        setup.num_frames,
        setup.max_sequence_length,
    )
    return model.with_images(asked, setup.condition_images)


def as_scripts_train(setup: TrainingSetup, spec: ModelSpec) -> TrainingSetup:
    """`setup` with what diffusers' scripts do where nobody said otherwise.

    With adapters, --mixed_precision casts the frozen weights too, and autocast is on all the same; the adapters have
    their layer's dtype, and fp32 under fp16 and where PEFT itself makes them (PixArt has no `add_adapter`).
    """
    if setup.trainer == "plain":
        return setup
    chosen: dict[str, object] = {"trainer": "diffusers"}
    if setup.max_grad_norm is None:
        chosen["max_grad_norm"] = 0.0 if setup.textual_inversion else 1.0
    if setup.train_text_encoder and "cache_text_embeddings" not in setup.model_fields_set:
        chosen["cache_text_embeddings"] = not any(
            part.class_name.startswith(("T5", "UMT5")) for part in spec.components
        )
    if setup.lora_rank is not None:
        if setup.precision in ("mixed-bf16", "mixed-fp16"):
            narrow = setup.precision.removeprefix("mixed-")
            chosen |= {"precision": narrow, "autocast": narrow}
        in_bf16 = chosen.get("precision", setup.precision) == "bf16" and spec.model_type != "PixArtTransformer2DModel"
        if "lora_dtype" not in setup.model_fields_set and in_bf16:
            chosen["lora_dtype"] = "bf16"
    return setup.model_copy(update=chosen)


def loss_of_denoiser(
    tape: Tape, network: Network, spec: ModelSpec, setup: TrainingSetup, autocast: DType | None
) -> tuple[Tensor, tuple[Tensor, ...], ObjectiveExtras]:
    """The loss of a denoiser, the outputs that the loop keeps through backward, and what beside the model is there."""
    assert isinstance(network, Denoiser)
    frozen = FrozenComponents(tape, network, spec, setup) if runs_in_step(setup) else None
    loss, held, more = denoise(tape, network, picture(network, setup), autocast, frozen)
    return loss, held, replace(more, extra_weights={**more.extra_weights, **original_embeddings(network, setup)})


def first_phases(setup: TrainingSetup) -> tuple[str, ...]:
    """The phases of a denoiser's step before forward."""
    return (PHASE,) if runs_in_step(setup) else ()


def prepare_denoiser(network: Network, spec: ModelSpec, setup: TrainingSetup, *, alone: bool) -> list[Assumption]:
    """Make what is trained beside a denoiser, unbound, a part of it; returns the assumptions of its step.

    `alone`: there is one GPU. Raises UsageError for what diffusers' scripts do not train with it.
    """
    assert isinstance(network, Denoiser)
    notes = notes_of_denoiser(network, spec, setup)
    if setup.train_text_encoder:
        notes += attach_text_encoders(network, spec, setup, alone=alone)
    if setup.textual_inversion:
        notes += attach_inverted_embedding(network, spec, setup, alone=alone)
    if setup.controlnet:
        notes += attach_controlnet(network, spec, setup, alone=alone)
    return notes


def notes_of_denoiser(network: Network, spec: ModelSpec, setup: TrainingSetup) -> list[Assumption]:
    """What is taken for granted of a training step of a denoiser, for the Assumptions."""
    assert isinstance(network, Denoiser)
    asked = picture(network, setup)
    size = f"{asked.width} x {asked.height} pixels"
    if network.makes_videos:
        size += f", {asked.frames} frame{'s' if asked.frames > 1 else ''} (--num-frames)"
    lines = [
        Assumption("picture_size", f"{size} (--resolution), {asked.text} tokens of text (--max-sequence-length)"),
        *_where_inputs_come_from(setup, [part.name for part in spec.components]),
        Assumption("largest_resolution", "the largest resolution of a run decides its peak"),
    ]
    if network.convolutional or not setup.cache_latents:
        lines += convolutions(setup)
    if setup.trainer == "diffusers":
        lines.append(
            Assumption(
                "training_loop", "the training loop is that of diffusers' scripts (0.42), which clips gradients at 1.0"
            )
        )
        if setup.autocast is not None:
            text = (
                f"diffusers' scripts cast the frozen weights to {setup.autocast} and run them under autocast all the "
                f"same; adapters are in {setup.lora_dtype} (--precision, --autocast, --lora-dtype)"
            )
            lines.append(Assumption("frozen_weights_cast", text))
    return lines


def convolutions(setup: TrainingSetup | InferenceSetup) -> Iterator[Assumption]:
    """What is not known of networks that are mostly convolutions."""
    if setup.cudnn_workspace is None:
        yield Assumption(
            "cudnn_workspace",
            "cuDNN's workspaces are not counted: published runs whose peak lies in an autoencoder take 0 to 7 GiB more "
            "(--cudnn-workspace)",
        )


def _where_inputs_come_from(setup: TrainingSetup, others: Sequence[str]) -> Iterator[Assumption]:
    """What makes latents and text embeddings, and when."""
    cached = [
        what
        for what, is_cached in (("latents", setup.cache_latents), ("text embeddings", setup.cache_text_embeddings))
        if is_cached
    ]
    if len(cached) == 2:
        beside = f", not {', '.join(others)}" if others else ""
        text = f"latents and text embeddings are cached: only the denoiser is on the GPU{beside}"
        yield Assumption("cached_latents", f"{text} (--no-cache-latents, --no-cache-text-embeddings)")
    elif cached:
        yield Assumption("cached_latents", f"{cached[0]} are cached (--cache-latents, --cache-text-embeddings)")


def denoise(
    tape: Tape, model: Denoiser, asked: Picture, autocast: DType | None, frozen: FrozenComponents | None = None
) -> tuple[Tensor, tuple[Tensor, ...], ObjectiveExtras]:
    """The loss of a micro-batch, what the script's loop holds through backward, and what of that outlasts it."""
    if model.frozen_dtype is not None:
        run_context(tape).weights_dtype = model.frozen_dtype
    shape, beside = model.noisy_shape(asked), model.beside(asked)
    of_picture = (shape[0], *(1,) * (len(shape) - 1))
    kept = [] if frozen is None else frozen.encode(asked, of_picture)
    model_input = given(tape, *shape, name="latents")
    condition = None if beside is None else given(tape, *beside[0], name="latents")
    noise = ops.empty_like(model_input)
    sigmas = tape.empty(of_picture, model_input.dtype)
    noisy = ops.add(ops.mul(ops.add_scalar(ops.neg(sigmas)), model_input), ops.mul(sigmas, noise))
    if condition is not None and beside is not None:
        noisy = ops.cat([noisy, condition], beside[1])
    pred, made = _predicted(tape, model, noisy, asked, autocast)
    kept += made
    pred = model.learnt_part(pred)
    if asked.images:
        pred = ops.narrow(pred, 1, shape[1])
    target = ops.sub(noise, model_input)
    loss = ops.mse_loss(ops.to(pred, FP32), ops.to(target, FP32))
    held = (noise, noisy, pred, target, sigmas, loss, *kept)
    distinct = {id(tensor.storage): tensor.storage.allocation for tensor in held}
    return (
        loss,
        held,
        ObjectiveExtras(
            extra_weights={} if frozen is None else frozen.weights,
            held_until_step_bytes=sum(allocation.nbytes for allocation in distinct.values()),
            companions=() if frozen is None else tuple(frozen.networks),
            held_until_step=tuple(distinct.values()),
        ),
    )


def _predicted(
    tape: Tape, model: Denoiser, noisy: Tensor, asked: Picture, autocast: DType | None
) -> tuple[Tensor, list[Tensor]]:
    """The prediction of the noise with all that is trained, and what the loop holds besides."""
    if model.controlnet is not None:
        return controlled(tape, model, noisy, asked, autocast)
    made: dict[str, Tensor] = {}
    kept: list[Tensor] = []
    if model.learning:
        made, kept = prompt(tape, model, asked.batch, autocast)
    around = autocast if model.frozen_dtype is None else None
    with model.telling(**made), tape.autocasting(around):
        pred = model.predict(noisy, asked)
    if around is not None:
        pred = ops.to(pred, FP32)
    return pred, [*made.values(), *kept]
