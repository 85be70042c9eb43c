"""Decoders of Gemma's line with SigLIP's tower in front: Gemma 3, PaliGemma."""

from __future__ import annotations

from memcalc import ops
from memcalc.autograd.tensor import Tensor
from memcalc.common.image_sides import ImageSize
from memcalc.config.reader import Config
from memcalc.errors import ConfigError
from memcalc.models.common.vision_encoder import ImageFeatures, VisionEncoder, check_size
from memcalc.models.common.vision_language import VisionLanguage, language_model
from memcalc.models.family import Family, table, vit_sizes
from memcalc.models.vision_towers.registry import tower_of, vision_config
from memcalc.nn.layers.linear import Linear
from memcalc.nn.layers.norms import GemmaRMSNorm
from memcalc.nn.layers.vision_transformer import grid_of
from memcalc.nn.model import Network
from memcalc.nn.module import Module, Parameter
from memcalc.nn.towers import as_tower


class PoolingProjector(Module):
    """Gemma 3's: patches [rows, columns] pooled by `kernel`, normalised, and multiplied by a matrix."""

    def __init__(self, hidden: int, width: int, rows: int, kernel: int) -> None:
        self.mm_input_projection_weight = Parameter(hidden, width)
        self.mm_soft_emb_norm = GemmaRMSNorm(hidden)
        self.rows, self.kernel = rows, kernel

    def forward(self, states: Tensor) -> Tensor:
        """Patches [images, n, h] to tokens [images, tokens, width]."""
        images, _patches, hidden = states.shape
        grid = ops.transpose(states, 1, 2)
        grid = ops.reshape(grid, images, hidden, self.rows, -1)
        grid = ops.contiguous(grid)
        pooled = ops.avg_pool2d(grid, self.kernel)
        pooled = ops.transpose(ops.view(pooled, *pooled.shape[:2], -1), 1, 2)
        normed = self.mm_soft_emb_norm(pooled)
        projected = ops.matmul(normed, self.mm_input_projection_weight)
        return ops.to(projected, states.dtype)


class Gemma3VisionEncoder(VisionEncoder):
    """Gemma 3's: an image becomes a square of tokens."""

    def __init__(self, c: Config, v: Config, width: int) -> None:
        self.config = v
        self.side = int(c.integer("mm_tokens_per_image") ** 0.5)
        rows = grid_of(v)[0]
        kernel = rows // self.side
        if not kernel:
            raise ConfigError(
                f"{c.where} has 'mm_tokens_per_image' {self.side**2}, more than an image has patches; correct one."
            )
        self.vision_tower = tower_of(v)
        self.multi_modal_projector = PoolingProjector(v.integer("hidden_size"), width, rows, kernel)

    def tokens(self, size: ImageSize) -> int:
        """The square of the side."""
        check_size(self.config, size)
        return self.side**2

    def forward(self, pixels: Tensor) -> ImageFeatures:
        """Pixels [images, c, height, width] to features [images, tokens, width]."""
        states, _pooled, _kept = self.vision_tower(pixels)
        return ImageFeatures(self.multi_modal_projector(states), (states,))


class LinearProjector(Module):
    """PaliGemma's: one linear layer."""

    def __init__(self, hidden: int, width: int) -> None:
        self.linear = Linear(hidden, width, bias=True)

    def forward(self, states: Tensor) -> Tensor:
        """[..., h] to [..., width]."""
        return self.linear(states)


class PaliGemmaVisionEncoder(VisionEncoder):
    """PaliGemma's: one linear layer."""

    def __init__(self, v: Config, width: int) -> None:
        self.config = v
        height, columns = grid_of(v)
        self.count = height * columns
        self.vision_tower = tower_of(v)
        self.multi_modal_projector = LinearProjector(v.integer("hidden_size"), width)

    def forward(self, pixels: Tensor) -> ImageFeatures:
        """Pixels [images, c, height, width] to features [images, tokens, width]."""
        states, _pooled, _kept = self.vision_tower(pixels)
        return ImageFeatures(self.multi_modal_projector(states), (states,))


def gemma3(c: Config, architecture: str | None) -> Network:
    """Gemma 3 with SigLIP."""
    text = language_model(c, "gemma3_text", tied=c.flag("tie_word_embeddings"))
    vision_encoder = Gemma3VisionEncoder(c, vision_config(c, "siglip_vision_model"), text.model.lm_head.weight.shape[1])
    as_tower(vision_encoder)
    return VisionLanguage(vision_encoder, text, bidirectional_image_attention=True, own_cache=True)


def paligemma(c: Config, architecture: str | None) -> Network:
    """PaliGemma 1 (Gemma) and 2 (Gemma 2)."""
    v = vision_config(c, "siglip_vision_model", _PALI_TOWER)
    text = language_model(c, "gemma", tied=c.flag("tie_word_embeddings"), transforms_logits=True)
    vision_encoder = PaliGemmaVisionEncoder(v, v.integer("projection_dim", c.integer("projection_dim")))
    as_tower(vision_encoder)
    return VisionLanguage(vision_encoder, text, bidirectional_image_attention=True, own_cache=True)


_PALI_TOWER: dict[str, object] = vit_sizes((1152, 4096, 27, 16, 224, 14, 0), vision_use_head=False)

FAMILIES = table(
    Family(
        "gemma3",
        gemma3,
        {"mm_tokens_per_image": 256, "tie_word_embeddings": True},
        attention="eager, sdpa",
        kinds="vision tower, decoder",
    ),
    Family(
        "paligemma",
        paligemma,
        {"projection_dim": 2048, "tie_word_embeddings": True},
        attention="eager, sdpa",
        kinds="vision tower, decoder",
    ),
)
