"""Decoders that see: a vision tower whose features take the place of image tokens among the embeddings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from memcalc import ops
from memcalc.autograd.tensor import Tensor
from memcalc.config.reader import Config
from memcalc.errors import ConfigError, TooShortError, UsageError
from memcalc.models.common.causal_lm import CausalLM
from memcalc.models.registry import Family, family
from memcalc.nn.kv_cache import Cache
from memcalc.nn.layers.vision_transformer import Seen
from memcalc.nn.model import Batch, Network, Outputs
from memcalc.nn.module import Module
from memcalc.nn.run_context import run_context
from memcalc.tables.dtypes import INT64


class Sight(NamedTuple):
    """What a model sees: features [images, tokens, h], or one [tokens, h] for each image; and what is kept besides."""

    features: Tensor | Sequence[Tensor]
    returned: tuple[Any, ...]


class Eye(Module):
    """A vision tower and the projection of its features to the decoder's width.

    `config` is the vision config that says how large an image is.
    """

    config: Config

    def tokens(self, size: int | None) -> int:
        """How many tokens an image of `size` pixels becomes (None: of the size that the config says)."""
        raise NotImplementedError

    def image_side(self, size: int | None) -> int:
        """Height of an image in pixels, where one of `size` was asked for."""
        return size or self.config.sides("image_size")[0]

    def look(self, batch: Batch) -> Sight:
        """What it makes of the images of a batch."""
        return self(batch.pixels(self.config, batch.images))  # type: ignore[no-any-return]


DEFAULT_SIDE = 448
"""Height and width of an image in pixels where neither the config nor `--image-size` decides."""


class SizedEye(Eye):
    """An eye that takes images of any size, rounded to whole tokens of `token` pixels' height and width.

    With `most`, the processor rounds up instead, and makes larger images so large (Pixtral's).
    """

    def __init__(self, config: Config, token: int, most: int | None = None) -> None:
        self.config = config
        self.token, self.most = token, most

    def image_side(self, size: int | None) -> int:
        """Height and width of an image in pixels."""
        side = size or DEFAULT_SIDE
        if self.most is not None:
            return -(-min(side, self.most) // self.token) * self.token
        return max(1, round(side / self.token)) * self.token

    def tokens(self, size: int | None) -> int:
        """As many as fit into the image."""
        return (self.image_side(size) // self.token) ** 2

    def look(self, batch: Batch) -> Sight:
        """What it makes of the images of a batch."""
        side = self.image_side(batch.image_size)
        return self(batch.pixels(self.config, batch.images, (side, side)))  # type: ignore[no-any-return]


class Language(NamedTuple):
    """The decoder that reads, and the family that it is of."""

    model: CausalLM
    kin: Family
    caches: bool
    """Whether its config asks for a cache. Trainers switch off that of the whole model alone."""


class VisionLanguage(Network):
    """A decoder and an eye. Images stand among the tokens of a sequence, each as many tokens as it has features.

    With `mutual`, the tokens of an image see each other, whichever comes first, so that a mask is always made. With
    `own_cache`, the decoder does not ask the whole model whether to cache: it does so in training too. A model that
    reads `videos` looks for their tokens too, even where there are none. Where there is `one_forward`, embeddings and
    features stay until the loss is there.
    """

    def __init__(
        self,
        eye: Eye,
        text: Language,
        *,
        mutual: bool = False,
        own_cache: bool = False,
        videos: bool = False,
        one_forward: bool = False,
    ) -> None:
        self.visual = eye
        self.text = text.model
        self.attention_of = text.kin.attention_used
        self.mutual = mutual
        self.videos, self.one_forward = videos, one_forward
        self.caches = own_cache and text.caches

    def image_side(self, size: int | None) -> int | None:
        """Height and width of an image in pixels."""
        return self.visual.image_side(size)

    def image_tokens(self, images: int, size: int | None) -> int:
        """Tokens that the images of a sequence take."""
        return images * self.visual.tokens(size)

    def forward(self, batch: Batch) -> Outputs:
        """Loss and logits; the output object keeps what the tower gave, and the cache if there is one."""
        self.text.listen(batch.ids.tape)
        hidden, kept, _held = self._read(batch)
        return self.text.conclude(batch, hidden, kept)

    def _read(self, batch: Batch) -> tuple[Tensor, tuple[Any, ...], tuple[Any, ...]]:
        ids, tape = batch.ids, batch.ids.tape
        inputs_embeds, cleaned = self._embedded(ids)
        outputs: Sight | None = None
        guide: dict[str, Any] = {}
        features = mask = None
        run = run_context(tape)
        starts = run.past_length == 0
        if batch.images and starts:
            outputs = self._look(batch)
            features = outputs.features
            if not isinstance(features, Tensor):
                features = ops.cat(features, 0)
            features = ops.to(features, inputs_embeds.dtype)
            if self.one_forward:
                outputs = Sight(features, outputs.returned)  # the model keeps no others
            mask, *_others = places(ids, 1 + self.videos)
            inputs_embeds = ops.masked_scatter(inputs_embeds, mask, features)
            guide = self._guide(ids, outputs, mask)
        mutual = self.mutual and starts
        groups = tape.empty(ids.shape, INT64) if mutual else None
        outer = run.cache
        made = Cache() if outer is None and self.caches and not run.checkpointing else None
        run.cache = outer or made
        with run.attention_backend(self.attention_of(run.attention)):
            hidden = self.text.model(ids, batch.padding or mutual, embeds=inputs_embeds, **guide)
        run.cache = outer
        del groups, cleaned
        if self.one_forward:
            return hidden, (None if outputs is None else outputs.returned, made), (inputs_embeds, features, mask)
        return hidden, (outputs, made), ()

    def _embedded(self, ids: Tensor) -> tuple[Tensor, Any]:
        """Embeddings of ids [b, s], and what stays until the decoder is through."""
        return self.text.model.embed_tokens(ids), None

    def _look(self, batch: Batch) -> Sight:
        """What the eye makes of the images."""
        taken = self.image_tokens(batch.images, batch.image_size)
        if taken > batch.ids.shape[1]:
            raise TooShortError(
                f"--images-per-sequence {batch.images} takes {taken} tokens of each sequence, but "
                f"{batch.ids.shape[1]} are read at "
                f"once; give --seq-len {taken} or more, or fewer images."
            )
        run = run_context(batch.ids)
        cached, run.cache = run.cache, None  # a tower's attention caches nothing
        sight = self.visual.look(batch)
        run.cache = cached
        return sight

    def _guide(self, ids: Tensor, sight: Sight, mask: Tensor) -> dict[str, Any]:
        """What else the decoder gets to know of the images, whose places in `ids` are `mask` [b, s, 1]."""
        return {}


def places(ids: Tensor, kinds: int) -> list[Tensor]:
    """Where ids [b, s] are tokens of an image, or of several `kinds` of picture: [b, s, 1] each."""
    masks = [ops.compare(ids) for _ in range(kinds)]
    for _ in masks:
        ids.tape.empty((), INT64)  # how many, to compare with those there are
    return [ops.unsqueeze(mask, -1) for mask in masks]


def language_model(
    c: Config,
    default: str | Family,
    *,
    tied: bool,
    bends: bool = False,
    flat: bool = False,
    given: Mapping[str, object] | None = None,
) -> Language:
    """The decoder of `text_config`; `tied` says whether its head, the whole model's, shares the embedding's table.

    `default` is its model type where it has none, or the one family that it may be of. The whole model does not do to
    the logits what the decoder would do alone, unless it `bends` them. With `flat`, older files have its keys among the
    model's own. `given` is what the decoder has to know besides.
    """
    section = c.section("text_config")
    where = f"{c.where}'s 'text_config'"
    if flat and not section:
        section, where = c.values, c.where
    kin = default if isinstance(default, Family) else family(str(section.get("model_type", default)))
    values = {**section, **(given or {}), "tie_word_embeddings": tied}
    config = Config(values, kin.defaults, kin.aliases, where)
    text = kin.build(config, None)
    c.asked |= config.asked
    if not isinstance(text, CausalLM):
        raise ConfigError(f"{where} has the model_type {kin.model_type!r}, which is no decoder; correct it.")
    if not bends:
        text.bend = ()
    return Language(text, kin, section.get("use_cache") is not False)


def tied_anywhere(c: Config) -> bool:
    """Whether the head is tied: by the config itself, or, as older files have it, by its `text_config`."""
    return c.flag("tie_word_embeddings") or c.section("text_config").get("tie_word_embeddings") is True


def config_side(v: Config) -> int:
    """Height of the images of a vision config."""
    given = v.items("image_size") if isinstance(v.get("image_size"), (list, tuple)) else None
    return v.integer("image_size") if given is None else int(str(given[0]))


def check_size(v: Config, size: int | None) -> None:
    """Refuse images of another size than the vision config's: such a tower has a position for every patch."""
    if size is not None and v.get("image_size") not in (size, [size, size]):
        raise UsageError(
            f"--image-size {size} does not fit this model, which reads images of 'image_size' "
            f"{v.get('image_size')} alone; leave it out."
        )


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
    "Eye",
    "Language",
    "Seen",
    "Sight",
    "SizedEye",
    "VisionLanguage",
    "check_size",
    "chosen",
    "config_side",
    "language_model",
    "pieces",
    "places",
    "tied_anywhere",
]
