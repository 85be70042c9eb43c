"""A ControlNet that is trained in front of a frozen denoiser, as diffusers' scripts do.

Source: examples/controlnet/train_controlnet{,_sdxl,_flux}.py of diffusers 0.42.1. Accelerate prepares the ControlNet
alone: it runs under autocast and what it returns becomes fp32; the denoiser runs in 16 bits outside of it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from memcalc import ops
from memcalc.autograd.tape import Tape
from memcalc.autograd.tensor import Tensor
from memcalc.common.assumption import Assumption
from memcalc.errors import UsageError
from memcalc.models.common.denoiser import Denoiser, Picture, given
from memcalc.models.spec import ModelSpec
from memcalc.nn.run_context import run_context
from memcalc.setup.setup import TrainingSetup
from memcalc.tables.dtypes import ALIASES, FP32, DType

if TYPE_CHECKING:
    from memcalc.models.families.diffusion.flux import FluxTransformer2DModel


def attach_controlnet(model: Denoiser, spec: ModelSpec, setup: TrainingSetup, *, alone: bool) -> list[Assumption]:
    """Freeze `model`, unbound, and make a ControlNet a part of it; returns the assumptions.

    Raises UsageError for denoisers whose ControlNets are not described, and for several GPUs.
    """
    from memcalc.models.families.diffusion import controlnet, controlnet_flux
    from memcalc.models.families.diffusion.flux import FluxTransformer2DModel
    from memcalc.models.families.diffusion.unet import UNet2DConditionModel

    if not isinstance(model, UNet2DConditionModel | FluxTransformer2DModel) or model.conditioned:
        raise UsageError(
            "--controlnet is described for UNets (Stable Diffusion, SDXL) and FLUX.1, not for "
            f"{spec.model_type if not model.conditioned else 'inpainting'}; leave it out."
        )
    if setup.condition_images:
        raise UsageError("--controlnet and --condition-images are two ways to show it a picture; leave out one.")
    if not alone:
        raise UsageError("--controlnet is computed on one GPU; leave out the options of several.")
    if isinstance(model, FluxTransformer2DModel):
        for stack in (model.transformer_blocks, model.single_transformer_blocks):
            stack.split(range(stack.depth))  # what is added behind a block is not of the block: all are traced
    freeze_outside_autocast(model, setup)
    if isinstance(model, UNet2DConditionModel):
        model.controlnet, made = controlnet.controlnet_of(spec.config), "a ControlNet made from it"
    else:
        model.controlnet = controlnet_flux.controlnet_of(spec.config)
        made = f"a ControlNet of {controlnet_flux.LAYERS} of its double and as many single blocks"
    name = "UNet" if isinstance(model, UNet2DConditionModel) else "denoiser"
    text = f"the {name} is frozen in 16 bits and {made} is trained, under autocast by itself"
    return [Assumption("controlnet_trained", f"{text} (--controlnet)")]


def freeze_outside_autocast(model: Denoiser, setup: TrainingSetup) -> None:
    """Freeze `model` in the dtype of --mixed_precision; the scripts run it without autocast."""
    narrow = ALIASES[setup.precision.removeprefix("mixed-")]
    for _, parameter in model.tensors():
        parameter.trainable, parameter.fixed_dtype = False, parameter.fixed_dtype or narrow
    model.frozen_dtype = narrow


def controlled(
    tape: Tape, model: Denoiser, noisy: Tensor, asked: Picture, autocast: DType | None
) -> tuple[Tensor, list[Tensor]]:
    """The prediction with a ControlNet, and what the loop holds besides."""
    from memcalc.models.families.diffusion.flux import FluxTransformer2DModel
    from memcalc.models.families.diffusion.unet import UNet2DConditionModel

    if isinstance(model, FluxTransformer2DModel):
        return _controlled_flux(tape, model, noisy, asked, autocast)
    assert isinstance(model, UNet2DConditionModel)
    run = run_context(tape)
    inputs = model.inputs(tape, asked)
    conditioning = given(tape, asked.batch, 3, asked.height, asked.width, name="conditioning pictures")
    assert model.controlnet is not None
    with tape.autocasting(autocast):
        states = model.controlnet(noisy, inputs, conditioning)
    if autocast is not None:
        states = [ops.to(state, FP32) for state in states]
    checkpoints = run.checkpointing
    run.checkpointing = checkpoints and model.added  # the script of Stable Diffusion checkpoints the ControlNet alone
    pred = model.run(noisy, inputs, [ops.to(state, noisy.dtype) for state in states])
    run.checkpointing = checkpoints
    return pred, states


def _controlled_flux(
    tape: Tape, model: FluxTransformer2DModel, noisy: Tensor, asked: Picture, autocast: DType | None
) -> tuple[Tensor, list[Tensor]]:
    inputs = model.inputs(tape, asked)
    conditioning = given(tape, *noisy.shape, name="conditioning latents")
    assert model.controlnet is not None
    with tape.autocasting(autocast):
        double, single = model.controlnet(noisy, inputs, conditioning)
    if autocast is not None:
        double, single = [ops.to(x, FP32) for x in double], [ops.to(x, FP32) for x in single]
    narrow = noisy.dtype
    pred = model.run(noisy, inputs, ([ops.to(x, narrow) for x in double], [ops.to(x, narrow) for x in single]))
    return pred, [*double, *single]
