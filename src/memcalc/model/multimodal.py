"""Decoders that see: a vision tower whose features take the place of image tokens among the embeddings."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from memcalc.errors import ConfigError, UsageError
from memcalc.model import ops
from memcalc.model.config import Config
from memcalc.model.families import family
from memcalc.model.module import Module
from memcalc.model.network import Batch, CausalLM, Network, Outputs
from memcalc.model.sublayers.vision import Seen
from memcalc.model.tensor import Tensor
from memcalc.tables.dtypes import INT64


class Sight(NamedTuple):
    """What a model sees: features [images, tokens, h], or one [tokens, h] for each image; and what is kept besides."""

    features: Tensor | Sequence[Tensor]
    kept: tuple[Any, ...]


class Eye(Module):
    """A vision tower and the projection of its features to the decoder's width.

    `config` is the vision config that says how large an image is.
    """

    config: Config

    def tokens(self, size: int | None) -> int:
        """How many tokens an image of `size` pixels becomes (None: of the size that the config says)."""
        raise NotImplementedError

    def forward(self, pixels: Tensor) -> Sight:
        """Pixels to features."""
        raise NotImplementedError


class VisionLanguage(Network):
    """A decoder and an eye. Images stand among the tokens of a sequence, each as many tokens as it has features."""

    def __init__(self, eye: Eye, text: CausalLM) -> None:
        self.visual = eye
        self.text = text

    def image_tokens(self, images: int, size: int | None) -> int:
        """Tokens that the images of a sequence take."""
        return images * self.visual.tokens(size)

    def forward(self, batch: Batch) -> Outputs:
        """Loss and logits; the output object keeps what the tower gave."""
        hidden, kept = self._read(batch)
        return self.text.finish(batch, hidden, kept)

    def _read(self, batch: Batch) -> tuple[Tensor, tuple[Any, ...]]:
        ids, tape = batch.ids, batch.ids.tape
        inputs_embeds = self.text.model.embed_tokens(ids)
        outputs: Sight | None = None
        if batch.images and tape.phase != "decode":
            taken = self.image_tokens(batch.images, batch.image_size)
            if taken > ids.shape[1]:
                raise UsageError(
                    f"--images {batch.images} takes {taken} tokens of each sequence, but one has {ids.shape[1]}; "
                    f"give --seq-len {taken} or more, or fewer images."
                )
            outputs = self.visual(batch.pixels(self.visual.config, batch.images))
            features = outputs.features
            if not isinstance(features, Tensor):
                features = ops.cat(features, 0)
            features = ops.to(features, inputs_embeds.dtype)
            mask = place_of_images(ids)
            inputs_embeds = ops.masked_scatter(inputs_embeds, mask, features)
        hidden = self.text.model(ids, batch.padding, embeds=inputs_embeds)
        return hidden, (outputs,)


def place_of_images(ids: Tensor) -> Tensor:
    """Where ids [b, s] are image tokens: [b, s, 1]."""
    mask = ops.compare(ids)
    counted = ids.tape.new((), INT64)
    del counted
    return ops.unsqueeze(mask, -1)


def language_model(c: Config, default: str, *, tied: bool) -> CausalLM:
    """The causal LM of `text_config`; `tied` says whether its head shares the embedding's table."""
    section = c.section("text_config")
    model_type = section.get("model_type", default)
    kin = family(str(model_type))
    values = {**section, "tie_word_embeddings": tied}
    text = kin.build(Config(values, kin.defaults, kin.aliases, f"{c.where}'s 'text_config'"), None)
    if not isinstance(text, CausalLM):
        raise ConfigError(f"{c.where} has a 'text_config' of {kin.model_type!r}, which is no decoder; correct it.")
    return text


def tied_anywhere(c: Config) -> bool:
    """Whether the head is tied: by the config itself, or, as older files have it, by its `text_config`."""
    return c.flag("tie_word_embeddings") or c.section("text_config").get("tie_word_embeddings") is True


def chosen(layers: object, depth: int, where: str) -> tuple[int, ...]:
    """`vision_feature_layer`, one index or several, from the end if negative, as indices of states 0 .. depth."""
    given = layers if isinstance(layers, (list, tuple)) else [layers]
    out = []
    for index in given:
        if isinstance(index, bool) or not isinstance(index, int) or not -depth - 1 <= index <= depth:
            raise ConfigError(
                f"{where} gives 'vision_feature_layer' as {layers!r}, but there are {depth} layers; correct it."
            )
        out.append(index % (depth + 1))
    return tuple(out)


def pieces(features: Tensor) -> list[Tensor]:
    """Features [images, tokens, h] one image after another."""
    return ops.unbind(features, 0)


__all__ = [
    "Eye", "Seen", "Sight", "VisionLanguage", "chosen", "language_model", "pieces", "place_of_images", "tied_anywhere",
]  # fmt: skip
