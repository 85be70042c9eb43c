"""A diffusion pipeline's call on shapes: the prompt is encoded, one step denoises, the autoencoder decodes.

Source: pipelines of diffusers 0.42.1, under torch.no_grad.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace

from memcalc import ops
from memcalc.autograd.tape import OVERHEAD, Tape
from memcalc.autograd.tensor import Tensor
from memcalc.models.common.autoencoder import Autoencoder
from memcalc.models.common.denoiser import Denoiser, Picture, PromptCall
from memcalc.nn.kv_cache import Cache
from memcalc.nn.model import Batch, Network
from memcalc.nn.run_context import run_context
from memcalc.tables.dtypes import FP32, INT64, DType

Placing = Callable[[str], AbstractContextManager[None]]
"""Entered with the name of a component while its forward runs: an offloaded one comes to the GPU then."""


def everywhere(_: str) -> AbstractContextManager[None]:
    """Everything is on the GPU all the time."""
    return nullcontext()


@dataclass(frozen=True)
class Prompted:
    """A text encoder, how the pipeline calls it, and how many tokens it gets."""

    name: str
    network: Network
    call: PromptCall
    tokens: int
    dtype: DType
    caches: bool
    """It is a decoder: unless told otherwise, it keeps keys and values."""
    attention: str = "sdpa"
    """The implementation that Transformers takes for it."""


def encode_prompts(
    tape: Tape, encoders: Sequence[Prompted], prompts: int, batch: int, placing: Placing = everywhere
) -> None:
    """Every text encoder reads the prompt, and the negative prompt by itself where there is one (`prompts` 2)."""
    kept = []
    for encoder in encoders:
        for _ in range(prompts):
            with placing(encoder.name):
                kept.append(embed(tape, encoder, batch))
    kept.clear()


def embed(tape: Tape, encoder: Prompted, batch: int) -> Tensor:
    """What a text encoder makes of `batch` prompts."""
    run, call = run_context(tape), encoder.call
    run.weights_dtype = encoder.dtype
    run.cache = Cache() if encoder.caches and call.cache else None
    run.hidden_states = [] if call.hidden else None
    ids = tape.empty((batch, encoder.tokens), INT64)
    mask = ops.empty_like(ids) if call.mask else None
    with run.attention_backend(encoder.attention):
        out = encoder.network(Batch(ids, None, padding=call.mask, images=0))
    states = out.returned
    if call.hidden:
        states = (_taken(states, run.hidden_states or [], len(call.hidden)),)
    del mask
    run.cache = run.hidden_states = None
    first: Tensor = states[0]
    return first


def _taken(returned: Sequence[object], kept: Sequence[tuple[Tensor, int]], count: int) -> Tensor:
    """The outputs of some layers side by side, a copy."""
    one = kept[0][0]
    del returned
    return ops.cat([one] * count, -1)


def denoise_once(  # noqa: PLR0913 (what a step is run with)
    tape: Tape, model: Denoiser, picture: Picture, dtype: DType, guidance: str, name: str, placing: Placing = everywhere
) -> None:
    """One step: the prediction, guided, and the scheduler's new latents."""
    run_context(tape).weights_dtype = dtype
    shape = model.noisy_shape(picture)
    latents = tape.external_tensor(shape, FP32 if model.fp32_latents else dtype, OVERHEAD, "latents")
    latents.storage.allocation.aliased = True
    doubled = guidance == "batch"
    asked = replace(picture, batch=2 * picture.batch) if doubled else picture
    beside = model.beside(asked)
    condition = None
    if beside is not None:
        condition = tape.external_tensor(beside[0], latents.dtype, OVERHEAD, "latents")
        condition.storage.allocation.aliased = True
    model_input = ops.cat([latents] * 2, 0) if doubled else latents

    def predicted() -> Tensor:
        joined = model_input if condition is None or beside is None else ops.cat([model_input, condition], beside[1])
        given = ops.to(joined, dtype)
        del joined
        with placing(name):
            prediction = model.learnt_part(model.predict(given, asked))
        return ops.narrow(prediction, 1, shape[1]) if picture.images else prediction

    pred = predicted()
    if doubled:
        uncond, on_text = ops.chunk(pred, 2, 0)
        pred = ops.add(uncond, ops.mul_scalar(ops.sub(on_text, uncond)))
    elif guidance == "two":
        inputs = len(tape.inputs)
        uncond = predicted()
        del tape.inputs[inputs:]  # the same as before
        pred = ops.add(uncond, ops.mul_scalar(ops.sub(pred, uncond)))
    step = ops.mul_scalar(ops.to(pred, FP32))
    ops.to(ops.add(ops.to(latents, FP32), step), latents.dtype)


def encode_image(
    tape: Tape, vae: Autoencoder, picture: Picture, dtype: DType, name: str, placing: Placing = everywhere
) -> None:
    """The autoencoder makes latents of a picture that stands beside the noisy one."""
    run_context(tape).weights_dtype = dtype
    pixels = tape.empty(vae.pixel_shape(picture), dtype)
    with placing(name):
        vae.encode(pixels)
    del pixels


def decode_latents(
    tape: Tape, vae: Autoencoder, picture: Picture, dtype: DType, name: str, placing: Placing = everywhere
) -> None:
    """The autoencoder makes pixels, which are brought between zero and one."""
    run_context(tape).weights_dtype = dtype
    latents = tape.empty(vae.latent_shape(picture), dtype)
    with placing(name):
        image = vae.decode(latents)
    image = ops.clamp(ops.add_scalar(ops.mul_scalar(image)))
    del latents
