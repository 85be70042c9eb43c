"""GLM-4V's tower: Qwen-VL's with interpolated positions, and a convolution and a gated MLP that merge patches."""

from __future__ import annotations

from math import isqrt

from memcalc import ops
from memcalc.autograd.tape import OVERHEAD
from memcalc.autograd.tensor import Tensor
from memcalc.config.reader import Config
from memcalc.models.common.vision_encoder import ImageFeatures
from memcalc.models.vision_towers.qwen_vl import Qwen2VLVisionEncoder, VisionEncoderParts
from memcalc.nn.layers.equal_pieces import Repeat
from memcalc.nn.layers.linear import Embedding, Linear
from memcalc.nn.layers.mlp import GatedMLP, activation
from memcalc.nn.layers.norms import LayerNorm, RMSNorm
from memcalc.nn.layers.packed_vision import PackedAttention
from memcalc.nn.layers.vision_transformer import PatchEmbedding
from memcalc.nn.model import IMAGES
from memcalc.nn.module import Module
from memcalc.tables.dtypes import BOOL, FP32, INT32, INT64


class GatedMerger(Module):
    """A projection, a LayerNorm, GELU and a gated MLP (`Glm4vVisionPatchMerger`)."""

    def __init__(self, width: int, inner: int, act: str) -> None:
        self.proj = Linear(width, width)
        self.post_projection_norm = LayerNorm(width)
        self.gate_proj = Linear(width, inner)
        self.up_proj = Linear(width, inner)
        self.down_proj = Linear(inner, width)
        self.act = activation(act)

    def forward(self, hidden: Tensor) -> Tensor:
        """[n, width] to [n, width]."""
        hidden = self.proj(hidden)
        hidden = ops.gelu(self.post_projection_norm(hidden))
        return self.down_proj(ops.mul(self.act(self.gate_proj(hidden)), self.up_proj(hidden)))


class InterpolatedPositions(Module):
    """Learned positions of a square image, interpolated at the place of each patch (`Glm4vVisionEmbeddings`)."""

    scope = "embedding"

    def __init__(self, v: Config, width: int) -> None:
        side = v.sides("image_size")[0] // v.integer("patch_size")
        self.position_embedding = Embedding(side**2, width)

    def forward(self, hidden: Tensor, lengths: Tensor, shapes: Tensor) -> Tensor:
        """Patches [n, h] of images of these lengths [images] and shapes [images, 3] to the same with positions."""
        tape, table, count = hidden.tape, self.position_embedding.weight, hidden.shape[0]
        side, width = isqrt(table.shape[0]), table.shape[1]
        grid = ops.unsqueeze(ops.permute(ops.view(table, side, side, width), 2, 0, 1), 0)
        grid = ops.to(grid, FP32)
        order = tape.empty((count,), INT64)
        ends = tape.empty(lengths.shape, INT64)
        beyond = tape.empty((lengths.shape[0], count), BOOL)
        image_of = tape.empty((count,), INT64)
        del ends, beyond
        sizes = [ops.to(ops.index(ops.select(shapes, 1), image_of), FP32) for _ in range(2)]
        places = [_scaled(image_of, size) for size in sizes]
        where = ops.stack(places, -1)
        values = ops.grid_sample(grid, ops.unsqueeze(ops.unsqueeze(where, 0), 2))
        values = ops.permute(ops.squeeze(ops.squeeze(values, 0), -1), 1, 0)
        adapted = ops.to(values, table.dtype)
        del order
        return ops.add(hidden, adapted)


def _scaled(place: Tensor, size: Tensor) -> Tensor:
    """(place + 0.5) / size · 2 - 1, in fp32."""
    ratio = ops.div(ops.empty_like(place, FP32), size)
    return ops.add_scalar(ops.mul_scalar(ratio))


class Glm4vVisionEncoder(Qwen2VLVisionEncoder):
    """The tower, whose patches a convolution merges by squares. GLM-OCR's has no learned `positions`."""

    def __init__(self, v: Config, parts: VisionEncoderParts, inner: int, *, positions: bool = True) -> None:
        out = v.integer("out_hidden_size")
        super().__init__(v, parts, GatedMerger(out, inner, v.text("hidden_act")))
        self.limits_whole_videos = True
        self.patch_embed.is_input_embedding = False
        self.embeddings = InterpolatedPositions(v, parts.width) if positions else None
        self.post_conv_layernorm = RMSNorm(parts.width) if positions else None
        self.downsample = PatchEmbedding(parts.width, out, self.side, flat=False)
        self.downsample.is_input_embedding = False
        self.post_layernorm = RMSNorm(parts.width)

    def forward(self, pixels: Tensor, images: int) -> ImageFeatures:
        """Rows of pixels [n, ...] of so many images to features, one tensor for each image."""
        tape, count = pixels.tape, pixels.shape[0]
        shapes = tape.external_tensor((images, 3), INT64, OVERHEAD, IMAGES)
        places = tape.empty((count, 2), INT64)
        edges = tape.empty((images + 1,), INT32)
        hidden = self.patch_embed(pixels)
        if self.post_conv_layernorm is not None:
            hidden = self.post_conv_layernorm(hidden)
        rotation = self.rotary_pos_emb(hidden, places)
        if self.embeddings is not None:
            stretches = tape.empty((images,), INT32)
            hidden = self.embeddings(hidden, stretches, shapes)
        lengths = [Repeat([count // images], images)]
        for block in self.blocks:
            hidden = block(hidden, lengths=lengths, rotation=rotation, cu_seqlens=edges)
        hidden = self.post_layernorm(hidden)
        hidden = ops.permute(ops.view(hidden, -1, self.side, self.side, hidden.shape[-1]), 0, 3, 1, 2)
        hidden = self.downsample(hidden)
        hidden = ops.view(hidden, -1, hidden.shape[1])
        merged = self.merger(hidden)
        return ImageFeatures(self.split_by_image(merged, images), (hidden,))


def glm4v_vision(v: Config) -> Glm4vVisionEncoder:
    """The tower of a vision config."""
    width, inner = v.integer("hidden_size"), v.integer("out_hidden_size")
    bias = v.flag("attention_bias")
    parts = VisionEncoderParts(
        width,
        RMSNorm,
        lambda: GatedMLP(width, inner, v.text("hidden_act")),
        bias=True,
        attention=lambda hidden, heads: PackedAttention(hidden, heads, bias=bias, out_bias=False),
    )
    return Glm4vVisionEncoder(v, parts, v.integer("intermediate_size"))


def glm_ocr_vision(v: Config) -> Glm4vVisionEncoder:
    """GLM-OCR's: norms of query and key, an MLP of the config's width, and a merger as wide as colours are many."""
    width, bias = v.integer("hidden_size"), v.flag("attention_bias")
    parts = VisionEncoderParts(
        width,
        RMSNorm,
        lambda: GatedMLP(width, v.integer("intermediate_size"), v.text("hidden_act"), bias=bias),
        bias=True,
        attention=lambda hidden, heads: PackedAttention(hidden, heads, bias=bias, out_bias=bias, norm=RMSNorm),
    )
    return Glm4vVisionEncoder(v, parts, v.integer("out_hidden_size") * v.integer("in_channels"), positions=False)


GLM4V_VISION: dict[str, object] = {
    "depth": 24,
    "hidden_size": 1536,
    "hidden_act": "silu",
    "num_heads": 12,
    "in_channels": 3,
    "image_size": 336,
    "patch_size": 14,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "out_hidden_size": 4096,
    "intermediate_size": 13696,
}
