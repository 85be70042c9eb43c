"""Gemma 4 with its vision tower. The weights of its audio tower count; recordings are not described."""

from __future__ import annotations

from typing import Any, cast

from memcalc import ops
from memcalc.autograd.tape import OVERHEAD
from memcalc.autograd.tensor import Tensor
from memcalc.common.image_sides import ImageSize
from memcalc.config.reader import Config
from memcalc.errors import UsageError
from memcalc.models.common.vision_encoder import ImageFeatures, VisionEncoder
from memcalc.models.common.vision_language import TextModel, VisionLanguage, language_model
from memcalc.models.families.decoders.gemma4 import Gemma4TextModel
from memcalc.models.family import Family, table
from memcalc.models.vision_towers.gemma4 import Gemma4VisionTower, MultimodalEmbedder
from memcalc.models.vision_towers.gemma4_audio import Gemma4AudioWeights
from memcalc.nn.layers.masks import causal_mask
from memcalc.nn.model import IMAGES, Batch, Network, positions
from memcalc.nn.run_context import run_context
from memcalc.nn.towers import as_tower
from memcalc.tables.dtypes import INT64


class Gemma4VisionEncoder(VisionEncoder):
    """The tower and its embedder. An image is scaled to a fixed number of tokens, whatever its size."""

    def __init__(self, c: Config, v: Config, width: int) -> None:
        self.config = v
        self.count = c.integer("vision_soft_tokens_per_image")
        self.vision_tower = Gemma4VisionTower(v, self.count)
        self.embed_vision = MultimodalEmbedder(v.integer("hidden_size"), width)

    def tokens(self, size: ImageSize) -> int:
        """As many for every image. Raises UsageError for a size that is asked for."""
        if size is not None:
            raise UsageError(
                f"--image-size does not fit this model, whose processor scales every image to {self.count} tokens "
                "('vision_soft_tokens_per_image'); leave it out."
            )
        return self.count

    def image_side(self, size: ImageSize) -> int:
        """Height of an image in pixels, if it is a square."""
        return int(self.count**0.5) * self.vision_tower.pool * self.vision_tower.patch

    def encode_images(self, batch: Batch) -> ImageFeatures:
        """Features of the images of a batch, one [tokens, width] an image."""
        tape, tower = batch.ids.tape, self.vision_tower
        images = batch.ids.shape[0] * batch.images
        shape = (images, self.count * tower.pool**2, 3 * tower.patch**2)
        pixels = tape.external_tensor(shape, run_context(tape).weights_dtype, OVERHEAD, IMAGES)
        ids = tape.external_tensor((*shape[:2], 2), INT64, OVERHEAD, IMAGES)
        hidden = tower(pixels, ids)
        pooled = self.embed_vision(hidden)
        pieces = ops.split(pooled, [self.count] * images, 0)
        return ImageFeatures(pieces, (hidden, pieces))


class Gemma4(VisionLanguage):
    """The decoder gets positions, masks and what its table has for the tokens from the whole model."""

    def __init__(
        self, vision_encoder: Gemma4VisionEncoder, text: TextModel, audio: Gemma4AudioWeights | None, *, sees_both: bool
    ) -> None:
        super().__init__(vision_encoder, text)
        self.audio_tower = audio
        self.sees_both = sees_both
        """Tokens of an image attend to each other in both directions, in layers with a window."""

    def _read(self, batch: Batch) -> tuple[Tensor, tuple[Any, ...], tuple[Any, ...]]:
        ids, tape, text = batch.ids, batch.ids.tape, cast(Gemma4TextModel, self.text.model)
        parts = vars(text)
        run = run_context(tape)
        places = [ops.compare(ids) for _ in range(3)]
        first = ops.empty_like(places[0])
        multimodal = ops.empty_like(first)
        del first
        text_ids = ops.empty_like(ids)
        pad = tape.empty((), INT64)
        text_ids = ops.empty_like(text_ids)
        del pad
        inputs_embeds = parts["embed_tokens"](text_ids)
        of_tokens = padded = None
        if parts.get("width"):
            pad_embedding = ops.select(parts["embed_tokens"].weight, 0)
            wide = ops.unsqueeze(multimodal, -1)
            padded = ops.where(wide, ops.view(pad_embedding, 1, 1, -1), inputs_embeds)
            of_tokens = text.of_tokens(text_ids)
        outputs: ImageFeatures | None = None
        sees = bool(batch.images) and run.past_length == 0
        if sees:
            outputs = self._encode_images(batch)
            features = ops.to(ops.cat(outputs.returned[1], 0), inputs_embeds.dtype)
            _count = tape.empty((), INT64)
            mask = ops.expand(ops.unsqueeze(places[0], -1), *inputs_embeds.shape)
            compared = ops.index_mask(inputs_embeds, mask, features.shape[0] * features.shape[1])
            del compared  # only its size is looked at
            inputs_embeds = ops.masked_scatter(inputs_embeds, mask, features)
        position_ids = positions(tape, ids.shape[1])
        groups = tape.empty(ids.shape, INT64) if sees and self.sees_both else None
        masks = {window: self._mask(batch, inputs_embeds, window, groups) for window in parts["windows"]}
        hidden = text(
            ids, batch.padding, embeds=inputs_embeds, of_tokens=of_tokens, position_ids=position_ids, masks=masks
        )
        del padded, places, text_ids, multimodal
        return hidden, (None if outputs is None else outputs.returned,), ()

    def _mask(self, batch: Batch, embeds: Tensor, window: int | None, groups: Tensor | None) -> Tensor | None:
        if groups is None or window is None:
            return causal_mask(embeds, batch.padding, window)
        return causal_mask(embeds, True, window, always=True)


def gemma4(c: Config, architecture: str | None) -> Network:
    """Gemma 4."""
    text = language_model(c, "gemma4_text", tied=c.flag("tie_word_embeddings"), transforms_logits=True)
    width = text.model.lm_head.weight.shape[1]
    encoder = Gemma4VisionEncoder(c, c.nested("vision_config", _VISION), width)
    as_tower(encoder)
    audio = Gemma4AudioWeights(c.nested("audio_config", _AUDIO), width) if c.section("audio_config") else None
    sees_both = c.section("text_config").get("use_bidirectional_attention") == "vision"
    return Gemma4(encoder, text, audio, sees_both=sees_both)


_VISION: dict[str, object] = {
    "hidden_size": 768,
    "intermediate_size": 3072,
    "num_hidden_layers": 16,
    "num_attention_heads": 12,
    "num_key_value_heads": 12,
    "head_dim": 64,
    "hidden_activation": "gelu_pytorch_tanh",
    "attention_dropout": 0.0,
    "pooling_kernel_size": 3,
    "patch_size": 16,
    "position_embedding_size": 10240,
}
_AUDIO: dict[str, object] = {
    "hidden_size": 1024,
    "num_hidden_layers": 12,
    "num_attention_heads": 8,
    "subsampling_conv_channels": [128, 32],
    "conv_kernel_size": 5,
    "output_proj_dims": 1536,
    "use_clipped_linears": True,
}

FAMILIES = table(
    Family(
        "gemma4",
        gemma4,
        {"vision_soft_tokens_per_image": 280, "tie_word_embeddings": True},
        attention="eager, sdpa",
        kinds="vision tower, decoder with shared keys and values, experts",
    )
)
