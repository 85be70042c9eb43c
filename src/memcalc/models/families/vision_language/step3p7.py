"""Step 3.7: a rotated vision transformer, two strided convolutions over its patches, and Step 3.5's decoder."""

from __future__ import annotations

from memcalc import ops
from memcalc.autograd.tensor import Tensor
from memcalc.config.reader import Config
from memcalc.models.common.vision_encoder import ImageFeatures, VisionEncoder
from memcalc.models.common.vision_language import VisionLanguage, language_model
from memcalc.models.families.moe.step3p7 import STEP_TEXT
from memcalc.models.family import Family, table, vit_sizes
from memcalc.nn.layers.attention_backends import attend
from memcalc.nn.layers.linear import Linear
from memcalc.nn.layers.mlp import PlainMLP
from memcalc.nn.layers.norms import LayerNorm
from memcalc.nn.layers.packed_vision import AxialRotary, rotary_in_fp32
from memcalc.nn.layers.rotary import Rotation
from memcalc.nn.layers.vision_transformer import PatchEmbedding, grid_of
from memcalc.nn.model import Network
from memcalc.nn.module import Buffer, Module, Parameter
from memcalc.nn.stack import Stack
from memcalc.nn.towers import as_tower
from memcalc.tables.dtypes import INT64


class StepVisionAttention(Module):
    """Attention whose queries and keys are rotated in fp32."""

    def __init__(self, v: Config) -> None:
        hidden, heads = v.integer("hidden_size"), v.divides("num_attention_heads", "hidden_size")
        self.head_dim, self.dropout = hidden // heads, v.probability("attention_dropout")
        for name in ("k_proj", "v_proj", "q_proj", "out_proj"):
            setattr(self, name, Linear(hidden, hidden, bias=True))

    def forward(self, hidden: Tensor, rotation: Rotation) -> tuple[Tensor, Tensor | None]:
        """[b, n, h] to [b, n, h], and the probabilities where they exist."""
        parts, shape = vars(self), (*hidden.shape[:-1], -1, self.head_dim)
        query = ops.view(parts["q_proj"](hidden), *shape)
        key = ops.view(parts["k_proj"](hidden), *shape)
        value = ops.transpose(ops.view(parts["v_proj"](hidden), *shape), 1, 2)
        query, key = rotary_in_fp32(query, key, *rotation)
        query, key = ops.transpose(query, 1, 2), ops.transpose(key, 1, 2)
        out, weights = attend(query, key, value, None, 1, self.dropout)
        out = ops.contiguous(ops.reshape(out, *hidden.shape[:-1], -1))
        return parts["out_proj"](out), weights


class StepVisionBlock(Module):
    """Norm, attention, add; norm, MLP, add; a trained factor multiplies either branch."""

    scope = "residual stream"

    def __init__(self, v: Config) -> None:
        hidden = v.integer("hidden_size")
        width = int(hidden * v.factor("mlp_ratio"))
        self.self_attn = StepVisionAttention(v)
        self.mlp = PlainMLP(hidden, width, v.text("hidden_act"), names=("fc1", "fc2"), bias=True)
        self.layernorm_before, self.layernorm_after = LayerNorm(hidden), LayerNorm(hidden)
        self.lambda_1, self.lambda_2 = Parameter(hidden), Parameter(hidden)

    def forward(self, hidden: Tensor, rotation: Rotation) -> Tensor:
        """[b, n, h] to [b, n, h]."""
        residual = hidden
        hidden = self.layernorm_before(hidden)
        hidden, _weights = self.self_attn(hidden, rotation=rotation)
        hidden = ops.mul(self.lambda_1, hidden)
        hidden = ops.add(hidden, residual)
        residual = hidden
        hidden = self.layernorm_after(hidden)
        hidden = self.mlp(hidden)
        hidden = ops.mul(self.lambda_2, hidden)
        return ops.add(hidden, residual)


class Downsampler(Module):
    """A convolution that halves the grid and doubles the channels."""

    def __init__(self, channels: int) -> None:
        self.weight = Parameter(2 * channels, channels, 3, 3)
        self.bias = Parameter(2 * channels)

    def forward(self, grid: Tensor) -> Tensor:
        """[b, h, rows, columns] to [b, 2 h, rows / 2, columns / 2]."""
        return ops.convolution(grid, self.weight, self.bias, stride=2, padding=1)


class StepVisionEncoder(VisionEncoder):
    """The tower and its projection to the decoder's width. Images have the config's size; none is read in tiles."""

    def __init__(self, c: Config, v: Config, width: int) -> None:
        hidden, self.config = v.integer("hidden_size"), v
        self.rows, self.columns = grid_of(v)
        self.count = _quarter(self.rows) * _quarter(self.columns)
        self.patch_embedding = PatchEmbedding(v.integer("num_channels"), hidden, v.integer("patch_size"), bias=False)
        self.patch_embedding.is_input_embedding = False
        self.position_embedding = Parameter(self.rows * self.columns, hidden)
        self.position_ids = Buffer(1, self.rows * self.columns, dtype=INT64)
        self.pre_layernorm = LayerNorm(hidden)
        self.rotary_emb = AxialRotary(hidden // v.divides("num_attention_heads", "hidden_size"), flipped=True)
        kinds = ["block"] * v.integer("num_hidden_layers")
        self.layers = Stack(kinds, lambda _: StepVisionBlock(v), name="vision block")
        self.downsampler1, self.downsampler2 = Downsampler(hidden), Downsampler(2 * hidden)
        self.multi_modal_projector = Linear(4 * hidden, width, bias=c.flag("projector_bias"))

    def forward(self, pixels: Tensor) -> ImageFeatures:
        """Pixels [n, c, height, width] to features, one tensor for each image."""
        states = self._states(pixels)
        features = self.multi_modal_projector(states)
        return ImageFeatures([ops.select(features, 0) for _ in range(pixels.shape[0])], (states,))

    def _states(self, pixels: Tensor) -> Tensor:
        hidden = self.patch_embedding(pixels)
        hidden = ops.add(hidden, ops.unsqueeze(self.position_embedding, 0))
        hidden = self.pre_layernorm(hidden)
        places = pixels.tape.empty((hidden.shape[1], 2), INT64)
        rotation = self.rotary_emb(hidden, places)
        for layer in self.layers:
            hidden = layer(hidden, rotation=rotation)
        grid = ops.view(ops.permute(hidden, 0, 2, 1), hidden.shape[0], hidden.shape[2], self.rows, self.columns)
        del hidden
        grid = self.downsampler1(grid)
        grid = self.downsampler2(grid)
        return ops.permute(ops.view(grid, *grid.shape[:2], -1), 0, 2, 1)


def _quarter(side: int) -> int:
    return -(-side // 4)


def step3p7(c: Config, architecture: str | None) -> Network:
    """Step 3.7."""
    v = c.nested("vision_config", _TOWER) if c.section("vision_config") else Config({}, _TOWER, {}, c.where)
    text = language_model(c, STEP_TEXT, tied=c.flag("tie_word_embeddings"))
    encoder = StepVisionEncoder(c, v, text.model.lm_head.weight.shape[1])
    return VisionLanguage(as_tower(encoder), text, own_cache=True)


_TOWER: dict[str, object] = vit_sizes(
    (1536, 0, 47, 16, 728, 14, 3), hidden_act="quick_gelu", attention_dropout=0.0, mlp_ratio=8960 / 1536
)
FAMILIES = table(
    Family(
        "step3p7",
        step3p7,
        {"tie_word_embeddings": False},
        kinds="vision tower, decoder, experts",
        attention="eager, sdpa",
        verified="measured rows of dense layers, exact counts",
    )
)
