"""Kimi K2.5: a tower over packed patches with interpolated positions, and DeepSeek-V3's decoder."""

from __future__ import annotations

from typing import Any

from memcalc import ops
from memcalc.autograd.tape import OVERHEAD
from memcalc.autograd.tensor import Tensor
from memcalc.config.reader import Config
from memcalc.errors import ConfigError
from memcalc.models.common.vision_encoder import DynamicResolutionEncoder, ImageFeatures
from memcalc.models.common.vision_language import VisionLanguage, language_model
from memcalc.models.family import Family, table, vit_sizes
from memcalc.nn.layers.equal_pieces import Repeat
from memcalc.nn.layers.linear import Linear
from memcalc.nn.layers.mlp import PlainMLP
from memcalc.nn.layers.norms import LayerNorm
from memcalc.nn.layers.packed_vision import AxialRotary, PackedBlock, SplitPackedAttention
from memcalc.nn.layers.vision_transformer import PatchEmbedding
from memcalc.nn.model import IMAGES, Batch, Network
from memcalc.nn.module import Buffer, Module, Parameter
from memcalc.nn.run_context import run_context
from memcalc.nn.stack import Stack
from memcalc.nn.towers import as_tower
from memcalc.tables.dtypes import BOOL, FP32, INT64

NEIGHBOURS = 16
"""Learned positions that one is interpolated from (bicubic)."""


class PatchesWithPositions(Module):
    """Each patch times a matrix, plus the position interpolated for it, plus that of its frame."""

    scope = "embedding"

    def __init__(self, v: Config, hidden: int) -> None:
        self.proj = PatchEmbedding(3, hidden, v.integer("patch_size"), flat=False)
        self.proj.is_input_embedding = False  # Transformers does not know which module it is
        self.pos_emb = LearnedPositionGrid(v, hidden)

    def forward(self, pixels: Tensor) -> Tensor:
        """Patches [n, 3, side, side] to [n, h]."""
        hidden = ops.view(self.proj(pixels), pixels.shape[0], -1)
        hidden = self.pos_emb(hidden)
        return hidden  # noqa: RET504


class LearnedPositionGrid(Module):
    """A square of learned positions, and a table of frames."""

    def __init__(self, v: Config, hidden: int) -> None:
        self.position_embeddings = Parameter(v.integer("pos_emb_height"), v.integer("pos_emb_width"), hidden)
        self.time_position_embeddings = Buffer(v.integer("pos_emb_time") + 1, hidden)

    def forward(self, hidden: Tensor) -> Tensor:
        """[n, h] to [n, h]."""
        tape, count = hidden.tape, hidden.shape[0]
        table = ops.view(self.position_embeddings, -1, hidden.shape[1])
        indices, weights = tape.empty((count, NEIGHBOURS), INT64), tape.empty((count, NEIGHBOURS), FP32)
        places = ops.embedding_bag(indices, table, ops.to(weights, table.dtype))
        places = ops.add(places, ops.index_select(self.time_position_embeddings, tape.empty((count,), INT64)))
        out = ops.add(hidden, ops.to(places, hidden.dtype))
        del indices, weights
        return out


class KimiVisionEncoder(DynamicResolutionEncoder):
    """Patches of all images in one row through blocks; squares of them side by side are a token."""

    def __init__(self, c: Config, v: Config, width: int) -> None:
        sides, hidden = v.integers("merge_kernel_size"), v.integer("hidden_size")
        if len(sides) != 2 or sides[0] != sides[1]:
            raise ConfigError(f"{v.where} has a 'merge_kernel_size' that is no square of patches; correct it.")
        if c.integer("projection_hidden_size") != hidden:
            raise ConfigError(
                f"{c.where} has 'projection_hidden_size' {c.get('projection_hidden_size')}, but its vision config "
                f"'hidden_size' {hidden}; correct one."
            )
        self.square = sides[0] * sides[1]
        self.patch = v.integer("patch_size")
        super().__init__(v, self.patch * sides[0])
        self.vision_tower = KimiTower(v, self.square)
        self.mm_projector = KimiProjector(hidden, self.square, width)

    def encode_images(self, batch: Batch) -> ImageFeatures:
        """What it makes of the images of a batch."""
        tape, images = batch.ids.tape, batch.ids.shape[0] * batch.images
        count = self.tokens(batch.image_size)
        shape = (images * count * self.square, 3, self.patch, self.patch)
        pixels = tape.external_tensor(shape, run_context(tape).weights_dtype, OVERHEAD, IMAGES)
        hidden, pooled = self.vision_tower(pixels, images)
        features = ops.squeeze(self.mm_projector(pooled), 1)
        del pooled
        return ImageFeatures(ops.split(features, [count] * images, 0), (hidden,))


class KimiTower(Module):
    """Embeddings, blocks, a norm, and the mean over frames."""

    def __init__(self, v: Config, square: int) -> None:
        hidden, heads = v.integer("hidden_size"), v.integer("num_attention_heads")
        inner, act = v.integer("intermediate_size"), v.text("hidden_act")
        self.square = square
        self.patch_embed = PatchesWithPositions(v, hidden)
        self.rotary_emb = AxialRotary(hidden // heads, flipped=True)

        def block(_: int) -> Module:
            mlp = PlainMLP(hidden, inner, act, names=("fc1", "fc2"), bias=True)
            return PackedBlock(LayerNorm(hidden), LayerNorm(hidden), SplitPackedAttention(hidden, heads), mlp)

        self.layers = Stack(["layer"] * v.integer("num_hidden_layers"), block, name="vision block")
        self.final_layernorm = LayerNorm(hidden)

    def forward(self, pixels: Tensor, images: int) -> tuple[Tensor, Tensor]:
        """Patches [n, 3, side, side] to hidden states [n, h], and those by squares [tokens, square, h]."""
        hidden = self.patch_embed(pixels)
        places = pixels.tape.empty((pixels.shape[0], 2), INT64)
        rotation = self.rotary_emb(hidden, places)
        lengths = [Repeat([pixels.shape[0] // images], images)]
        for block in self.layers:
            hidden = block(hidden, lengths=lengths, rotation=rotation)
        hidden = self.final_layernorm(hidden)
        return hidden, self._pooled(hidden)

    def _pooled(self, hidden: Tensor) -> Tensor:
        tape, count = hidden.tape, hidden.shape[0]
        where, share = tape.empty((count,), INT64), tape.empty((count,), FP32)
        pooled = tape.empty(hidden.shape, FP32)
        pooled = ops.index_add_(pooled, where, ops.mul(ops.to(hidden, FP32), ops.unsqueeze(share, 1)))
        out = ops.to(ops.view(pooled, -1, self.square, hidden.shape[1]), hidden.dtype)
        del where, share
        return out


class KimiProjector(Module):
    """A norm over each patch, and an MLP over squares of them."""

    def __init__(self, hidden: int, square: int, width: int) -> None:
        self.inner = hidden * square
        self.pre_norm = LayerNorm(hidden)
        self.in_proj = Linear(self.inner, self.inner, bias=True)
        self.out_proj = Linear(self.inner, width, bias=True)

    def forward(self, pooled: Tensor) -> Tensor:
        """[tokens, square, h] to [tokens, 1, width]."""
        hidden = ops.view(self.pre_norm(pooled), pooled.shape[0], -1, self.inner)
        hidden = self.in_proj(hidden)
        hidden = ops.gelu(hidden)
        return self.out_proj(hidden)


class Kimi(VisionLanguage):
    """Tokens of images are replaced before they are embedded."""

    def _embedded(self, ids: Tensor) -> tuple[Tensor, Any]:
        """Embeddings [b, s, h], and what stays until the decoder is through."""
        mask = ids.tape.empty(ids.shape, BOOL)
        cleaned = ops.clone(ids)
        return vars(self.text.model)["embed_tokens"](cleaned), (mask, cleaned)


def kimi_k25(c: Config, architecture: str | None) -> Network:
    """Kimi K2.5."""
    v = c.nested("vision_config", _TOWER)
    text = language_model(c, "deepseek_v3", tied=c.flag("tie_word_embeddings"))
    vision_encoder = KimiVisionEncoder(c, v, text.model.lm_head.weight.shape[1])
    as_tower(vision_encoder)
    return Kimi(vision_encoder, text, own_cache=True, videos=True)


_TOWER: dict[str, object] = vit_sizes(
    (1152, 4304, 27, 16, 0, 14, 0),
    pos_emb_height=64,
    pos_emb_width=64,
    pos_emb_time=4,
    merge_kernel_size=[2, 2],
    hidden_act="gelu_pytorch_tanh",
)

FAMILIES = table(Family("kimi_k25", kimi_k25, {"projection_hidden_size": 1152, "tie_word_embeddings": True}))
