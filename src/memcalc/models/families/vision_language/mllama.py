"""Llama 3.2 Vision: Llama's decoder, with blocks between its own that attend to what a vision tower sees."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

from memcalc import ops
from memcalc.autograd.tape import OVERHEAD
from memcalc.autograd.tensor import Tensor
from memcalc.common.image_sides import ImageSize
from memcalc.config.reader import Config
from memcalc.errors import ConfigError
from memcalc.models.common.causal_lm import CausalLM
from memcalc.models.common.decoder import gated_mlp
from memcalc.models.common.vision_encoder import check_size, config_side
from memcalc.models.family import Family, sizes, table, vit_sizes
from memcalc.models.vision_towers.mllama import TiledTower
from memcalc.nn.kv_cache import Cache
from memcalc.nn.layers.attention_backends import attend
from memcalc.nn.layers.decoder_blocks import DecoderBlock
from memcalc.nn.layers.grouped_query_attention import GroupedQueryAttention
from memcalc.nn.layers.linear import Embedding, Linear
from memcalc.nn.layers.masks import causal_mask
from memcalc.nn.layers.norms import RMSNorm
from memcalc.nn.layers.rotary import RotaryEmbedding, Rotation
from memcalc.nn.model import IMAGES, Batch, Network, Outputs, positions
from memcalc.nn.module import Module, Parameter
from memcalc.nn.run_context import run_context
from memcalc.nn.stack import Stack
from memcalc.nn.towers import as_tower
from memcalc.tables.dtypes import BOOL, FP32, INT64

SPECIAL = 8
"""Rows of the embedding's table for special tokens (the image's), which no output stands for."""


class CrossAttention(Module):
    """Attention of text to states of images, with a norm over each head's query and key."""

    scope = "attention"

    def __init__(self, hidden: int, heads: int, kv_heads: int, head_dim: int, dropout: float) -> None:
        self.head_dim, self.repeats, self.dropout = head_dim, heads // kv_heads, dropout
        self.q_proj = Linear(hidden, heads * head_dim, group="attention")
        self.k_proj = Linear(hidden, kv_heads * head_dim, group="attention")
        self.v_proj = Linear(hidden, kv_heads * head_dim, group="attention")
        self.o_proj = Linear(heads * head_dim, hidden, group="attention")
        self.q_norm = RMSNorm(head_dim)
        self.k_norm = RMSNorm(head_dim)

    def _heads(self, x: Tensor, batch: int) -> Tensor:
        return ops.transpose(ops.view(x, batch, -1, x.shape[-1] // self.head_dim, self.head_dim), 1, 2)

    def forward(self, hidden: Tensor, mask: Tensor | None, states: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """[b, s, h] to the same; without states, keys and values are those that the cache has."""
        cache, batch = run_context(hidden).cache, hidden.shape[0]
        query = self.q_proj(hidden)
        query = self._heads(query, batch)
        query = self.q_norm(query)
        cached = None if cache is None else cache.cross_attention_key_values(self)
        if states is not None:
            key = self.k_proj(states)
            value = self.v_proj(states)
            key = self._heads(key, batch)
            value = self._heads(value, batch)
            key = self.k_norm(key)
            if cache is not None:
                key, value = cache.update(self, key, value)
        else:
            assert cached is not None
            key, value = cached
        out, weights = attend(query, key, value, mask, self.repeats, self.dropout)
        out = ops.contiguous(ops.reshape(out, *hidden.shape[:-1], -1))
        return self.o_proj(out), weights


class SelfAttentionBlock(DecoderBlock):
    """Llama's block. It takes the image states as the others do, and keeps them alive where it is checkpointed."""

    def forward(
        self, hidden: Tensor, rotation: Rotation, mask: Tensor | None, position_ids: Tensor, **_unused: Any
    ) -> Any:
        """[b, s, h] to the same."""
        return super().forward(hidden, rotation, mask, position_ids)


class CrossAttentionBlock(Module):
    """Norm, attention to images, gate, add; norm, MLP, gate, add. Tokens that see no image take nothing from it."""

    scope = "residual stream"

    def __init__(self, attention: CrossAttention, mlp: Module, hidden: int) -> None:
        self.cross_attn_attn_gate = Parameter(1, group="norms")
        self.cross_attn_mlp_gate = Parameter(1, group="norms")
        self.cross_attn = attention
        self.input_layernorm = RMSNorm(hidden)
        self.mlp = mlp
        self.post_attention_layernorm = RMSNorm(hidden)

    def forward(
        self,
        hidden: Tensor,
        states: Tensor | None,
        states_mask: Tensor | None,
        full_text_row_mask: Tensor | None,
        **_unused: Any,
    ) -> Tensor:
        """[b, s, h] to the same."""
        residual = hidden
        hidden = self.input_layernorm(hidden)
        hidden, _weights = self.cross_attn(hidden, mask=states_mask, states=states)
        hidden = ops.add(residual, ops.mul(ops.tanh(self.cross_attn_attn_gate), hidden))
        residual = hidden
        hidden = self.post_attention_layernorm(hidden)
        hidden = self.mlp(hidden)
        if full_text_row_mask is not None:
            hidden = ops.mul(ops.select(full_text_row_mask, 1), hidden)
        return ops.add(residual, ops.mul(ops.tanh(self.cross_attn_mlp_gate), hidden))


class CrossAttentionDecoder(Module):
    """Llama's decoder; the blocks `cross_attention_layers` attend to image states, and are skipped without images."""

    def __init__(self, c: Config, cross_attention_layers: list[int]) -> None:
        hidden, depth, (heads, kv_heads, head_dim) = c.integer("hidden_size"), c.integer("num_hidden_layers"), c.heads()
        dropout, mlp = c.probability("dropout"), gated_mlp(c)

        def block(layer: int) -> Module:
            if layer in cross_attention_layers:
                return CrossAttentionBlock(CrossAttention(hidden, heads, kv_heads, head_dim, dropout), mlp(), hidden)
            attention = GroupedQueryAttention(hidden, heads, kv_heads, head_dim, dropout=dropout)
            return SelfAttentionBlock(attention, mlp(), lambda: RMSNorm(hidden))

        kinds: list[Hashable] = ["states" if layer in cross_attention_layers else "own" for layer in range(depth)]
        if cross_attention_layers:
            kinds[cross_attention_layers[-1]] = "last states"  # the first to send the states a gradient
        self.embed_tokens = Embedding(c.integer("vocab_size") + SPECIAL, hidden)
        self.layers = Stack(kinds, block)
        self.norm = RMSNorm(hidden)
        self.rotary_emb = RotaryEmbedding(head_dim)

    def forward(
        self,
        ids: Tensor,
        padding: bool,
        states: Tensor | None,
        states_mask: Tensor | None,
        full_text_row_mask: Tensor | None,
    ) -> Tensor:
        """Ids [b, s] to hidden states [b, s, h]."""
        inputs_embeds = self.embed_tokens(ids)
        hidden = inputs_embeds
        position_ids = positions(ids.tape, ids.shape[1])
        mask = causal_mask(inputs_embeds, padding)
        rotation = self.rotary_emb(hidden, position_ids)
        cache = run_context(ids).cache
        for layer in self.layers:
            across = layer.module.cross_attn if isinstance(layer.module, CrossAttentionBlock) else None
            if (
                across is None
                or states is not None
                or (cache is not None and cache.cross_attention_key_values(across) is not None)
            ):
                hidden = layer(
                    hidden,
                    states=states,
                    states_mask=states_mask,
                    mask=mask,
                    full_text_row_mask=full_text_row_mask,
                    position_ids=position_ids,
                    rotation=rotation,
                )
        return self.norm(hidden)  # type: ignore[no-any-return]


class Mllama(Network):
    """Tower, projector and decoder. Images take no tokens: each is announced by one."""

    def __init__(self, c: Config, tower: TiledTower, text: CausalLM, v: Config, *, caches: bool) -> None:
        self.vision_model = tower
        self.text = text
        self.config = v
        self.multi_modal_projector = Linear(tower.outputs, text.lm_head.weight.shape[1], bias=True)
        self.caches = caches

    def image_side(self, size: ImageSize) -> int | None:
        """Height and width of a tile in pixels."""
        return config_side(self.config)

    def image_tokens(self, images: int, size: ImageSize) -> int:
        """One token for each image."""
        check_size(self.config, size)
        return images

    def forward(self, batch: Batch) -> Outputs:
        """Loss and logits; the output object keeps what the tower gave, and the cache if there is one."""
        hidden, kept = self._read(batch)
        return self.text.head_and_loss(batch, hidden, kept)

    def _read(self, batch: Batch) -> tuple[Tensor, tuple[Any, ...]]:
        ids, tape = batch.ids, batch.ids.tape
        run = run_context(tape)
        cache, images = run.cache, batch.images
        seen = states = mask = full_text_row_mask = None
        if images and (cache is None or cache.length == 0):
            run.cache = None
            seen = self._encode_images(batch)
            run.cache = cache
            states = self.multi_modal_projector(seen)
            states = ops.reshape(states, -1, seen.shape[-2], states.shape[-1])
        if images:
            shape = (*ids.shape, images, self.vision_model.tiles)
            cross_attention_mask = tape.external_tensor(shape, INT64, OVERHEAD, IMAGES)
            mask, full_text_row_mask = cross_attention_masks(cross_attention_mask, self.vision_model.patches)
        made = Cache() if cache is None and self.caches and not run.checkpointing else None
        run.cache = cache or made
        hidden = self.text.model(ids, batch.padding, states, mask, full_text_row_mask)
        run.cache = cache
        return hidden, (seen, made)

    def _encode_images(self, batch: Batch) -> Tensor:
        """What the tower makes of the images of a batch, padded to all the tiles there can be."""
        tape, v, tiles = batch.ids.tape, self.config, self.vision_model.tiles
        lead, side = (batch.ids.shape[0], batch.images), v.integer("image_size")
        pixels = tape.external_tensor(
            (*lead, tiles, v.integer("num_channels"), side, side), run_context(tape).weights_dtype, OVERHEAD, IMAGES
        )
        shapes = tape.external_tensor(lead, INT64, OVERHEAD, IMAGES)
        aspect_ratio_mask = tape.external_tensor((*lead, tiles), INT64, OVERHEAD, IMAGES)
        return self.vision_model(pixels, shapes, aspect_ratio_mask)


def cross_attention_masks(cross_attention_mask: Tensor, patches: int) -> tuple[Tensor, Tensor]:
    """What each token sees of each patch, and whether it sees any, from what it sees of tiles [b, s, images, tiles].

    Both are in the weights' dtype: [b, 1, s, patches of all images] and [b, 1, s, 1].
    """
    tape, (batch, length, images, tiles) = cross_attention_mask.tape, cross_attention_mask.shape
    seen = ops.view(cross_attention_mask, *cross_attention_mask.shape)
    mask = tape.empty((batch, length, images, tiles * patches), INT64)
    mask = ops.unsqueeze(ops.view(mask, batch, length, -1), 1)
    inverted = ops.to(tape.empty(mask.shape, FP32), run_context(tape).weights_dtype)
    mask = ops.masked_fill(inverted, tape.empty(inverted.shape, BOOL))
    some = ops.to(_any(ops.compare(mask)), mask.dtype)
    del seen, inverted
    return mask, ops.unsqueeze(some, -1)


def _any(where: Tensor) -> Tensor:
    """Whether any of the last dimension holds."""
    return where.tape.empty(where.shape[:-1], BOOL)


def mllama(c: Config, architecture: str | None) -> Network:
    """Llama 3.2 Vision."""
    v = c.nested("vision_config", _TOWER, {"num_attention_heads": "attention_heads"})
    text = c.nested("text_config", _TEXT)
    depth, cross_attention_layers = text.integer("num_hidden_layers"), []
    for given in text.items("cross_attention_layers") or []:
        if isinstance(given, bool) or not isinstance(given, int) or not 0 <= given < depth:
            raise ConfigError(
                f"{text.where} gives {given!r} in 'cross_attention_layers', but there are {depth} layers; correct it."
            )
        cross_attention_layers.append(given)
    decoder = CrossAttentionDecoder(text, sorted(cross_attention_layers))
    model = CausalLM(decoder, text.integer("hidden_size"), text.integer("vocab_size"), tied_to=None)
    tower = TiledTower(v)
    if v.integer("vision_output_dim") != tower.outputs:
        raise ConfigError(
            f"{v.where} gives 'vision_output_dim' as {v.get('vision_output_dim')}, but its layers "
            f"make {tower.outputs}; correct one."
        )
    network = Mllama(c, tower, model, v, caches=text.get("use_cache") is not False)
    as_tower(network.vision_model)
    as_tower(network.multi_modal_projector)
    return network


_TOWER: dict[str, object] = vit_sizes(
    (1280, 5120, 32, 0, 448, 14, 3),
    hidden_act="gelu",
    num_global_layers=8,
    attention_heads=16,
    vision_output_dim=7680,
    max_num_tiles=4,
    intermediate_layers_indices=[3, 7, 15, 23, 30],
    supported_aspect_ratios=[[1, 1], [1, 2], [1, 3], [1, 4], [2, 1], [2, 2], [3, 1], [4, 1]],
)
_TEXT: dict[str, object] = sizes(
    (128256, 4096, 14336, 40, 32, 8, 131072),
    hidden_act="silu",
    dropout=0.0,
    cross_attention_layers=[3, 8, 13, 18, 23, 28, 33, 38],
)

FAMILIES = table(Family("mllama", mllama, {}, attention="eager, sdpa", kinds="vision tower, decoder"))
