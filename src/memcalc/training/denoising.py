"""One micro-batch of diffusers' training scripts: noise, a noisy latent, the prediction, the mean squared error.

Source: examples/{text_to_image,dreambooth} of diffusers 0.42.1, with latents and text embeddings cached.
"""

from __future__ import annotations

from memcalc import ops
from memcalc.autograd.tape import Tape
from memcalc.autograd.tensor import Tensor
from memcalc.models.common.denoiser import Denoiser, Picture, given
from memcalc.tables.dtypes import FP32, DType


def denoising_loss(tape: Tape, model: Denoiser, picture: Picture, autocast: DType | None) -> tuple[Tensor, object]:
    """The loss of a micro-batch, and what the script's loop keeps until backward is over."""
    shape = model.latent_shape(picture)
    model_input = given(tape, *shape, name="latents")
    noise = ops.empty_like(model_input)
    sigmas = tape.empty((shape[0], *(1,) * (len(shape) - 1)), model_input.dtype)
    noisy = ops.add(ops.mul(ops.add_scalar(ops.neg(sigmas)), model_input), ops.mul(sigmas, noise))
    with tape.autocasting(autocast):
        pred = model.predict(noisy, picture)
    if autocast is not None:
        pred = ops.to(pred, FP32)
    pred = model.learnt_part(pred)
    target = ops.sub(noise, model_input)
    loss = ops.mse_loss(ops.to(pred, FP32), ops.to(target, FP32))
    return loss, (noise, noisy, pred, target, sigmas)
