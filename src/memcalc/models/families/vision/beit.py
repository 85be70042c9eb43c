"""BEiT: a vision transformer with a bias for the relative place of two patches, shared or of each block."""

from __future__ import annotations

from memcalc import ops
from memcalc.autograd.tensor import Tensor
from memcalc.config.reader import Config
from memcalc.models.common.image_models import image_network
from memcalc.models.family import Family, table, vit_sizes
from memcalc.nn.layers.mlp import PlainMLP
from memcalc.nn.layers.norms import LayerNorm
from memcalc.nn.layers.vision_transformer import PatchEmbedding, Seen, VisionAttention, VisionTower, drop_path, grid_of
from memcalc.nn.model import Network
from memcalc.nn.module import Buffer, Module, Parameter
from memcalc.nn.stack import Stack
from memcalc.tables.dtypes import INT64


class BeitEmbeddings(Module):
    """Patches after a class token, and a trained position for each where the config asks for them."""

    scope = "embedding"

    def __init__(self, c: Config, hidden: int) -> None:
        height, width = grid_of(c)
        self.cls_token = Parameter(1, 1, hidden, group="embedding")
        self.mask_token = Parameter(1, 1, hidden, group="embedding") if c.flag("use_mask_token") else None
        placed = c.flag("use_absolute_position_embeddings")
        self.position_embeddings = Parameter(1, height * width + 1, hidden, group="embedding") if placed else None
        self.patch_embeddings = PatchEmbedding(c.integer("num_channels"), hidden, c.integer("patch_size"))
        self.dropout = c.probability("hidden_dropout_prob")

    def forward(self, pixels: Tensor) -> Tensor:
        """Pixels [b, c, height, width] to [b, n, h]."""
        embeddings = self.patch_embeddings(pixels)
        embeddings = ops.cat([ops.expand(self.cls_token, pixels.shape[0], -1, -1), embeddings], 1)
        if self.position_embeddings is not None:
            embeddings = ops.add(embeddings, self.position_embeddings)
        return ops.dropout(embeddings, self.dropout)


class RelativePositionBias(Module):
    """A bias on the scores [1, heads, n, n] for the relative place of two patches.

    `index` says which row of the table two patches take; one table of them is made for all and kept.
    """

    scope = "attention"

    def __init__(self, c: Config, index: Buffer) -> None:
        height, width = grid_of(c)
        self.sizes = 2 * height - 1, 2 * width - 1
        heads = c.integer("num_attention_heads")
        self.relative_position_bias_table = Parameter(self.sizes[0] * self.sizes[1] + 3, heads, group="attention")
        self.index = (index,)  # shared by all: no weight of this module

    def forward(self, states: Tensor) -> Tensor:
        """The bias; the states only give their tape."""
        table, (index,) = self.relative_position_bias_table, self.index
        between = table.shape[0] - 3
        places = ops.narrow(table, 0, between)
        places = ops.permute(ops.reshape(places, 1, self.sizes[1], self.sizes[0], -1), 0, 3, 1, 2)
        resized = ops.interpolate(places, self.sizes)
        resized = ops.reshape(ops.permute(resized, 0, 2, 3, 1), between, -1)
        whole = ops.cat([resized, ops.narrow(table, 0, 3)], 0)
        bias = ops.index_select(whole, ops.view(index, -1))
        bias = ops.view(bias, *index.shape, -1)
        bias = ops.contiguous(ops.permute(bias, 2, 0, 1))
        return ops.unsqueeze(bias, 0)


class BeitBlock(Module):
    """Norm, attention, add; norm, MLP, add: both branches scaled by trained factors, and dropped at times."""

    scope = "residual stream"

    def __init__(self, c: Config, hidden: int, dropped: float, index: Buffer | None) -> None:
        scaled = c.number("layer_scale_init_value") > 0
        self.lambda_1 = Parameter(hidden, group="norms") if scaled else None
        self.lambda_2 = Parameter(hidden, group="norms") if scaled else None
        self.attention = VisionAttention(
            hidden,
            c.integer("num_attention_heads"),
            key_bias=False,
            dropout=c.probability("attention_probs_dropout_prob"),
        )
        self.layernorm_before = LayerNorm(hidden)
        self.layernorm_after = LayerNorm(hidden)
        width = c.integer("intermediate_size")
        self.mlp = PlainMLP(hidden, width, c.text("hidden_act"), names=("fc1", "fc2"), bias=True)
        self.relative_position_bias = None if index is None else RelativePositionBias(c, index)
        self.dropout, self.path_dropout = c.probability("hidden_dropout_prob"), dropped

    def forward(self, hidden: Tensor, mask: Tensor | None) -> Tensor:
        """[b, n, h] to [b, n, h]."""
        if self.relative_position_bias is not None:
            bias = self.relative_position_bias(hidden)
            mask = bias if mask is None else ops.add(bias, mask)
        residual = hidden
        hidden = self.layernorm_before(hidden)
        hidden, _weights = self.attention(hidden, mask=mask)
        hidden = ops.dropout(hidden, self.dropout)
        hidden = _scaled(hidden, self.lambda_1)
        hidden = ops.add(drop_path(hidden, self.path_dropout), residual)
        residual = hidden
        hidden = self.layernorm_after(hidden)
        hidden = self.mlp(hidden)
        hidden = ops.dropout(hidden, self.dropout)
        hidden = _scaled(hidden, self.lambda_2)
        return ops.add(drop_path(hidden, self.path_dropout), residual)


def _scaled(hidden: Tensor, factor: Tensor | None) -> Tensor:
    """The trained factors times the branch; without them a number does it all the same."""
    return ops.mul_scalar(hidden) if factor is None else ops.mul(factor, hidden)


class BeitTower(VisionTower):
    """The tower; a bias that all blocks share is made in front of them."""

    def __init__(self, c: Config, hidden: int) -> None:
        height, width = grid_of(c)
        shared, own = c.flag("use_shared_relative_position_bias"), c.flag("use_relative_position_bias")
        index = Buffer(height * width + 1, height * width + 1, dtype=INT64) if shared or own else None
        depth, rate = c.integer("num_hidden_layers"), c.probability("drop_path_rate")

        def block(position: int) -> Module:
            return BeitBlock(c, hidden, rate * position / max(depth - 1, 1), index if own else None)

        super().__init__(
            BeitEmbeddings(c, hidden),
            Stack(["layer"] * depth, block),
            after=None if c.flag("use_mean_pooling") else LayerNorm(hidden),
            pool=BeitPooler(c, hidden),
        )
        self.relative_position_index = index
        self.shared_position_bias = RelativePositionBias(c, index) if shared and index is not None else None

    def forward(self, pixels: Tensor) -> Seen:
        """Pixels [b, c, height, width] to hidden states."""
        embedded = self.embeddings(pixels)
        bias = None if self.shared_position_bias is None else self.shared_position_bias(embedded)
        hidden = embedded
        for layer in self.layers:
            hidden = layer(hidden, mask=bias)
        out = self.post_layernorm(hidden) if self.post_layernorm is not None else hidden
        return out, self.head(out) if self.head is not None else None, ()


class BeitPooler(Module):
    """LayerNorm of the mean of the patches, or the class token."""

    scope = "head and loss"

    def __init__(self, c: Config, hidden: int) -> None:
        self.layernorm = LayerNorm(hidden) if c.flag("use_mean_pooling") else None

    def forward(self, states: Tensor) -> Tensor:
        """[b, n, h] to [b, h]."""
        if self.layernorm is None:
            return ops.select(states, 1)
        patches = ops.narrow(states, 1, states.shape[1] - 1)
        return self.layernorm(ops.mean(patches, 1, keepdim=False))


def beit(c: Config, architecture: str | None) -> Network:
    """BEiT."""
    hidden = c.integer("hidden_size")
    return image_network(c, architecture, lambda _: BeitTower(c, hidden), None, hidden)


FAMILIES = table(
    Family(
        "beit",
        beit,
        vit_sizes(
            (768, 3072, 12, 12, 224, 16, 3),
            hidden_act="gelu",
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
            use_absolute_position_embeddings=False,
            layer_scale_init_value=0.1,
            drop_path_rate=0.1,
            use_mean_pooling=True,
        ),
        blocks="encoder",
        attention="eager, sdpa",
    )
)
