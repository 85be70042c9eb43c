"""Idefics 3 and SmolVLM: SigLIP's tower over tiles of an image, squares of patches side by side, and a decoder."""

from __future__ import annotations

from memcalc import ops
from memcalc.autograd.tape import OVERHEAD
from memcalc.autograd.tensor import Tensor
from memcalc.common.image_sides import ImageSize, side_or
from memcalc.config.reader import Config
from memcalc.errors import ConfigError
from memcalc.models.common.vision_encoder import ImageFeatures, VisionEncoder
from memcalc.models.common.vision_language import VisionLanguage, language_model
from memcalc.models.family import Family, table, vit_sizes
from memcalc.models.vision_towers.clip_siglip import tower_blocks
from memcalc.nn.layers.linear import Embedding, Linear
from memcalc.nn.layers.masks import bidirectional_mask
from memcalc.nn.layers.norms import LayerNorm
from memcalc.nn.layers.vision_transformer import PatchEmbedding, grid_of, pixel_shuffle
from memcalc.nn.model import IMAGES, Batch, Network
from memcalc.nn.module import Module
from memcalc.nn.run_context import run_context
from memcalc.nn.towers import as_tower
from memcalc.tables.dtypes import BOOL, INT64


class PatchesWithPositions(Module):
    """Patches, plus the learned position nearest to where each lies in its image."""

    scope = "embedding"
    is_input_embedding = True

    def __init__(self, v: Config, positions: int) -> None:
        width = v.integer("hidden_size")
        self.patch_embedding = PatchEmbedding(v.integer("num_channels"), width, v.integer("patch_size"))
        self.patch_embedding.is_input_embedding = False
        self.position_embedding = Embedding(positions, width)

    def forward(self, pixels: Tensor) -> Tensor:
        """Pixels [b, c, height, width] to [b, n, h]."""
        embeddings = self.patch_embedding(pixels)
        places = pixels.tape.empty(embeddings.shape[:2], INT64)
        nearest = pixels.tape.empty(embeddings.shape[:2], INT64)
        places = pixels.tape.empty(embeddings.shape[:2], INT64)
        del nearest
        return ops.add(embeddings, self.position_embedding(places))


class TiledTower(Module):
    """Embeddings, blocks and a norm. No patch is padding: the images are square."""

    def __init__(self, v: Config) -> None:
        rows, columns = grid_of(v)
        self.embeddings = PatchesWithPositions(v, rows * columns)
        self.encoder = tower_blocks(v, "vision block", together=False)
        self.post_layernorm = LayerNorm(v.integer("hidden_size"))

    def forward(self, pixels: Tensor) -> Tensor:
        """Pixels [b, c, height, width] to [b, n, h]."""
        embedded = self.embeddings(pixels)
        mask = bidirectional_mask(embedded, padding=False)
        hidden = embedded
        for block in self.encoder:
            hidden = block(hidden, mask)
        return self.post_layernorm(hidden)


class MaskedImages(VisionEncoder):
    """A tower whose images come with a mask of the pixels that are no padding."""

    config: Config
    patches: tuple[int, int]
    vision_model: Module

    def pictures(self, batch: Batch) -> tuple[int, int, int]:
        """How many images the tower gets of each sequence, and their height and width."""
        raise NotImplementedError

    def features(self, states: Tensor, seen: Tensor) -> Tensor:
        """What becomes of the tower's states; `seen` says which patches are no padding."""
        raise NotImplementedError

    def encode_images(self, batch: Batch) -> ImageFeatures:
        """What it makes of the images of a batch."""
        tape, (images, *sides) = batch.ids.tape, self.pictures(batch)
        lead = batch.ids.shape[0], images
        shape = (*lead, self.config.integer("num_channels"), *sides)
        pixels = tape.external_tensor(shape, run_context(tape).weights_dtype, OVERHEAD, IMAGES)
        mask = tape.external_tensor((*lead, *sides), INT64, OVERHEAD, IMAGES)
        return self(pixels, mask)

    def forward(self, pixels: Tensor, mask: Tensor) -> ImageFeatures:
        """Pixels [b, images, c, height, width] to features, one tensor for each sequence.

        Images of nothing but zeros are padding, so that all are looked through and those that are none are copied.
        """
        tape, batch = pixels.tape, pixels.shape[0]
        pixels = ops.view(pixels, -1, *pixels.shape[2:])
        count = pixels.shape[0]
        blank = ops.compare(pixels)
        sums = tape.empty((count,), INT64)
        del blank
        real = ops.compare(sums)
        del sums
        how_many = tape.empty((batch,), INT64)
        pixels = ops.index_select(pixels, tape.empty((count,), INT64))
        mask = ops.view(mask, -1, *mask.shape[2:])
        mask = ops.index_select(mask, tape.empty((count,), INT64))
        seen = tape.empty((count, *self.patches), BOOL)
        states: Tensor = self.vision_model(pixels)
        features = self.features(states, seen)
        # Without gradients nothing tells the views of equal pieces apart: one stands for all.
        distinct = batch if features.requires_grad else 1
        pieces = ops.split(features, [count // batch] * distinct, 0)
        found = [ops.reshape(piece, -1, piece.shape[-1]) for piece in pieces] * (batch // distinct)
        del real, how_many, seen
        return ImageFeatures(found, (states,))


class Idefics3VisionEncoder(MaskedImages):
    """An image larger than the tower's is read in tiles, and whole as well."""

    def __init__(self, c: Config, v: Config, width: int) -> None:
        self.config = v
        self.factor = c.integer("scale_factor")
        rows, columns = grid_of(v)
        self.patches = rows, columns
        self.vision_model = TiledTower(v)
        self.connector = Linear(v.integer("hidden_size") * self.factor**2, width)

    def tiles(self, size: ImageSize) -> int:
        """How many images of the tower's size one of `size` pixels becomes."""
        side = self.config.integer("image_size")
        across = -(-side_or(size, side) // side)
        return 1 if across == 1 else across**2 + 1

    def tokens(self, size: ImageSize) -> int:
        """Squares of patches of all tiles."""
        rows, columns = self.patches
        return self.tiles(size) * (rows * columns // self.factor**2)

    def pictures(self, batch: Batch) -> tuple[int, int, int]:
        """How many images the tower gets of each sequence, and their height and width."""
        side = self.config.integer("image_size")
        return batch.images * self.tiles(batch.image_size), side, side

    def features(self, states: Tensor, seen: Tensor) -> Tensor:
        """What becomes of the tower's states."""
        return self.connector(pixel_shuffle_flat(states, self.factor))


def pixel_shuffle_flat(states: Tensor, factor: int) -> Tensor:
    """[b, n, h] to [b, n / factor², h · factor²]."""
    batch, count, hidden = states.shape
    side = int(count**0.5)
    grid = pixel_shuffle(ops.view(states, batch, side, side, hidden), factor)
    return ops.view(grid, batch, count // factor**2, -1)


class Idefics3(VisionLanguage):
    """Idefics 3 puts the features in place in a function of its own, SmolVLM in the model's forward."""

    merges_apart = True


def idefics3(c: Config, architecture: str | None, *, network: type[VisionLanguage] = Idefics3) -> Network:
    """Idefics 3 and SmolVLM."""
    v = c.nested("vision_config", _TOWER)
    rows, columns = grid_of(v)
    if rows % c.integer("scale_factor") or rows != columns:
        raise ConfigError(
            f"{c.where} has 'scale_factor' {c.get('scale_factor')}, which does not divide {rows} rows of patches; "
            f"correct it, or 'image_size'."
        )
    text = language_model(c, "llama", tied=c.flag("tie_word_embeddings"))
    vision_encoder = Idefics3VisionEncoder(c, v, text.model.lm_head.weight.shape[1])
    as_tower(vision_encoder)
    return network(vision_encoder, text)


def smolvlm(c: Config, architecture: str | None) -> Network:
    """SmolVLM: Idefics 3 that reads videos too, whose frames are never split into tiles."""
    model = idefics3(c, architecture, network=VisionLanguage)
    model.frames_per_image = 1
    return model


_TOWER: dict[str, object] = vit_sizes(
    (1152, 3072, 12, 16, 224, 32, 3), hidden_act="gelu_pytorch_tanh", attention_dropout=0.0
)

_DEFAULTS: dict[str, object] = {"scale_factor": 2, "tie_word_embeddings": False}

FAMILIES = table(
    Family("idefics3", idefics3, _DEFAULTS, kinds="vision tower, decoder"),
    Family("smolvlm", smolvlm, _DEFAULTS, kinds="vision tower, decoder"),
)
