"""Vision-language models: a vision tower whose features replace the embeddings of image tokens."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from memcalc import ops
from memcalc.autograd.tensor import Tensor
from memcalc.common.image_sides import ImageSize
from memcalc.config.reader import Config
from memcalc.errors import ConfigError, TooShortError
from memcalc.models.common.causal_lm import CausalLM
from memcalc.models.common.vision_encoder import DynamicResolutionEncoder, ImageFeatures, VisionEncoder
from memcalc.models.family import Family
from memcalc.models.registry import family
from memcalc.nn.kv_cache import Cache
from memcalc.nn.model import Batch, Network, Outputs
from memcalc.nn.run_context import run_context
from memcalc.tables.dtypes import INT64


class TextModel(NamedTuple):
    """The decoder of `text_config`, and its family."""

    model: CausalLM
    family: Family
    caches: bool
    """Its own `use_cache`. Trainers switch off only the whole model's."""


class VisionLanguage(Network):
    """A decoder and a vision encoder. Each image takes as many tokens of a sequence as it has features.

    bidirectional_image_attention: tokens of an image attend to each other in both directions, so a mask is always made.
    own_cache: the text config's `use_cache` applies, so a KV cache is filled in training as well.
    videos: the model looks for video tokens too, even if there are none.
    holds_inputs_embeds: embeddings and features stay alive until the loss is computed (one forward does both).
    """

    merges_apart = False
    """Features are put in place by a function of its own, whose mask of image tokens goes with it (Idefics 2)."""

    def __init__(
        self,
        vision_encoder: VisionEncoder,
        text: TextModel,
        *,
        bidirectional_image_attention: bool = False,
        own_cache: bool = False,
        videos: bool = False,
        holds_inputs_embeds: bool = False,
    ) -> None:
        self.visual = vision_encoder
        self.any_sides = isinstance(vision_encoder, DynamicResolutionEncoder)
        self.frames_per_image = vision_encoder.frames_per_image
        self.limits_whole_videos = vision_encoder.limits_whole_videos
        self.text = text.model
        self.attention_of = text.family.attention_used
        self.bidirectional_image_attention = bidirectional_image_attention
        self.videos, self.holds_inputs_embeds = videos, holds_inputs_embeds
        self.caches = own_cache and text.caches

    def image_side(self, size: ImageSize) -> int | None:
        """Height and width of an image in pixels."""
        return self.visual.image_side(size)

    def image_tokens(self, images: int, size: ImageSize) -> int:
        """Tokens that the images of a sequence take."""
        return images * self.visual.tokens(size)

    def forward(self, batch: Batch) -> Outputs:
        """Loss and logits; the output object keeps the image features, and the cache if there is one."""
        self.text.collect_router_logits(batch.ids.tape)
        hidden, kept, _held = self._read(batch)
        return self.text.add_auxiliary_losses(batch, hidden, kept)

    def _read(self, batch: Batch) -> tuple[Tensor, tuple[Any, ...], tuple[Any, ...]]:
        ids, tape = batch.ids, batch.ids.tape
        inputs_embeds, cleaned = self._embedded(ids)
        outputs: ImageFeatures | None = None
        extra: dict[str, Any] = {}
        features = mask = None
        run = run_context(tape)
        starts = run.past_length == 0
        if batch.images and starts:
            outputs = self._encode_images(batch)
            features = outputs.features
            if not isinstance(features, Tensor):
                features = ops.cat(features, 0)
            features = ops.to(features, inputs_embeds.dtype)
            if self.holds_inputs_embeds:
                outputs = ImageFeatures(features, outputs.returned)  # the model keeps no others
            mask, *_others = image_token_mask(ids, 1 + self.videos)
            inputs_embeds = ops.masked_scatter(inputs_embeds, mask, features)
            extra = self.extra_decoder_inputs(ids, outputs, mask)
            if self.merges_apart:
                mask = None
        bidirectional_image_attention = self.bidirectional_image_attention and starts
        groups = tape.empty(ids.shape, INT64) if bidirectional_image_attention else None
        outer = run.cache
        made = Cache() if outer is None and self.caches and not run.checkpointing else None
        run.cache = outer or made
        with run.attention_backend(self.attention_of(run.attention)):
            hidden = self.text.model(ids, batch.padding or bidirectional_image_attention, embeds=inputs_embeds, **extra)
        run.cache = outer
        del groups, cleaned
        if self.holds_inputs_embeds:
            return hidden, (None if outputs is None else outputs.returned, made), (inputs_embeds, features, mask)
        return hidden, (outputs, made), ()

    def _embedded(self, ids: Tensor) -> tuple[Tensor, Any]:
        """Embeddings of ids [b, s], and what stays alive until the decoder is through."""
        return vars(self.text.model)["embed_tokens"](ids), None

    def check_tokens(self, batch: Batch) -> None:
        """Raise TooShortError if the images take more tokens than a sequence has."""
        taken = self.image_tokens(batch.images, batch.image_size)
        if taken > batch.ids.shape[1]:
            raise TooShortError(
                f"--images-per-sequence {batch.images} takes {taken} tokens of each sequence, but "
                f"{batch.ids.shape[1]} are read at "
                f"once; give --seq-len {taken} or more, or fewer images."
            )

    def _encode_images(self, batch: Batch) -> ImageFeatures:
        """Features of the images. Raises TooShortError if they take more tokens than a sequence has."""
        self.check_tokens(batch)
        run = run_context(batch.ids)
        cached, run.cache = run.cache, None  # a tower's attention caches nothing
        image_features = self.visual.encode_images(batch)
        run.cache = cached
        return image_features

    def extra_decoder_inputs(self, ids: Tensor, image_features: ImageFeatures, mask: Tensor) -> dict[str, Any]:
        """Further keyword arguments of the decoder; `mask` [b, s, 1] marks the image tokens of `ids`."""
        return {}


def image_token_mask(ids: Tensor, kinds: int) -> list[Tensor]:
    """Masks [b, s, 1] of the tokens of images in ids [b, s], one for each of `kinds` (images, videos)."""
    masks = [ops.compare(ids) for _ in range(kinds)]
    for _ in masks:
        ids.tape.empty((), INT64)  # how many, to compare with those there are
    return [ops.unsqueeze(mask, -1) for mask in masks]


def language_model(
    c: Config,
    default: str | Family,
    *,
    tied: bool,
    transforms_logits: bool = False,
    flat: bool = False,
    given: Mapping[str, object] | None = None,
) -> TextModel:
    """The decoder of `text_config`.

    default: its model type if `text_config` names none, or the only family that it may be of.
    tied: the language-model head, which belongs to the whole model, shares the embedding's table.
    transforms_logits: keep the decoder's own logit transforms; the whole model has none otherwise.
    flat: older files have the keys of `text_config` among the model's own.
    given: further config values.
    Raises ConfigError if `text_config` describes no decoder.
    """
    section = c.section("text_config")
    where = f"{c.where}'s 'text_config'"
    if flat and not section:
        section, where = c.values, c.where
    text_family = default if isinstance(default, Family) else family(str(section.get("model_type", default)))
    values = {**section, **(given or {}), "tie_word_embeddings": tied}
    config = Config(values, text_family.defaults, text_family.aliases, where)
    text = text_family.build(config, None)
    c.asked |= config.asked
    if not isinstance(text, CausalLM):
        raise ConfigError(f"{where} has the model_type {text_family.model_type!r}, which is no decoder; correct it.")
    if not transforms_logits:
        text.logit_transforms = ()
    return TextModel(text, text_family, section.get("use_cache") is not False)


def is_tied(c: Config) -> bool:
    """True if the head is tied: by the config itself or, in older files, by its `text_config`."""
    return c.flag("tie_word_embeddings") or c.section("text_config").get("tie_word_embeddings") is True
