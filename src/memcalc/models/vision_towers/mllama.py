"""Llama 3.2's vision tower: all tiles of an image in one sequence, through two stacks of blocks.

No block is checkpointed: Transformers made them without that. Both stacks keep the states of every block until the
tower is through, though few of them are used.
"""

from __future__ import annotations

from memcalc import ops
from memcalc.autograd.tensor import Tensor
from memcalc.config.reader import Config
from memcalc.errors import ConfigError
from memcalc.nn.layers.linear import Embedding
from memcalc.nn.layers.mlp import PlainMLP
from memcalc.nn.layers.norms import LayerNorm
from memcalc.nn.layers.vision_transformer import PatchEmbedding, VisionAttention, grid_of
from memcalc.nn.module import Module, Parameter
from memcalc.nn.run_context import run_context
from memcalc.nn.stack import Stack


class TilePositionEmbedding(Module):
    """A learned vector for each tile of an image of each shape, weighted by a gate."""

    scope = "embedding"

    def __init__(self, shapes: int, tiles: int, width: int) -> None:
        self.tiles, self.width = tiles, width
        self.gate = Parameter(1, group="embedding")
        self.embedding = Embedding(shapes + 1, tiles * width)

    def forward(self, hidden: Tensor, shapes: Tensor) -> Tensor:
        """[images, tiles, n, h] to the same; `shapes` are those of the images [images, 1]."""
        embeddings = self.embedding(shapes)
        embeddings = ops.reshape(embeddings, -1, self.tiles, 1, self.width)
        embeddings = ops.mul(embeddings, ops.tanh(self.gate))
        return ops.add(hidden, embeddings)


class GatedPositionEmbedding(Module):
    """A learned vector for each patch, and one for each patch of each tile, weighted against each other."""

    scope = "embedding"

    def __init__(self, shapes: int, tiles: int, patches: int, width: int) -> None:
        self.shape = tiles, patches, width
        self.gate = Parameter(1, group="embedding")
        self.embedding = Parameter(patches, width, group="embedding")
        self.tile_embedding = Embedding(shapes + 1, tiles * patches * width)

    def forward(self, hidden: Tensor, shapes: Tensor) -> Tensor:
        """[images, tiles, n, h] to the same; `shapes` are those of the images [images, 1]."""
        tiles, patches, width = self.shape
        gated = ops.mul(ops.add_scalar(ops.neg(ops.tanh(self.gate))), self.embedding)
        hidden = ops.add(hidden, ops.view(gated, 1, 1, patches, width))
        tiled = self.tile_embedding(shapes)
        tiled = ops.reshape(tiled, hidden.shape[0], tiles, patches, width)
        gated_tiles = ops.mul(ops.tanh(self.gate), tiled)
        return ops.add(hidden, gated_tiles)


class GatedBlock(Module):
    """Norm, attention, add; norm, MLP, add. With `gated`, what is added is weighted by trained gates."""

    scope = "residual stream"
    skips_checkpointing = True

    def __init__(self, v: Config, width: int, *, gated: bool) -> None:
        names = ("q_proj", "k_proj", "v_proj", "o_proj")
        heads, act = v.integer("attention_heads"), v.text("hidden_act")
        self.gate_attn = Parameter(1, group="norms") if gated else None
        self.gate_ffn = Parameter(1, group="norms") if gated else None
        self.self_attn = VisionAttention(width, heads, names=names, bias=False, out_bias=False, together=True)
        self.mlp = PlainMLP(width, v.integer("intermediate_size"), act, names=("fc1", "fc2"), bias=True)
        self.input_layernorm = LayerNorm(width)
        self.post_attention_layernorm = LayerNorm(width)

    def forward(self, hidden: Tensor, mask: Tensor) -> Tensor:
        """[images, n, h] to the same."""
        residual = hidden
        hidden = self.input_layernorm(hidden)
        hidden, _weights = self.self_attn(hidden, mask=mask)
        if self.gate_attn is not None:
            hidden = ops.mul(ops.tanh(self.gate_attn), hidden)
        hidden = ops.add(residual, hidden)
        residual = hidden
        hidden = self.post_attention_layernorm(hidden)
        hidden = self.mlp(hidden)
        if self.gate_ffn is not None:
            hidden = ops.mul(ops.tanh(self.gate_ffn), hidden)
        return ops.add(residual, hidden)


class TiledTower(Module):
    """Pixels of tiles to states of patches, the last of them with those of chosen blocks."""

    def __init__(self, v: Config) -> None:
        self.width, depth = v.integer("hidden_size"), v.integer("num_hidden_layers")
        rows, columns = grid_of(v)
        self.patches, self.tiles = rows * columns + 1, v.integer("max_num_tiles")
        shapes = len(v.items("supported_aspect_ratios") or [])
        self.chosen = _indices(v, depth)
        self.patch_embedding = PatchEmbedding(
            v.integer("num_channels"), self.width, v.integer("patch_size"), bias=False, bare=True
        )
        self.class_embedding = Parameter(self.width, group="embedding")
        self.gated_positional_embedding = GatedPositionEmbedding(shapes, self.tiles, self.patches, self.width)
        self.pre_tile_positional_embedding = TilePositionEmbedding(shapes, self.tiles, self.width)
        self.post_tile_positional_embedding = TilePositionEmbedding(shapes, self.tiles, self.width)
        self.layernorm_pre = LayerNorm(self.width)
        self.layernorm_post = LayerNorm(self.width)
        kinds = [block if block in self.chosen else "block" for block in range(depth)]
        self.transformer = Stack(kinds, lambda _: GatedBlock(v, self.width, gated=False), name="vision block")
        self.global_transformer = Stack(
            ["block"] * v.integer("num_global_layers"),
            lambda _: GatedBlock(v, self.width, gated=True),
            name="global vision block",
        )

    @property
    def outputs(self) -> int:
        """Width of what it gives."""
        return self.width * (1 + len(self.chosen))

    def forward(self, pixels: Tensor, shapes: Tensor, aspect_ratio_mask: Tensor) -> Tensor:
        """Pixels [b, images, tiles, c, height, width] to [b, images, tiles, n, outputs].

        `shapes` [b, images] says how the tiles lie, `aspect_ratio_mask` [b, images, tiles] which are none.
        """
        lead, tiles = pixels.shape[:3], self.tiles
        images = lead[0] * lead[1]
        pixels = ops.reshape(pixels, images * tiles, *pixels.shape[3:])
        shapes = ops.reshape(shapes, images, -1)
        patches = self.patch_embedding(pixels)
        hidden = ops.reshape(patches, images, tiles, -1, self.width)
        hidden = self.pre_tile_positional_embedding(hidden, shapes)
        hidden = ops.reshape(hidden, images * tiles, -1, self.width)
        hidden = self._classed(hidden)
        hidden = ops.reshape(hidden, images, tiles, self.patches, self.width)
        hidden = self.gated_positional_embedding(hidden, shapes)
        hidden = self.layernorm_pre(hidden)
        extra = -self.patches % 8
        hidden = ops.pad(hidden, 2, extra)
        mask = self._mask(ops.reshape(aspect_ratio_mask, images, -1), hidden.shape[2])
        hidden = ops.view(hidden, images, -1, self.width)
        hidden, states = _through(self.transformer, hidden, mask)
        hidden = self.layernorm_post(hidden)
        hidden = ops.reshape(hidden, images, tiles, self.patches + extra, self.width)
        hidden = self.post_tile_positional_embedding(hidden, shapes)
        hidden = ops.reshape(hidden, images, tiles * (self.patches + extra), self.width)
        hidden, _global_states = _through(self.global_transformer, hidden, mask)
        hidden = ops.reshape(hidden, images, tiles, self.patches + extra, self.width)
        hidden = ops.narrow(hidden, 2, self.patches)
        hidden = ops.reshape(hidden, *lead, self.patches, self.width)
        every = [states[index] for index in self.chosen]
        middle = ops.stack(every, -1)
        middle = ops.reshape(middle, images, tiles, self.patches + extra, -1)
        middle = ops.narrow(middle, 2, self.patches)
        middle = ops.reshape(middle, *lead, self.patches, -1)
        hidden = ops.cat((hidden, middle), -1)
        del patches
        return hidden

    def _classed(self, hidden: Tensor) -> Tensor:
        classes = ops.expand(self.class_embedding, hidden.shape[0], 1, self.width)
        return ops.cat((classes, hidden), 1)

    def _mask(self, aspect_ratio_mask: Tensor, length: int) -> Tensor:
        """Which patches see which [images, 1, n, n]: padding sees nothing, and is not seen."""
        images, tiles = aspect_ratio_mask.shape
        dtype = run_context(aspect_ratio_mask).weights_dtype
        mask = ops.to(ops.view(aspect_ratio_mask, images, tiles, 1, 1), dtype)
        mask = aspect_ratio_mask.tape.empty((images, tiles, length, 1), dtype)
        mask = ops.add_scalar(mask)
        mask = ops.reshape(mask, images, tiles * length, 1)
        mask = ops.mul_scalar(ops.matmul(mask, ops.transpose(mask, -1, -2)))
        return ops.unsqueeze(mask, 1)


def _through(stack: Stack, hidden: Tensor, mask: Tensor) -> tuple[Tensor, dict[int, Tensor]]:
    """Hidden states after a stack, and after each of its blocks that was traced."""
    states = {}
    for block in stack:
        hidden = block(hidden, mask=mask)
        states[block.traced.position] = hidden
        if not hidden.requires_grad:
            hidden.storage.allocation.handed_over = False  # it stays, for each block one
    return hidden, states


def _indices(v: Config, depth: int) -> list[int]:
    """`intermediate_layers_indices`: the blocks whose states are used."""
    out = []
    for given in v.items("intermediate_layers_indices") or []:
        if isinstance(given, bool) or not isinstance(given, int) or not 0 <= given < depth:
            raise ConfigError(
                f"{v.where} gives {given!r} in 'intermediate_layers_indices', but there are {depth} layers; correct it."
            )
        out.append(given)
    return out
