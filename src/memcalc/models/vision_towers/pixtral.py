"""Pixtral's tower: the patches of all images, of whatever size, in one sequence with a mask between images."""

from __future__ import annotations

from functools import partial

from memcalc import ops
from memcalc.autograd.tensor import Tensor
from memcalc.config.reader import Config
from memcalc.models.family import vit_sizes
from memcalc.nn.layers.equal_pieces import Repeat, each_piece
from memcalc.nn.layers.grouped_query_attention import GroupedQueryAttention
from memcalc.nn.layers.mlp import GatedMLP
from memcalc.nn.layers.norms import RMSNorm
from memcalc.nn.layers.packed_vision import AxialRotary
from memcalc.nn.layers.rotary import Rotation, apply_rotary
from memcalc.nn.layers.vision_transformer import PatchEmbedding, Seen, kinds_of
from memcalc.nn.module import Module
from memcalc.nn.run_context import run_context
from memcalc.nn.stack import Stack
from memcalc.tables.dtypes import INT64

PIXTRAL: dict[str, object] = vit_sizes((1024, 4096, 24, 16, 1024, 16, 3), hidden_act="gelu", attention_dropout=0.0)


class PixtralBlock(Module):
    """Norm, attention, add; norm, MLP, add."""

    scope = "residual stream"

    def __init__(self, attention: Module, feed_forward: Module, width: int) -> None:
        self.attention_norm = RMSNorm(width)
        self.feed_forward = feed_forward
        self.attention = attention
        self.ffn_norm = RMSNorm(width)

    def forward(self, hidden: Tensor, mask: Tensor | None, rotation: Rotation) -> Tensor:
        """[1, n, h] to [1, n, h]."""
        residual = hidden
        hidden = self.attention_norm(hidden)
        hidden, _weights = self.attention(hidden, rotation=rotation, mask=mask)
        hidden = ops.add(residual, hidden)
        residual = hidden
        hidden = self.ffn_norm(hidden)
        hidden = self.feed_forward(hidden)
        return ops.add(residual, hidden)


class PixtralTower(Module):
    """Patches [1, n, h] of all images through blocks. `keep` are the indices of states that are given as well."""

    def __init__(self, v: Config, keep: tuple[int, ...]) -> None:
        width, heads, _ = v.heads()
        width = v.integer("hidden_size")
        head_dim, depth = width // heads, v.integer("num_hidden_layers")
        channels, side = v.integer("num_channels"), v.integer("patch_size")
        self.patch_conv = PatchEmbedding(channels, width, side, bias=False, flat=False)
        self.ln_pre = RMSNorm(width)

        def block(_: int) -> Module:
            attention = GroupedQueryAttention(
                width,
                heads,
                heads,
                head_dim,
                rotate=partial(apply_rotary, dim=0),
                dropout=v.probability("attention_dropout"),
            )
            return PixtralBlock(attention, GatedMLP(width, v.integer("intermediate_size"), v.text("hidden_act")), width)

        self.transformer = Stack(kinds_of(depth, keep), block, name="vision block")
        self.patch_positional_embedding = AxialRotary(head_dim, halves=True, cast=True)
        self.keep = keep

    def forward(self, pixels: Tensor) -> Seen:
        """Pixels [images, c, height, width] to hidden states."""
        tape = pixels.tape
        grid = self.patch_conv(pixels)
        images = each_piece(_flat, [Repeat([1], grid.shape[0])], [grid], 0)
        hidden = ops.cat(images, 1)
        hidden = self.ln_pre(hidden)
        places = tape.empty((hidden.shape[1], 2), INT64)
        last_places = [tape.empty((side,), INT64) for side in grid.shape[2:]]
        rotation = self.patch_positional_embedding(hidden, places)
        mask = None
        if run_context(tape).attention != "flash":
            mask = tape.empty((1, 1, hidden.shape[1], hidden.shape[1]), hidden.dtype)
        hidden, states = self._blocks(hidden, mask, rotation)
        del grid, last_places
        return hidden, None, tuple(states[index] for index in self.keep)

    def _blocks(self, hidden: Tensor, mask: Tensor | None, rotation: Rotation) -> tuple[Tensor, dict[int, Tensor]]:
        states = {0: hidden} if 0 in self.keep else {}
        for layer in self.transformer:
            hidden = layer(hidden, mask, rotation=rotation)
            if layer.traced.position + 1 in self.keep:
                states[layer.traced.position + 1] = hidden
        return hidden, states


def _flat(image: Tensor) -> Tensor:
    """[1, h, rows, columns] to [1, n, h]."""
    return ops.transpose(ops.view(image, 1, image.shape[1], -1), 1, 2)
