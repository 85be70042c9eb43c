"""What every denoiser of a diffusion pipeline is: a prediction from noisy latents, a time step and a text.

Names are those of diffusers 0.42: a class of its models, `in_channels`, `joint_attention_dim`, `pooled_projection_dim`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Literal

from memcalc.autograd.tape import OVERHEAD, Tape
from memcalc.autograd.tensor import Tensor
from memcalc.common.sizes import Shape
from memcalc.errors import UsageError
from memcalc.nn.model import Network
from memcalc.nn.module import Module
from memcalc.nn.run_context import run_context
from memcalc.tables.dtypes import DType

LATENT_SCALE = 8
"""Pixels of a side for one latent of most autoencoders."""


@dataclass(frozen=True)
class Picture:
    """What is denoised: `batch` pictures of `height` x `width` pixels or videos of `frames`, for `text` tokens.

    `images` further pictures of this size stand beside each.
    """

    batch: int
    height: int
    width: int
    frames: int = 1
    text: int = 77
    images: int = 0

    @property
    def latent_height(self) -> int:
        """Latents of the height."""
        return self.height // LATENT_SCALE

    @property
    def latent_width(self) -> int:
        """Latents of the width."""
        return self.width // LATENT_SCALE

    @property
    def latent_frames(self) -> int:
        """Latents of the frames, of which autoencoders for video make one of four but for the first."""
        return (self.frames - 1) // 4 + 1


@dataclass(frozen=True)
class PromptCall:
    """How a pipeline calls one of its text encoders.

    hidden: the layers whose outputs it takes, for which every layer's output is kept (`output_hidden_states`).
    mask: it passes an attention mask.
    cache: a decoder keeps keys and values, as `use_cache` is not switched off.
    tokens: tokens of a prompt, where they are not those that the denoiser reads less `fewer`.
    fewer: how many tokens the denoiser reads beside (positive) or does not read of it (negative: a chat template).
    """

    hidden: tuple[int, ...] = ()
    mask: bool = False
    cache: bool = True
    tokens: int | None = None
    fewer: int = 0

    def length(self, text: int) -> int:
        """Tokens of a prompt where the denoiser reads `text`."""
        return max(text - self.fewer, 1) if self.tokens is None else self.tokens


CLIP = PromptCall(tokens=77)
CLIP_HIDDEN = PromptCall(hidden=(-2,), tokens=77)


@dataclass(frozen=True, eq=False)
class TrainedEncoder:
    """A text encoder that is trained with a denoiser: its name in the pipeline, and how it is called."""

    name: str
    network: Network
    call: PromptCall
    attention: str
    """The implementation that Transformers takes for it."""


class Denoiser(Network):
    """A denoiser. `predict` is its forward."""

    guidance_in: Literal["batch", "two", "none"] = "batch"
    """Classifier-free guidance: in one forward of twice the batch, in two forwards, or in none as it is an input."""
    fp32_latents = False
    """The pipeline keeps latents in fp32 whatever the dtype of the weights."""
    trains_with_fp32_vae = False
    """The training scripts have the autoencoder in fp32 whatever the precision."""
    convolutional = False
    """It is mostly convolutions."""
    upcasts_vae = False
    """The pipeline lets an autoencoder that is loaded in fp16 decode in fp32."""
    prompt_calls: Mapping[str, PromptCall] = MappingProxyType({"CLIPTextModel": CLIP})
    """How the pipeline calls its text encoders, by their classes."""

    trained_encoders: tuple[str, ...] = ()
    """Classes of the text encoders that the training scripts can train with it (`--train_text_encoder`)."""
    told_pooled_alone = False
    """Of those it is told the text's vector alone."""
    learning: tuple[TrainedEncoder, ...] = ()
    """The text encoders that are trained with it, as parts of it."""
    controlnet: Module | None = None
    """The ControlNet that is trained in front of it, as a part of it."""
    frozen_dtype: DType | None = None
    """It is frozen in this dtype and runs outside autocast."""
    reads_text = False
    input_kind = "latents"
    default_side = 1024
    """Pixels of a side where nobody names a size."""
    default_width: int | None = None
    """Pixels of the width, where pictures are no squares."""
    default_frames = 1
    default_text = 77
    """Tokens of text that the pipeline gives it."""
    longest_text: int | None = None
    """The most tokens of text that its pipeline takes; None where it does not check."""
    pixels_per_token = 2 * LATENT_SCALE
    """What height and width are multiples of."""
    makes_videos = False
    rounds_frames = False
    """The pipeline makes frames a multiple of four and one more, as WanPipeline of diffusers 0.42 does."""

    def frames_of_call(self, frames: int | None) -> int | None:
        """The frames that the pipeline makes where it is asked for `frames`."""
        if frames is None or not self.rounds_frames or frames % 4 == 1:
            return frames
        return frames // 4 * 4 + 1

    def picture(
        self, batch: int, height: int | None, width: int | None, frames: int | None, text: int | None
    ) -> Picture:
        """What is denoised: the sizes that were asked for, else the pipeline's own.

        Raises UsageError for sizes that the denoiser cannot be given.
        """
        step = self.pixels_per_token
        sides = [("height", height or self.default_side), ("width", width or self._width(height))]
        for name, side in sides:
            if side % step:
                raise UsageError(
                    f"A {name} of {side} is no multiple of {step}, as this model's pictures are; change --{name} or "
                    "--resolution."
                )
        if frames is not None and not self.makes_videos and frames != 1:
            raise UsageError("--num-frames counts frames of a video, but this model makes pictures; leave it out.")
        return Picture(batch, sides[0][1], sides[1][1], frames or self.default_frames, text or self.default_text)

    def told(self, tape: Tape, kind: Literal["states", "pooled"], *shape: int) -> Tensor:
        """What a text encoder gives: made in the step by one that is trained, else an input of the step."""
        made: Tensor | None = vars(self).get("_told", {}).get(kind)
        return given(tape, *shape) if made is None else made

    @contextmanager
    def telling(self, **made: Tensor) -> Iterator[None]:
        """Predict from what text encoders have made on the tape, by kind."""
        vars(self)["_told"] = made
        yield
        vars(self).pop("_told")

    def _width(self, height: int | None) -> int:
        return self.default_width if height is None and self.default_width else height or self.default_side

    def latent_shape(self, picture: Picture) -> Shape:
        """The shape of the noisy latents, as the pipeline packs them."""
        raise NotImplementedError

    def predict(self, latents: Tensor, picture: Picture) -> Tensor:
        """The prediction of the noise, of the shape of the latents."""
        raise NotImplementedError

    conditioned = 0
    """Channels of the input that are no noisy latents but those of a picture to begin with, and its mask."""
    channels_at = 1
    """The dimension of the channels."""
    takes_images = False
    """Its input may have tokens of whole pictures behind those of the noisy one."""

    def with_images(self, picture: Picture, images: int) -> Picture:
        """The same beside so many pictures. Raises UsageError for denoisers whose pipelines have none."""
        if images and (not self.takes_images or self.conditioned):
            raise UsageError(
                "--condition-images puts pictures beside the noisy one, as FLUX.1 Kontext, FLUX.2 and Qwen-Image-Edit "
                "do; this denoiser has no room for them. Leave it out."
            )
        return replace(picture, images=images)

    def noisy_shape(self, picture: Picture) -> Shape:
        """The shape of the noisy latents without what stands beside them."""
        shape, at = self.latent_shape(picture), self.channels_at
        return (*shape[:at], shape[at] - self.conditioned, *shape[at + 1 :])

    def beside(self, picture: Picture) -> tuple[Shape, int] | None:
        """The shape of what the noisy latents are joined with, and along which dimension; None: nothing."""
        shape, at = self.latent_shape(picture), self.channels_at
        if self.conditioned:
            return (*shape[:at], self.conditioned, *shape[at + 1 :]), at
        return ((shape[0], picture.images * shape[1], *shape[2:]), 1) if picture.images else None

    def learnt_part(self, prediction: Tensor) -> Tensor:
        """The part of the prediction that is compared with the noise: all of it, unless a variance is predicted too."""
        return prediction


def given(tape: Tape, *shape: int, dtype: DType | None = None, name: str = "conditions") -> Tensor:
    """An input of the denoiser, in the weights' dtype where none is named."""
    tensor = tape.external_tensor(shape, dtype or run_context(tape).weights_dtype, OVERHEAD, name)
    tensor.storage.allocation.aliased = True
    return tensor
