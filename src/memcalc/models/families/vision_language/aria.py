"""Aria: Idefics 3's tower, queries that attend to its patches, and Llama's blocks with experts, some of them shared."""

from __future__ import annotations

from memcalc import ops
from memcalc.autograd.tape import OVERHEAD
from memcalc.autograd.tensor import Tensor
from memcalc.common.image_sides import ImageSize
from memcalc.config.reader import Config
from memcalc.errors import ConfigError, UsageError
from memcalc.models.common.decoder import biases, dense_decoder
from memcalc.models.common.vision_encoder import ImageFeatures, VisionEncoder
from memcalc.models.common.vision_language import VisionLanguage, language_model
from memcalc.models.families.vision_language.idefics3 import PatchesWithPositions
from memcalc.models.family import Family, llama_sizes, table, vit_sizes
from memcalc.models.vision_towers.clip_siglip import tower_blocks
from memcalc.nn.layers.attention_pooling import MultiheadAttention
from memcalc.nn.layers.linear import Linear
from memcalc.nn.layers.masks import bidirectional_mask
from memcalc.nn.layers.mixture_of_experts import Experts, swiglu
from memcalc.nn.layers.mlp import GatedMLP, activation
from memcalc.nn.layers.norms import LayerNorm
from memcalc.nn.layers.routers import TopKThenSoftmaxRouter
from memcalc.nn.layers.vision_transformer import grid_of
from memcalc.nn.model import IMAGES, Batch, Network
from memcalc.nn.module import Module, Parameter
from memcalc.nn.towers import as_tower
from memcalc.tables.dtypes import BOOL, INT64


class AriaMixture(Module):
    """Routed experts and an MLP of the shared ones, added."""

    scope = "experts"

    def __init__(self, c: Config) -> None:
        hidden, width = c.integer("hidden_size"), c.integer("intermediate_size")
        count, per_token = c.integer("moe_num_experts"), c.within("moe_topk", "moe_num_experts")
        self.router = TopKThenSoftmaxRouter(hidden, count, per_token)
        self.experts = Experts(hidden, width, count, per_token, swiglu(ops.silu), transposed=True)
        self.shared_experts = GatedMLP(
            hidden, width * c.integer("moe_num_shared_experts"), c.text("hidden_act"), bias=c.flag("mlp_bias")
        )

    def forward(self, hidden: Tensor) -> Tensor:
        """[b, s, h] to [b, s, h]."""
        flat = ops.view(hidden, -1, hidden.shape[-1])
        _logits, weights, indices = self.router(flat)
        routed = ops.view(self.experts(flat, weights, indices), *hidden.shape)
        shared = self.shared_experts(ops.view(flat, *hidden.shape))
        return ops.add(routed, shared)


def aria_text(c: Config, architecture: str | None) -> Network:
    """Aria's decoder."""
    attention = biases(c)
    return dense_decoder(c, architecture, attention=attention, mlp=lambda: AriaMixture(c))


class AriaTower(Module):
    """Embeddings and blocks; the norm after them is run, but what the projector reads is in front of it."""

    def __init__(self, v: Config) -> None:
        rows, columns = grid_of(v)
        self.embeddings = PatchesWithPositions(v, rows * columns)
        self.encoder = tower_blocks(v, "vision block", together=False)
        self.post_layernorm = LayerNorm(v.integer("hidden_size"))

    def forward(self, pixels: Tensor) -> tuple[Tensor, Tensor]:
        """Pixels [b, c, height, width] to normalised and plain states [b, n, h]."""
        embedded = self.embeddings(pixels)
        mask = bidirectional_mask(embedded, padding=False)
        hidden = embedded
        for block in self.encoder:
            hidden = block(hidden, mask)
        return self.post_layernorm(hidden), hidden


class AriaCrossAttention(Module):
    """Queries attend to patches: projections in front of a MultiheadAttention, and one after it."""

    def __init__(self, hidden: int, heads: int) -> None:
        self.q_proj = Linear(hidden, hidden)
        self.k_proj = Linear(hidden, hidden)
        self.v_proj = Linear(hidden, hidden)
        self.multihead_attn = MultiheadAttention(hidden, heads)
        self.linear = Linear(hidden, hidden, bias=True)
        self.layer_norm = LayerNorm(hidden)
        self.layer_norm_kv = LayerNorm(hidden)

    def forward(self, states: Tensor, queries: Tensor, mask: Tensor) -> Tensor:
        """States [b, n, h] and queries [b, q, h] to [b, q, h]; `mask` [b · heads, q, n] is true where nothing is."""
        query = self.q_proj(self.layer_norm(queries))
        states = self.layer_norm_kv(states)
        key = self.k_proj(states)
        value = self.v_proj(states)
        out = self.multihead_attn(query, key, value, mask)
        return self.linear(out)


class ProjectorMLP(Module):
    """Two matrices, GELU between them."""

    def __init__(self, hidden: int, width: int) -> None:
        self.linear_in = Linear(hidden, width)
        self.act = activation("gelu_new")
        self.linear_out = Linear(width, width)

    def forward(self, hidden: Tensor) -> Tensor:
        """[..., h] to [..., width]."""
        hidden = self.act(self.linear_in(hidden))
        hidden = self.linear_out(hidden)
        return hidden  # noqa: RET504


class QueryProjector(Module):
    """As many trained queries as go with the number of patches, through attention and an MLP."""

    def __init__(self, hidden: int, heads: int, most: int, width: int) -> None:
        self.query = Parameter(most, hidden)
        self.cross_attn = AriaCrossAttention(hidden, heads)
        self.layer_norm = LayerNorm(hidden)
        self.feed_forward = ProjectorMLP(hidden, width)
        self.heads = heads

    def forward(self, states: Tensor, count: int, unseen: Tensor) -> Tensor:
        """States [b, n, h] to [b, count, width]; `unseen` [b, n] says which patches are padding."""
        batch, patches, _ = states.shape
        queries = ops.repeat(ops.unsqueeze(ops.narrow(self.query, 0, count), 0), batch)
        mask = states.tape.empty((batch * self.heads, patches), BOOL)
        mask = ops.expand(ops.unsqueeze(mask, 1), batch * self.heads, count, patches)
        out = self.cross_attn(states, queries, mask)
        return self.feed_forward(self.layer_norm(out))


class AriaVisionEncoder(VisionEncoder):
    """An image becomes as many tokens as `projector_patch_to_query_dict` gives for its patches."""

    def __init__(self, c: Config, v: Config, width: int) -> None:
        self.config, self.patch = v, v.integer("patch_size")
        given = c.get("projector_patch_to_query_dict") or {1225: 128, 4900: 256}
        if not isinstance(given, dict) or not all(str(n).isdigit() for pair in given.items() for n in pair):
            raise ConfigError(f"{c.where} has a 'projector_patch_to_query_dict' that is no map of counts; correct it.")
        self.counts = {int(str(patches)): int(str(queries)) for patches, queries in given.items()}
        hidden, heads = v.integer("hidden_size"), v.integer("num_attention_heads")
        self.vision_tower = AriaTower(v)
        self.multi_modal_projector = QueryProjector(hidden, heads, max(self.counts.values()), width)

    def tokens(self, size: ImageSize) -> int:
        """One for each query."""
        side = self.image_side(size) // self.patch
        count = self.counts.get(side**2)
        if count is None:
            sides = ", ".join(str(int(patches**0.5) * self.patch) for patches in sorted(self.counts))
            raise UsageError(
                f"images of {self.image_side(size)} pixels have {side**2} patches, for which this model has no "
                f"queries; give --image-size one of {sides}."
            )
        return count

    def encode_images(self, batch: Batch) -> ImageFeatures:
        """What it makes of the images of a batch, which come with a mask of the pixels that are no padding."""
        side, tape = self.image_side(batch.image_size), batch.ids.tape
        images, rows = batch.ids.shape[0] * batch.images, side // self.patch
        pixels = batch.pixels(self.config, batch.images, (side, side))
        given = ops.view(tape.external_tensor((images, side, side), BOOL, OVERHEAD, IMAGES), images, side, side)
        sums = tape.empty((images, rows, rows), INT64)
        seen = ops.compare(sums)
        del sums, given
        states, chosen = self.vision_tower(pixels)
        unseen = tape.empty((images, rows**2), BOOL)
        features = self.multi_modal_projector(chosen, self.tokens(batch.image_size), unseen)
        del seen
        return ImageFeatures(features, (states, chosen))


def aria(c: Config, architecture: str | None) -> Network:
    """Aria."""
    v = c.nested("vision_config", _TOWER)
    text = language_model(c, "aria_text", tied=c.flag("tie_word_embeddings"))
    if c.get("vision_feature_layer") != -1:
        raise ConfigError(f"{c.where} has a 'vision_feature_layer' other than -1, which memcalc does not describe.")
    vision_encoder = AriaVisionEncoder(c, v, text.model.lm_head.weight.shape[1])
    as_tower(vision_encoder)
    return VisionLanguage(vision_encoder, text, own_cache=True)


_TOWER: dict[str, object] = vit_sizes(
    (1152, 3072, 12, 16, 224, 32, 3), hidden_act="gelu_pytorch_tanh", attention_dropout=0.0
)
FAMILIES = table(
    Family("aria", aria, {"vision_feature_layer": -1, "tie_word_embeddings": False}),
    Family(
        "aria_text",
        aria_text,
        llama_sizes(
            (32000, 4096, 4096, 32, 32, 0, 2048),
            attention_dropout=0.0,
            moe_num_experts=8,
            moe_topk=2,
            moe_num_shared_experts=2,
        ),
    ),
)
