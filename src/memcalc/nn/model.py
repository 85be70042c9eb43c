"""What goes into a model, what comes out, and a model as a whole."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from memcalc import ops
from memcalc.autograd.tape import OVERHEAD, Tape
from memcalc.autograd.tensor import Tensor
from memcalc.config.reader import Config
from memcalc.nn.module import Module
from memcalc.tables.dtypes import FP32, INT64

IMAGES = "images"
"""Name of the inputs that images come in: generation holds on to them."""


@dataclass(frozen=True)
class Batch:
    """One micro-batch: token ids and labels [b, s]. `target_len` is the decoder's length of an encoder-decoder."""

    ids: Tensor
    labels: Tensor | None
    padding: bool = False
    target_len: int | None = None
    images: int = 1
    """Images per sequence, where the model reads images."""
    image_size: int | None = None
    """Their height and width in pixels; None where the config decides."""
    keep: int | None = None
    """How many of the last tokens a language model without labels gives logits of; None for all."""

    def pixels(
        self, c: Config, count: int = 1, sides: tuple[int, int] | None = None, *, any_size: bool = False
    ) -> Tensor:
        """Pixels [b · count, channels, height, width] of the images that a vision config takes, an input of the step.

        `sides` are height and width where the config does not decide; with `any_size` they are those asked for.
        They come in fp32, or in the weights' dtype where that is narrower.
        """
        tape = self.ids.tape
        if any_size and self.image_size is not None:
            sides = (self.image_size, self.image_size)
        if sides is None:
            sides = c.sides("image_size")
        shape = (self.ids.shape[0] * count, c.integer("num_channels"), *sides)
        return tape.untracked(shape, tape.weights, OVERHEAD, IMAGES)

    def class_labels(self) -> Tensor:
        """One label per sequence [b], an input of the step."""
        tape = self.ids.tape
        return tape.untracked((self.ids.shape[0],), INT64, OVERHEAD, "labels")

    def target(self) -> Tensor:
        """Labels of an encoder-decoder [b, t], an input of the step: as long as the source unless `target_len` says."""
        shape = (self.ids.shape[0], self.target_len or self.ids.shape[1])
        return self.ids.tape.untracked(shape, INT64, OVERHEAD, "labels")

    def token_labels(self) -> Tensor:
        """One label per token [b, s] that is not the token itself, an input of the step."""
        return self.ids.tape.untracked(self.ids.shape, INT64, OVERHEAD, "labels")


class Outputs:
    """What a model's forward returns: the loss, and the tensors that its output object keeps.

    `behind` is how the caller makes the loss of the logits, the first of those kept, where the model does not.
    """

    def __init__(
        self, loss: Tensor | None, kept: tuple[Any, ...] = (), behind: Callable[[Tensor], Tensor] | None = None
    ) -> None:
        self.loss, self.kept, self.behind = loss, kept, behind

    def finish(self) -> Tensor | None:
        """The loss. Where the caller makes it, logits of autocast come out in fp32, as accelerate gives them."""
        if self.behind is not None:
            self.loss = self.behind(self.widen())
        return self.loss

    def widen(self) -> Tensor:
        """The logits, in fp32 where autocast made them narrower, which is how accelerate gives them out."""
        (logits, *rest), self.kept = self.kept, ()
        logits = ops.to(logits, FP32) if logits.tape.weights is FP32 else logits
        self.kept = (logits, *rest)
        return logits


class Network(Module):
    """A whole model: weights, and a forward from a batch to outputs."""

    reads_text: bool = True
    """Whether token ids matter; a model that reads images alone has no sequence length."""
    source_is_text: bool = True
    """Whether an encoder reads token ids; where not, the one length of text is that of the target."""
    main_input: str = "input_ids"
    """Transformers' `main_input_name`. Where it is token ids, checkpointing makes embeddings need a gradient."""
    reads: str = "images"
    """What the model reads where it reads no text."""
    any_size = False
    """Whether images may have any size, whatever the config says."""
    length_counts: str = ""
    """What the sequence length counts, where it is not tokens."""
    usual_length: int | None = None
    """The sequence length where none is asked for; None leaves it to the options' default."""
    takes_past: bool = True
    """Whether Transformers' forward takes `past_key_values`; where not, a call begins anew beside the old cache."""

    @cached_property
    def parts(self) -> tuple[Module, ...]:
        """This and all modules below it, walked once: for when none of them is replaced any more."""
        return tuple(module for _, module in self.modules())

    def image_side(self, size: int | None) -> int | None:
        """Height and width in pixels of an image that `size` was asked for; None where the model sees no images."""
        return None

    def image_tokens(self, images: int, size: int | None) -> int:
        """How many tokens of a sequence `images` of `size` pixels take: none where the model sees no images."""
        return 0

    def forward(self, batch: Batch) -> Outputs:
        """Run the model on `batch`."""
        raise NotImplementedError

    def __call__(self, batch: Batch) -> Outputs:  # type: ignore[override]
        """Run the model on `batch`."""
        return self.forward(batch)


def positions(tape: Tape, length: int) -> Tensor:
    """Position ids [1, s]: a range, plus the number of tokens seen before."""
    counted = tape.new((length,), INT64)  # the range; the sum with the tokens seen before is another tensor
    return ops.unsqueeze(ops.shift(counted), 0)
