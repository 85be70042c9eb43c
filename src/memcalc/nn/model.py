"""What goes into a model, what comes out, and a model as a whole."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from memcalc import ops
from memcalc.autograd.tape import OVERHEAD, Tape
from memcalc.autograd.tensor import Tensor
from memcalc.common.image_sides import ImageSides, ImageSize
from memcalc.config.reader import Config
from memcalc.errors import UsageError
from memcalc.nn.module import Module
from memcalc.nn.run_context import run_context
from memcalc.tables.dtypes import FP32, INT64, DType

IMAGES = "images"
"""Name of the image inputs (`pixel_values`); generation keeps them."""


@dataclass(frozen=True)
class Batch:
    """One micro-batch: token ids and labels [b, s]. `target_len` is the decoder's length of an encoder-decoder."""

    ids: Tensor
    labels: Tensor | None
    padding: bool = False
    target_len: int | None = None
    images: int = 1
    """Images per sequence, if the model takes images."""
    image_size: ImageSize = None
    """Their height and width in pixels; None: those of the config."""
    logits_to_keep: int | None = None
    """How many of the last tokens a language model computes logits of (without labels); None: all."""
    counts_items: bool = False
    """Whether the loss of a language model is a sum over the number of items in the batch, as Trainer asks for it."""
    scored_tokens: int | None = None
    """How many of the last tokens of each sequence TRL's fused head scores in place of logits; None: no fused head."""
    token_outputs: tuple[str, ...] = ()
    """What the fused head computes of a token beside its log-probability (`ops.chunked_log_probs`)."""

    def pixels(
        self, c: Config, count: int = 1, sides: tuple[int, int] | None = None, *, resizable_input: bool = False
    ) -> Tensor:
        """Pixels [b · count, channels, height, width] of the images that a vision config takes, an input of the step.

        `sides` are height and width where the config does not decide; with `resizable_input` they are those asked for.
        They come in fp32, or in the weights' dtype where that is narrower.
        """
        tape = self.ids.tape
        if resizable_input and isinstance(self.image_size, ImageSides):
            sides = (self.image_size.height, self.image_size.width)
        elif resizable_input and isinstance(self.image_size, int):
            sides = (self.image_size, self.image_size)
        if sides is None:
            sides = c.sides("image_size")
        shape = (self.ids.shape[0] * count, c.integer("num_channels"), *sides)
        return tape.external_tensor(shape, run_context(tape).weights_dtype, OVERHEAD, IMAGES)

    def class_labels(self) -> Tensor:
        """One label per sequence [b], an input of the step."""
        tape = self.ids.tape
        return tape.external_tensor((self.ids.shape[0],), INT64, OVERHEAD, "labels")

    def target(self) -> Tensor:
        """Labels of an encoder-decoder [b, t], an input of the step: as long as the source unless `target_len` says."""
        shape = (self.ids.shape[0], self.target_len or self.ids.shape[1])
        return self.ids.tape.external_tensor(shape, INT64, OVERHEAD, "labels")

    def token_labels(self) -> Tensor:
        """One label per token [b, s] that is not the token itself, an input of the step."""
        return self.ids.tape.external_tensor(self.ids.shape, INT64, OVERHEAD, "labels")


class Outputs:
    """What a model's forward returns (Transformers' ModelOutput).

    loss: None if the model computes none.
    returned: the other tensors of the output object, logits first.
    loss_from_logits: computes the loss outside the model (label smoothing of the Trainer).
    """

    def __init__(
        self,
        loss: Tensor | None,
        returned: tuple[Any, ...] = (),
        loss_from_logits: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        self.loss, self.returned, self.loss_from_logits = loss, returned, loss_from_logits

    def compute_loss(self) -> Tensor | None:
        """The loss. Computed outside the model, it takes the logits in fp32 (accelerate's convert_outputs_to_fp32)."""
        if self.loss_from_logits is not None:
            self.loss = self.loss_from_logits(self.logits_as_fp32())
        return self.loss

    def convert(self, dtype: DType) -> None:
        """Have loss and logits in `dtype`, as a wrapper of the model does with what it returns."""
        self.replace(lambda output: ops.to(output, dtype))

    def replace(self, change: Callable[[Tensor], Tensor]) -> None:
        """Put what `change` makes of loss and logits in their place; they stand until all is made."""
        before = self.loss, self.returned
        self.loss = None if before[0] is None else change(before[0])
        self.returned = tuple(change(x) if isinstance(x, Tensor) and x.dtype.floating else x for x in before[1])

    def logits_as_fp32(self) -> Tensor:
        """The logits, converted to fp32 where autocast computed them in 16 bits (accelerate does so)."""
        (logits, *rest), self.returned = self.returned, ()
        with logits.tape.scoped("logits in fp32"):
            logits = ops.to(logits, FP32) if run_context(logits).weights_dtype is FP32 else logits
        self.returned = (logits, *rest)
        return logits

    def convert_to_fp32(self) -> None:
        """Convert every 16-bit output to fp32, as accelerate's ConvertOutputsToFp32 does around autocast.

        The narrow tensors stay alive until all are converted.
        """
        returned = self.returned
        tape = next((x.tape for x in returned if isinstance(x, Tensor)), None)
        with nullcontext() if tape is None else tape.scoped("logits in fp32"):
            self.returned = _in_fp32(returned)


def _in_fp32(returned: Any) -> Any:
    if isinstance(returned, (tuple, list)):
        return tuple(_in_fp32(x) for x in returned)
    return ops.to(returned, FP32) if isinstance(returned, Tensor) and returned.dtype.floating else returned


class Network(Module):
    """A whole model: weights, and a forward from a batch to outputs."""

    scope = "inputs and outputs"
    reads_text: bool = True
    """The model takes token ids; one that takes images only has no sequence length."""
    source_is_text: bool = True
    """The encoder takes token ids; if not, the only length of text is the target's."""
    encodes_only: bool = False
    """Whether it is the encoder of an encoder-decoder by itself."""
    main_input: str = "input_ids"
    """Transformers' `main_input_name`. Where it is token ids, checkpointing makes embeddings need a gradient."""
    input_kind: str = "images"
    """What the model takes if it takes no text, for messages."""
    any_sides = False
    """Images may have any height and width; the model's processor does not make them square."""
    frames_per_image: int | None = None
    """How many frames of a video the model reads as one image; None where it reads none, or reads them otherwise."""
    limits_whole_videos = False
    """Whether its processor's limits of pixels are those of all frames together."""
    image_of_config = False
    """An image of the config's size comes with every sequence, which is none of its tokens."""
    resizable_input = False
    """Images may have any size, whatever the config says."""
    length_unit: str = ""
    """What the sequence length counts, if not tokens."""
    default_length: int | None = None
    """The sequence length if none is given; None: the options' default."""
    longest_target: int | None = None
    """Tokens of a target if none are asked for; None: as many as the source has."""
    accepts_past_key_values: bool = True
    """Transformers' forward takes `past_key_values`; if not, each call starts a new cache while the old one lives."""

    @cached_property
    def all_modules(self) -> tuple[Module, ...]:
        """This module and all below it, walked once: only valid after the last module was replaced."""
        return tuple(module for _, module in self.modules())

    def image_side(self, size: ImageSize) -> int | None:
        """Height and width in pixels of an image of the requested `size`; None if the model takes no images."""
        return None

    def image_tokens(self, images: int, size: ImageSize) -> int:
        """How many tokens of a sequence `images` of `size` pixels take (0 if the model takes no images)."""
        return 0

    def forward(self, batch: Batch) -> Outputs:
        """Run the model on `batch`."""
        raise NotImplementedError

    def __call__(self, batch: Batch) -> Outputs:
        """Run the model on `batch`."""
        return self.forward(batch) if self.hooks is None else self.hooks(self, batch)

    def call(self, batch: Batch) -> Outputs:  # type: ignore[override]
        """Run the model without its hooks."""
        return self.forward(batch)

    @property
    def is_redirected(self) -> bool:
        """Whether something else runs in place of `forward`."""
        return "forward" in vars(self)

    def redirected(self, batch: Batch, run: Callable[[], Outputs]) -> Outputs:
        """Run something else in place of `forward`, between the model's hooks (TRL's _ForwardRedirection)."""
        vars(self)["forward"] = lambda _: run()
        try:
            return self(batch)
        finally:
            del vars(self)["forward"]


def positions(tape: Tape, length: int) -> Tensor:
    """Position ids [1, s]: a range, plus the number of tokens seen before."""
    counted = tape.empty((length,), INT64)  # the range; the sum with the tokens seen before is another tensor
    return ops.unsqueeze(ops.add_scalar(counted), 0)


def checked_sides(network: Network, size: ImageSize) -> ImageSize:
    """`size`; UsageError where a model makes all images squares of its own and both sides are given."""
    if isinstance(size, ImageSides) and not (network.any_sides or network.resizable_input):
        raise UsageError(
            "--image-width, --image-height and limits of pixels are for models that take images of any height and "
            "width (Qwen-VL, Pixtral); this one has its own size, or takes squares of --image-size."
        )
    return size
