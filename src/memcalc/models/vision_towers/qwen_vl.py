"""Eyes that read images of any size, their patches in one row: Qwen-VL's three generations."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from math import isqrt

from memcalc import ops
from memcalc.autograd.tape import OVERHEAD, Tape
from memcalc.autograd.tensor import Tensor, contiguous_stride
from memcalc.common.sizes import Shape
from memcalc.config.reader import Config
from memcalc.errors import ConfigError
from memcalc.models.common.vision_encoder import DynamicResolutionEncoder, ImageFeatures
from memcalc.nn.layers.equal_pieces import Repeat
from memcalc.nn.layers.linear import Embedding
from memcalc.nn.layers.packed_vision import (
    AxialRotary,
    PackedAttention,
    PackedBlock,
    PackedPatchEmbedding,
    PatchMerger,
    window_lengths,
)
from memcalc.nn.model import IMAGES, Batch
from memcalc.nn.module import Module
from memcalc.nn.run_context import run_context
from memcalc.nn.stack import Stack
from memcalc.tables.dtypes import FP32, INT64

MERGER_NAMES = ("norm", "linear_fc1", "linear_fc2")


@dataclass(frozen=True)
class VisionEncoderParts:
    """What a tower of width `width` is made of: its norms and MLPs, and whether the patch embedding has a bias."""

    width: int
    norm: Callable[[int], Module]
    mlp: Callable[[], Module]
    bias: bool = False
    attention: Callable[[int, int], PackedAttention] = PackedAttention


class Qwen2VLVisionEncoder(DynamicResolutionEncoder):
    """Patches of all images in one row through blocks, and merged by squares into tokens (Qwen2-VL)."""

    def __init__(self, v: Config, parts: VisionEncoderParts, merger: Module) -> None:
        patch, self.side = v.integer("patch_size"), v.integer("spatial_merge_size")
        super().__init__(v, patch * self.side)
        self.grid: tuple[int, int] | None = None
        width, heads = parts.width, v.integer("num_heads")
        self.frames_per_image = frames = v.integer("temporal_patch_size")
        self.patch_embed = PackedPatchEmbedding(v.integer("in_channels"), width, frames, patch, bias=parts.bias)
        self.pos_embed: Embedding | None = None
        self.rotary_pos_emb = AxialRotary(width // heads)
        self.blocks = Stack(
            self.kinds(v.integer("depth")),
            lambda _: PackedBlock(parts.norm(width), parts.norm(width), parts.attention(width, heads), parts.mlp()),
            name="vision block",
        )
        self.merger = merger

    def kinds(self, depth: int) -> Sequence[Hashable]:
        """The kinds of the blocks."""
        return ["block"] * depth

    def encode_images(self, batch: Batch) -> ImageFeatures:
        """What it makes of the images of a batch."""
        tape, images = batch.ids.tape, batch.ids.shape[0] * batch.images
        height, width = self.sides(batch.image_size)
        self.grid = (height // self.token, width // self.token)
        patches = images * self.tokens(batch.image_size) * self.side**2
        pixels = tape.external_tensor(
            (patches, self.patch_embed.pixels), run_context(tape).weights_dtype, OVERHEAD, IMAGES
        )
        return self(pixels, images)

    def forward(self, pixels: Tensor, images: int) -> ImageFeatures:
        """Rows of pixels [n, ...] of so many images to features, one tensor for each image."""
        places = pixels.tape.empty((pixels.shape[0], 2), INT64)
        hidden = self.patch_embed(pixels)
        rotation = self.rotary_pos_emb(hidden, places)
        lengths = [Repeat([pixels.shape[0] // images], images)]
        for block in self.blocks:
            hidden = block(hidden, lengths=lengths, rotation=rotation)
        merged = self.merger(hidden)
        return ImageFeatures(self.split_by_image(merged, images), (hidden,))

    def split_by_image(self, merged: Tensor, images: int) -> list[Tensor]:
        """Features image by image, views."""
        return ops.split(merged, [merged.shape[0] // images] * images, 0)


class Qwen25VLVisionEncoder(Qwen2VLVisionEncoder):
    """Most blocks attend within windows, into whose order patches are brought before the first (Qwen2.5-VL)."""

    def __init__(self, v: Config, parts: VisionEncoderParts, merger: PatchMerger, full: Sequence[int]) -> None:
        self.full = set(full)
        self.window = v.integer("window_size") // v.integer("spatial_merge_size") // v.integer("patch_size")
        if not self.window:
            raise ConfigError(f"{v.where} has a 'window_size' that holds no merged patch; correct it, or 'patch_size'.")
        super().__init__(v, parts, merger)

    def kinds(self, depth: int) -> Sequence[Hashable]:
        """Blocks that see the whole image, and those that see windows."""
        return [block in self.full for block in range(depth)]

    def forward(self, pixels: Tensor, images: int) -> ImageFeatures:
        """Rows of pixels [n, ...] of so many images to features, one tensor for each image."""
        square = self.side**2
        count = pixels.shape[0] // images
        places = pixels.tape.empty((pixels.shape[0], 2), INT64)
        rows, columns = self.grid or (isqrt(count // square), isqrt(count // square))
        windows = [Repeat(window_lengths(rows, columns, self.window, square), images)]
        order = _on_host(pixels.tape, (pixels.shape[0] // square,))
        hidden = self.patch_embed(pixels)
        hidden = self._ordered(hidden, order)
        rotation = self.rotary_pos_emb(hidden, places)
        rotation = self._ordered(rotation[0], order), self._ordered(rotation[1], order)
        for block in self.blocks:
            lengths = [Repeat([count], images)] if block.traced.position in self.full else windows
            hidden = block(hidden, lengths=lengths, rotation=rotation)
        merged = self.merger(hidden)
        merged = ops.index_select(merged, order)
        return ImageFeatures(self.split_by_image(merged, images), (hidden,))

    def _ordered(self, x: Tensor, order: Tensor) -> Tensor:
        squares = ops.reshape(x, order.shape[0], self.side**2, -1)
        return ops.reshape(ops.index_select(squares, order), x.shape[0], -1)


class Qwen3VLVisionEncoder(Qwen2VLVisionEncoder):
    """Learned positions, interpolated, and features from the middle of the tower for the decoder (Qwen3-VL)."""

    def __init__(
        self, v: Config, parts: VisionEncoderParts, merger: Callable[[bool], PatchMerger], depths: Sequence[int]
    ) -> None:
        self.depths = tuple(depths)
        super().__init__(v, parts, merger(False))
        self.limits_whole_videos = True
        self.patch_embed.is_input_embedding = False  # Transformers does not know which module it is
        self.pos_embed = Embedding(v.integer("num_position_embeddings"), parts.width)
        self.deepstack_merger_list = [merger(True) for _ in self.depths]

    def kinds(self, depth: int) -> Sequence[Hashable]:
        """A block whose states are merged is one of its kind, and so is the next: the work between counts to it."""
        return [block if {block, block - 1} & set(self.depths) else "block" for block in range(depth)]

    def forward(self, pixels: Tensor, images: int) -> ImageFeatures:
        """Rows of pixels [n, ...] to features, one tensor for each image, and those of the middle, among what is kept.

        A position is the weighted sum of four learned ones.
        """
        tape, count = pixels.tape, pixels.shape[0]
        indices, weights = tape.empty((count, 4), INT64), tape.empty((count, 4), FP32)
        places = tape.empty((count, 2), INT64)
        hidden = self.patch_embed(pixels)
        assert self.pos_embed is not None
        learned = ops.sum(ops.mul(self.pos_embed(indices), ops.unsqueeze(weights, -1)), 1)
        hidden = ops.add(hidden, ops.to(learned, hidden.dtype))
        rotation = self.rotary_pos_emb(hidden, places)
        lengths = [Repeat([count // images], images)]
        middle: list[Tensor] = []
        for block in self.blocks:
            hidden = block(hidden, lengths=lengths, rotation=rotation)
            if block.traced.position in self.depths:
                merger = self.deepstack_merger_list[self.depths.index(block.traced.position)]
                middle.append(merger(hidden))
        merged = self.merger(hidden)
        features = self.split_by_image(merged, images)
        return ImageFeatures(features, (hidden, [self.split_by_image(states, images) for states in middle]))


def _on_host(tape: Tape, shape: Shape) -> Tensor:
    """Indices in the host's memory, which a kernel copies to the GPU while it runs."""
    return Tensor(shape, contiguous_stride(shape), INT64, tape.allocate(0))
