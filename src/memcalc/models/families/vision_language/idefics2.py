"""Idefics 2: SigLIP's tower, a gated MLP, latents that look at what it made of an image (Perceiver), and a decoder."""

from __future__ import annotations

from memcalc import ops
from memcalc.autograd.tensor import Tensor
from memcalc.config.reader import Config
from memcalc.models.common.vision_language import VisionLanguage, language_model
from memcalc.models.families.vision_language.idefics3 import MaskedImages, PatchesWithPositions
from memcalc.models.family import Family, table, vit_sizes
from memcalc.models.vision_towers.clip_siglip import tower_blocks
from memcalc.nn.layers.attention_backends import attend, split_heads
from memcalc.nn.layers.linear import Linear
from memcalc.nn.layers.masks import OWN_ONES_NOTE, bidirectional_mask
from memcalc.nn.layers.mlp import GatedMLP
from memcalc.nn.layers.norms import LayerNorm, RMSNorm
from memcalc.nn.layers.vision_transformer import grid_of
from memcalc.nn.model import Batch, Network
from memcalc.nn.module import Module, Parameter
from memcalc.nn.towers import as_tower
from memcalc.tables.dtypes import BOOL


class PerceiverAttention(Module):
    """Latents attend to an image's states and to each other, with grouped heads."""

    def __init__(self, p: Config, hidden: int) -> None:
        heads, kv_heads = p.integer("resampler_n_heads"), p.divides("num_key_value_heads", "resampler_n_heads")
        self.head_dim, self.repeats = p.integer("resampler_head_dim"), heads // kv_heads
        self.dropout = p.probability("attention_dropout")
        self.q_proj = Linear(hidden, heads * self.head_dim)
        self.k_proj = Linear(hidden, kv_heads * self.head_dim)
        self.v_proj = Linear(hidden, kv_heads * self.head_dim)
        self.o_proj = Linear(heads * self.head_dim, hidden)

    def forward(self, latents: Tensor, context: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Latents [b, q, h] and states [b, n, h] to [b, q, h], and the probabilities where they exist."""
        states = ops.cat([context, latents], -2)
        query = self.q_proj(latents)
        key = self.k_proj(states)
        value = self.v_proj(states)
        query = split_heads(query, self.head_dim)
        key = split_heads(key, self.head_dim)
        value = split_heads(value, self.head_dim)
        out, weights = attend(query, key, value, mask, self.repeats, self.dropout)
        out = ops.reshape(out, *latents.shape[:2], -1)
        out = self.o_proj(out)
        return out, weights


class PerceiverLayer(Module):
    """Norms of latents and states, attention, add; norm, MLP, add. It is never checkpointed."""

    def __init__(self, p: Config, hidden: int) -> None:
        self.input_latents_norm = RMSNorm(hidden)
        self.input_context_norm = RMSNorm(hidden)
        self.self_attn = PerceiverAttention(p, hidden)
        self.post_attention_layernorm = RMSNorm(hidden)
        self.mlp = GatedMLP(hidden, 4 * hidden, p.text("hidden_act"))

    def forward(self, latents: Tensor, context: Tensor, mask: Tensor | None) -> Tensor:
        """Latents [b, q, h] to [b, q, h]."""
        residual = latents
        latents = self.input_latents_norm(latents)
        context = self.input_context_norm(context)
        latents, _weights = self.self_attn(latents, context, mask)
        latents = ops.add(residual, latents)
        residual = latents
        latents = self.post_attention_layernorm(latents)
        latents = self.mlp(latents)
        return ops.add(residual, latents)


class PerceiverResampler(Module):
    """So many trained latents, their layers and a norm."""

    def __init__(self, p: Config, hidden: int) -> None:
        self.count = p.integer("resampler_n_latents")
        self.latents = Parameter(self.count, hidden)
        self.layers = [PerceiverLayer(p, hidden) for _ in range(p.integer("resampler_depth"))]
        self.norm = RMSNorm(hidden)

    def forward(self, context: Tensor, seen: Tensor) -> Tensor:
        """An image's states [b, n, h], and which of them are no padding [b, n], to [b, latents, h]."""
        batch, patches, hidden = context.shape
        latents = ops.expand(ops.unsqueeze(self.latents, 0), batch, self.count, hidden)
        ones = context.tape.empty((batch, self.count), BOOL)
        both = context.tape.empty((batch, patches + self.count), BOOL)
        mask = bidirectional_mask(latents, True, patches + self.count)
        compressed = latents
        for layer in self.layers:
            compressed = layer(compressed, context, mask)
        compressed = self.norm(compressed)
        del ones, both
        return compressed  # type: ignore[no-any-return]


class Idefics2Tower(Module):
    """Embeddings, blocks and a norm. A mask says which patches are no padding."""

    def __init__(self, v: Config) -> None:
        rows, columns = grid_of(v)
        self.embeddings = PatchesWithPositions(v, rows * columns)
        self.encoder = tower_blocks(v, "vision block", together=False)
        self.post_layernorm = LayerNorm(v.integer("hidden_size"))

    def forward(self, pixels: Tensor) -> Tensor:
        """Pixels [b, c, height, width] to [b, n, h]."""
        embedded = self.embeddings(pixels)
        mask = bidirectional_mask(embedded, True)
        hidden = embedded
        for block in self.encoder:
            hidden = block(hidden, mask)
        return self.post_layernorm(hidden)


class Idefics2VisionEncoder(MaskedImages):
    """An image becomes as many tokens as there are latents."""

    def __init__(self, c: Config, v: Config, p: Config, text: Config) -> None:
        hidden = text.integer("hidden_size")
        self.config = v
        self.patches = grid_of(v)
        self.vision_model = Idefics2Tower(v)
        self.modality_projection = GatedMLP(
            v.integer("hidden_size"), text.integer("intermediate_size"), text.text("hidden_act"), outputs=hidden
        )
        self.perceiver_resampler = PerceiverResampler(p, hidden)
        self.count = self.perceiver_resampler.count

    def pictures(self, batch: Batch) -> tuple[int, int, int]:
        """How many images the tower gets of each sequence, and their height and width."""
        height, width = self.config.sides("image_size")
        return batch.images, height, width

    def features(self, states: Tensor, seen: Tensor) -> Tensor:
        """Latents of the tower's states."""
        return self.perceiver_resampler(self.modality_projection(states), seen)


class Idefics2(VisionLanguage):
    """Its tower and its latents get a mask that says which patches are padding."""

    assumption = OWN_ONES_NOTE
    merges_apart = True


def idefics2(c: Config, architecture: str | None) -> Network:
    """Idefics 2."""
    v, p = c.nested("vision_config", _TOWER), c.nested("perceiver_config", _PERCEIVER)
    text = language_model(c, "mistral", tied=c.flag("tie_word_embeddings"))
    section = Config(c.section("text_config"), text.family.defaults, text.family.aliases, f"{c.where}'s 'text_config'")
    return Idefics2(as_tower(Idefics2VisionEncoder(c, v, p, section)), text)


_TOWER: dict[str, object] = vit_sizes(
    (768, 3072, 12, 12, 224, 32, 3), hidden_act="gelu_pytorch_tanh", attention_dropout=0.0
)
_PERCEIVER: dict[str, object] = {
    "hidden_act": "silu",
    "resampler_n_latents": 64,
    "resampler_depth": 3,
    "resampler_n_heads": 16,
    "resampler_head_dim": 96,
    "num_key_value_heads": 4,
    "attention_dropout": 0.0,
}
FAMILIES = table(Family("idefics2", idefics2, {"tie_word_embeddings": False}, kinds="vision tower, latents, decoder"))
