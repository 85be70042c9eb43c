"""DINOv3: a vision transformer whose patches are rotated by their position in the image, and have no positions else."""

from __future__ import annotations

from memcalc import ops
from memcalc.autograd.tensor import Tensor
from memcalc.config.reader import Config
from memcalc.models.common.heads import unknown_head
from memcalc.models.common.image_models import ImageEmbedder
from memcalc.models.family import Family, table, vit_sizes
from memcalc.nn.layers.mlp import GatedMLP, PlainMLP
from memcalc.nn.layers.norms import LayerNorm
from memcalc.nn.layers.rotary import Rotation, rotate_half
from memcalc.nn.layers.vision_transformer import (
    LayerScale,
    PatchEmbedding,
    VisionAttention,
    VisionBlock,
    VisionTower,
    grid_of,
)
from memcalc.nn.model import Network
from memcalc.nn.module import Buffer, Module, Parameter
from memcalc.nn.run_context import run_context
from memcalc.nn.stack import Stack
from memcalc.tables.dtypes import FP32


class PrefixedPatches(Module):
    """Patches after a class token and register tokens."""

    scope = "embedding"

    def __init__(self, c: Config, hidden: int) -> None:
        self.cls_token = Parameter(1, 1, hidden, group="embedding")
        self.mask_token = Parameter(1, 1, hidden, group="embedding")
        registers = c.integer("num_register_tokens", minimum=0)
        self.register_tokens = Parameter(1, registers, hidden, group="embedding")
        self.patch_embeddings = PatchEmbedding(c.integer("num_channels"), hidden, c.integer("patch_size"))

    def forward(self, pixels: Tensor) -> Tensor:
        """Pixels [b, c, height, width] to [b, n, h]."""
        patches = self.patch_embeddings(pixels)
        tokens = [ops.expand(token, pixels.shape[0], -1, -1) for token in (self.cls_token, self.register_tokens)]
        return ops.cat([*tokens, patches], 1)


class PatchRotaryEmbedding(Module):
    """cos and sin [n, d] of the places of the patches, in the dtype of the pixels.

    The centres of the patches are made once and kept. Training moves them by random numbers that the config asks for.
    """

    scope = "rotary embedding"

    def __init__(self, c: Config, head_dim: int) -> None:
        height, width = grid_of(c)
        self.inv_freq = Buffer(head_dim // 4)
        self.centres = Buffer(height * width, 2)
        self.sizes = tuple(
            shape
            for key, shape in (("pos_embed_shift", (1, 2)), ("pos_embed_jitter", (1, 2)), ("pos_embed_rescale", (1,)))
            if c.has(key)
        )

    def forward(self, pixels: Tensor) -> Rotation:
        """The pair for every patch."""
        centres: Tensor = self.centres
        if run_context(pixels).training:
            for size in self.sizes:
                centres = ops.mul(centres, pixels.tape.empty(size, FP32))
        angles = ops.mul(ops.mul_scalar(ops.unsqueeze(centres, -1)), self.inv_freq)
        angles = ops.repeat(ops.view(angles, centres.shape[0], -1), 1, 2)
        cos = ops.cos(angles)
        sin = ops.sin(angles)
        return ops.to(cos, pixels.dtype), ops.to(sin, pixels.dtype)


def rotate_patches(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Query and key [b, heads, n, d] with all but the tokens in front of the patches rotated."""
    sizes = (query.shape[2] - cos.shape[0], cos.shape[0])
    query_front, query_patches = ops.split(query, sizes, 2)
    key_front, key_patches = ops.split(key, sizes, 2)
    query_patches = ops.add(ops.mul(query_patches, cos), ops.mul(rotate_half(query_patches), sin))
    key_patches = ops.add(ops.mul(key_patches, cos), ops.mul(rotate_half(key_patches), sin))
    query = ops.cat([query_front, query_patches], 2)
    key = ops.cat([key_front, key_patches], 2)
    return query, key


def dinov3(c: Config, architecture: str | None) -> Network:
    """DINOv3's vision transformer, which comes without a head."""
    name, hidden, width = architecture or "DINOv3ViTModel", c.integer("hidden_size"), c.integer("intermediate_size")
    if not name.endswith("Model"):
        raise unknown_head(c, name, ("DINOv3ViTModel",))
    act, bias = c.text("hidden_act"), c.flag("mlp_bias")

    def block(_: int) -> Module:
        attention = VisionAttention(
            hidden,
            c.integer("num_attention_heads"),
            bias=c.flag("query_bias"),
            key_bias=c.flag("key_bias"),
            value_bias=c.flag("value_bias"),
            out_bias=c.flag("proj_bias"),
            dropout=c.probability("attention_dropout"),
            together=True,
            own_dtype=True,
            rotate=rotate_patches,
        )
        gated = c.flag("use_gated_mlp")
        parts = {
            "norm1": LayerNorm(hidden),
            "attention": attention,
            "layer_scale1": LayerScale(hidden),
            "norm2": LayerNorm(hidden),
            "mlp": GatedMLP(hidden, width, act, bias=bias) if gated else PlainMLP(hidden, width, act, bias=bias),
            "layer_scale2": LayerScale(hidden),
        }
        return VisionBlock(
            parts,
            ("norm1", "attention", "norm2", "mlp"),
            scales=("layer_scale1", "layer_scale2"),
            path_dropout=c.probability("drop_path_rate"),
        )

    return ImageEmbedder(
        c,
        VisionTower(
            PrefixedPatches(c, hidden),
            Stack(["layer"] * c.integer("num_hidden_layers"), block),
            after=LayerNorm(hidden),
            rotary=PatchRotaryEmbedding(c, hidden // c.integer("num_attention_heads")),
        ),
    )


FAMILIES = table(
    Family(
        "dinov3_vit",
        dinov3,
        vit_sizes(
            (384, 1536, 12, 6, 224, 16, 3),
            hidden_act="gelu",
            attention_dropout=0.0,
            query_bias=True,
            key_bias=False,
            value_bias=True,
            proj_bias=True,
            mlp_bias=True,
            drop_path_rate=0.0,
            num_register_tokens=0,
            pos_embed_rescale=2.0,
        ),
        blocks="encoder",
    )
)
