"""Llama 4 as it is published: tiles of an image through a tower with complex rotary embedding, and the decoder."""

from __future__ import annotations

from memcalc import ops
from memcalc.autograd.tape import OVERHEAD
from memcalc.autograd.tensor import Tensor
from memcalc.common.image_sides import ImageSize, side_or
from memcalc.config.reader import Config
from memcalc.errors import ConfigError
from memcalc.models.common.vision_encoder import ImageFeatures, VisionEncoder
from memcalc.models.common.vision_language import VisionLanguage, language_model
from memcalc.models.families.moe.llama4 import rotated
from memcalc.models.family import Family, table, vit_sizes
from memcalc.nn.layers.attention_backends import attend_same_dtype
from memcalc.nn.layers.linear import Linear
from memcalc.nn.layers.mlp import PlainMLP
from memcalc.nn.layers.norms import LayerNorm
from memcalc.nn.layers.vision_transformer import VisionBlock, grid_of, pixel_shuffle
from memcalc.nn.model import IMAGES, Batch, Network
from memcalc.nn.module import Buffer, Module, Parameter
from memcalc.nn.run_context import run_context
from memcalc.nn.stack import Stack
from memcalc.nn.towers import as_tower
from memcalc.tables.dtypes import COMPLEX64

MOST_ACROSS = 4
"""Tiles side by side of the largest picture (the processor's `max_patches` 16)."""


class UnfoldedPatches(Module):
    """The pixels of each patch in a row, times a matrix."""

    scope = "embedding"
    is_input_embedding = True

    def __init__(self, v: Config, hidden: int) -> None:
        self.side = v.integer("patch_size")
        self.linear = Linear(v.integer("num_channels") * self.side**2, hidden, group="embedding")

    def forward(self, pixels: Tensor) -> Tensor:
        """Pixels [b, c, height, width] to [b, n, h]."""
        hidden = ops.unfold(pixels, self.side)
        hidden = ops.permute(hidden, 0, 2, 1)
        return self.linear(hidden)


class RotaryAttention(Module):
    """Attention whose queries and keys are rotated by a table of complex numbers."""

    scope = "attention"

    def __init__(self, hidden: int, heads: int, dropout: float) -> None:
        self.head_dim, self.dropout = hidden // heads, dropout
        self.q_proj = Linear(hidden, hidden, bias=True)
        self.k_proj = Linear(hidden, hidden, bias=True)
        self.v_proj = Linear(hidden, hidden, bias=True)
        self.o_proj = Linear(hidden, hidden, bias=True)

    def forward(self, hidden: Tensor, mask: Tensor | None, rotation: Tensor) -> tuple[Tensor, Tensor | None]:
        """[b, n, h] to [b, n, h], and the probabilities where they exist; `rotation` [n, 1, d / 2]."""
        shape = (*hidden.shape[:-1], -1, self.head_dim)
        query = ops.view(self.q_proj(hidden), *shape)
        key = ops.view(self.k_proj(hidden), *shape)
        value = ops.view(self.v_proj(hidden), *shape)
        query, key = rotated(query, key, ops.view(rotation, 1, rotation.shape[0], rotation.shape[-1]))
        query = ops.transpose(query, 1, 2)
        key = ops.transpose(key, 1, 2)
        value = ops.transpose(value, 1, 2)
        out, weights = attend_same_dtype(query, key, value, mask, self.dropout, cast_back=False)
        out = ops.contiguous(ops.reshape(out, *hidden.shape[:-1], -1))
        out = self.o_proj(out)
        return out, weights


class RotaryBlock(VisionBlock):
    """A block of the tower; its input comes by keyword, so that checkpointing does not save but holds it."""

    input_is_keyword = True


class ShuffledAdapter(Module):
    """Squares of patches side by side, through two matrices with GELU after each."""

    def __init__(self, v: Config) -> None:
        ratio = v.factor("pixel_shuffle_ratio")
        self.factor, self.dropout = round(1 / ratio), v.probability("projector_dropout")
        middle, out = v.integer("projector_input_dim"), v.integer("projector_output_dim")
        self.mlp = AdapterMLP(v.integer("intermediate_size"), middle, out, self.dropout)

    def forward(self, patches: Tensor) -> Tensor:
        """[b, n, h] to [b, n / factor², out]."""
        batch, count, hidden = patches.shape
        side = int(count**0.5)
        patches = pixel_shuffle(ops.view(patches, batch, side, side, hidden), self.factor)
        patches = ops.view(patches, batch, -1, patches.shape[-1])
        return self.mlp(patches)


class AdapterMLP(Module):
    """GELU after each of two matrices."""

    def __init__(self, inputs: int, middle: int, out: int, dropout: float) -> None:
        self.fc1 = Linear(inputs, middle)
        self.fc2 = Linear(out, out)
        self.dropout = dropout

    def forward(self, hidden: Tensor) -> Tensor:
        """[..., inputs] to [..., out]."""
        hidden = self.fc1(hidden)
        hidden = ops.gelu(hidden)
        hidden = ops.dropout(hidden, self.dropout)
        return ops.gelu(self.fc2(hidden))


class Llama4Tower(Module):
    """Patches and after them a class token, blocks, and the adapter."""

    def __init__(self, v: Config) -> None:
        hidden, heads, _ = v.heads()
        hidden = v.integer("hidden_size")
        rows, columns = grid_of(v)
        dropout, inner = v.probability("attention_dropout"), v.integer("intermediate_size")
        self.class_embedding = Parameter(hidden, group="embedding")
        self.positional_embedding_vlm = Parameter(rows * columns + 1, hidden, group="embedding")
        self.patch_embedding = UnfoldedPatches(v, hidden)
        self.freqs_ci = Buffer(rows * columns + 1, 1, hidden // heads // 2, dtype=COMPLEX64)
        self.layernorm_pre = LayerNorm(hidden)
        self.layernorm_post = LayerNorm(hidden)

        def block(_: int) -> Module:
            parts = {
                "self_attn": RotaryAttention(hidden, heads, dropout),
                "mlp": PlainMLP(hidden, inner, "gelu", names=("fc1", "fc2"), bias=True),
                "input_layernorm": LayerNorm(hidden),
                "post_attention_layernorm": LayerNorm(hidden),
            }
            roles = ("input_layernorm", "self_attn", "post_attention_layernorm", "mlp")
            return RotaryBlock(parts, roles, residual_first=True)

        self.model = Stack(["layer"] * v.integer("num_hidden_layers"), block, name="vision block")
        self.vision_adapter = ShuffledAdapter(v)

    def forward(self, pixels: Tensor) -> Tensor:
        """Pixels [tiles, c, height, width] to [tiles, tokens, out]."""
        hidden = self.patch_embedding(pixels)
        tiles, _, width = hidden.shape
        classes = ops.expand(self.class_embedding, tiles, 1, width)
        hidden = ops.cat([hidden, classes], 1)
        hidden = ops.view(hidden, tiles, 1, -1, width)
        hidden = ops.add(hidden, self.positional_embedding_vlm)
        hidden = self.layernorm_pre(hidden)
        hidden = ops.view(hidden, tiles, -1, width)
        hidden = self._blocks(hidden)
        hidden = self.layernorm_post(hidden)
        hidden = ops.narrow(hidden, 1, hidden.shape[1] - 1)
        hidden = self.vision_adapter(hidden)
        del classes
        return hidden

    def _blocks(self, hidden: Tensor) -> Tensor:
        for block in self.model:
            hidden = block(hidden, None, rotation=self.freqs_ci)
        return hidden


class Llama4VisionEncoder(VisionEncoder):
    """A picture larger than a tile is read in tiles, and whole as well."""

    def __init__(self, v: Config, width: int) -> None:
        self.config = v
        rows, columns = grid_of(v)
        self.factor = round(1 / v.factor("pixel_shuffle_ratio"))
        if rows != columns or rows % self.factor:
            raise ConfigError(
                f"{v.where} has 'pixel_shuffle_ratio' {v.get('pixel_shuffle_ratio')}, which does not go with "
                f"{rows} rows and {columns} columns of patches; correct it, or 'image_size'."
            )
        middle, out = v.integer("projector_input_dim"), v.integer("projector_output_dim")
        if v.integer("intermediate_size") != v.integer("hidden_size") * self.factor**2 or middle != out:
            raise ConfigError(
                f"{v.where} has an adapter whose matrices do not fit each other: 'intermediate_size' must be "
                f"{self.factor**2} times 'hidden_size', and 'projector_input_dim' be 'projector_output_dim'; correct."
            )
        if v.integer("vision_output_dim") != out:
            raise ConfigError(
                f"{v.where} has 'vision_output_dim' {v.get('vision_output_dim')}, but 'projector_output_dim' {out}; "
                "correct one."
            )
        self.count = rows * columns // self.factor**2
        self.vision_model = Llama4Tower(v)
        self.multi_modal_projector = Projection(v.integer("vision_output_dim"), width)

    def tiles(self, size: ImageSize) -> int:
        """How many tiles a square picture of `size` pixels becomes."""
        side = self.config.sides("image_size")[0]
        across = min(MOST_ACROSS, -(-side_or(size, side) // side))
        return 1 if across == 1 else across**2 + 1

    def tokens(self, size: ImageSize) -> int:
        """Those of all tiles."""
        return self.tiles(size) * self.count

    def encode_images(self, batch: Batch) -> ImageFeatures:
        """What it makes of the images of a batch."""
        tape, v = batch.ids.tape, self.config
        tiles = batch.ids.shape[0] * batch.images * self.tiles(batch.image_size)
        shape = (tiles, v.integer("num_channels"), *v.sides("image_size"))
        pixels = tape.external_tensor(shape, run_context(tape).weights_dtype, OVERHEAD, IMAGES)
        seen = self.vision_model(pixels)
        return ImageFeatures(self.multi_modal_projector(ops.view(seen, -1, seen.shape[-1])), (seen,))


class Projection(Module):
    """One matrix."""

    def __init__(self, inputs: int, outputs: int) -> None:
        self.linear_1 = Linear(inputs, outputs)

    def forward(self, features: Tensor) -> Tensor:
        """[n, inputs] to [n, outputs]."""
        return self.linear_1(features)


def llama4(c: Config, architecture: str | None) -> Network:
    """Llama 4 Scout and Maverick."""
    v = c.nested("vision_config", _TOWER)
    text = language_model(c, "llama4_text", tied=c.flag("tie_word_embeddings"))
    vision_encoder = Llama4VisionEncoder(v, text.model.lm_head.weight.shape[1])
    as_tower(vision_encoder)
    return VisionLanguage(vision_encoder, text, holds_inputs_embeds=True)


_TOWER: dict[str, object] = vit_sizes(
    (768, 5632, 34, 16, 448, 14, 3),
    vision_output_dim=7680,
    pixel_shuffle_ratio=0.5,
    projector_input_dim=4096,
    projector_output_dim=4096,
    projector_dropout=0.0,
    attention_dropout=0.0,
)

FAMILIES = table(Family("llama4", llama4, {"tie_word_embeddings": False}, kinds="vision tower, decoder, experts"))
