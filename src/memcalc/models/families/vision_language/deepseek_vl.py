"""DeepSeek-VL: SigLIP's tower, an MLP and Llama."""

from __future__ import annotations

from memcalc import ops
from memcalc.autograd.tensor import Tensor
from memcalc.config.reader import Config
from memcalc.models.common.vision_encoder import ImageFeatures, VisionEncoder
from memcalc.models.common.vision_language import VisionLanguage, language_model
from memcalc.models.family import Family, table
from memcalc.models.vision_towers.registry import tower_of, vision_config
from memcalc.nn.layers.linear import Linear
from memcalc.nn.layers.vision_transformer import grid_of
from memcalc.nn.model import Network
from memcalc.nn.module import Module
from memcalc.nn.towers import as_tower


class Aligner(Module):
    """Two matrices, GELU between them."""

    def __init__(self, hidden: int, width: int) -> None:
        self.linear1 = Linear(hidden, width, bias=True)
        self.linear2 = Linear(width, width, bias=True)

    def forward(self, x: Tensor) -> Tensor:
        """[..., h] to [..., width]."""
        x = self.linear1(x)
        x = ops.gelu(x)
        x = self.linear2(x)
        return x  # noqa: RET504


class DeepseekVLVisionEncoder(VisionEncoder):
    """Every patch becomes a token."""

    def __init__(self, v: Config, width: int) -> None:
        self.config = v
        rows, columns = grid_of(v)
        self.count = rows * columns
        self.vision_model = tower_of(v, ())
        self.aligner = Aligner(v.integer("hidden_size"), width)

    def forward(self, pixels: Tensor) -> ImageFeatures:
        """Pixels [n, c, height, width] to features [n · patches, width]."""
        states, pooled, _ = self.vision_model(pixels)
        features = self.aligner(states)
        del pooled
        return ImageFeatures(ops.reshape(features, -1, features.shape[-1]), (states, features))


def deepseek_vl(c: Config, architecture: str | None) -> Network:
    """DeepSeek-VL with one tower."""
    v = vision_config(c, "siglip_vision_model")
    text = language_model(c, "llama", tied=c.flag("tie_word_embeddings"))
    encoder = DeepseekVLVisionEncoder(v, text.model.lm_head.weight.shape[1])
    return VisionLanguage(as_tower(encoder), text, own_cache=True)


FAMILIES = table(Family("deepseek_vl", deepseek_vl, {"tie_word_embeddings": True}, kinds="vision tower, decoder"))
