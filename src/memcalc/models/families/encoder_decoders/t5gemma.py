"""T5Gemma: Gemma 2's blocks as an encoder, and with attention over its states as a decoder."""

from __future__ import annotations

from memcalc import ops
from memcalc.autograd.tensor import Tensor
from memcalc.config.reader import Config
from memcalc.models.common.decoder import SOFT_CAP, sorted_windows, windows_by_layer_type
from memcalc.models.common.heads import unknown_head
from memcalc.models.common.seq2seq import decoder_cache, decoder_input, encoded
from memcalc.models.family import Family, sizes, table
from memcalc.nn.kv_cache import Cache
from memcalc.nn.layers.attention_backends import attend, split_heads
from memcalc.nn.layers.decoder_blocks import DecoderBlock
from memcalc.nn.layers.grouped_query_attention import GroupedQueryAttention
from memcalc.nn.layers.linear import Embedding, Linear
from memcalc.nn.layers.losses import token_loss
from memcalc.nn.layers.masks import OWN_ONES_NOTE, bidirectional_mask, causal_mask
from memcalc.nn.layers.mlp import GatedMLP
from memcalc.nn.layers.norms import GemmaRMSNorm
from memcalc.nn.layers.rotary import RotaryEmbedding, Rotation
from memcalc.nn.model import Batch, Network, Outputs, positions
from memcalc.nn.module import Module
from memcalc.nn.stack import Stack
from memcalc.tables.dtypes import FP32, INT64

_NORMS = (
    "pre_self_attn_layernorm",
    "post_self_attn_layernorm",
    "pre_feedforward_layernorm",
    "post_feedforward_layernorm",
)


class CrossAttention(Module):
    """Grouped-query attention from a decoder's states to an encoder's, without positions."""

    scope = "attention"

    def __init__(self, c: Config, states: int) -> None:
        hidden, bias = c.integer("hidden_size"), c.flag("attention_bias")
        heads, kv_heads, self.head_dim = c.heads()
        self.repeats = heads // kv_heads
        self.dropout = c.probability("attention_dropout")
        self.attn_logit_softcapping = c.has("attn_logit_softcapping")
        self.q_proj = Linear(hidden, heads * self.head_dim, bias=bias, group="attention")
        self.k_proj = Linear(states, kv_heads * self.head_dim, bias=bias, group="attention")
        self.v_proj = Linear(states, kv_heads * self.head_dim, bias=bias, group="attention")
        self.o_proj = Linear(heads * self.head_dim, hidden, bias=bias, group="attention")

    def forward(
        self, hidden: Tensor, mask: Tensor | None, states: Tensor, cache: Cache | None
    ) -> tuple[Tensor, Tensor | None]:
        """[b, t, h] and the encoder's states [b, s, h] to [b, t, h], and the probabilities where they exist."""
        query = split_heads(self.q_proj(hidden), self.head_dim)
        cached = None if cache is None else cache.cross_attention_key_values(self)
        if cached is not None:
            key, value = cached
        else:
            key = split_heads(self.k_proj(states), self.head_dim)
            value = split_heads(self.v_proj(states), self.head_dim)
            if cache is not None:
                key, value = cache.update(self, key, value)
        out, weights = attend(
            query, key, value, mask, self.repeats, self.dropout, attn_logit_softcapping=self.attn_logit_softcapping
        )
        out = ops.contiguous(ops.reshape(out, *hidden.shape[:-1], -1))
        return self.o_proj(out), weights


class CrossBlock(DecoderBlock):
    """Gemma 2's block with attention over the encoder's states between its two halves."""

    def __init__(self, attention: Module, mlp: Module, cross: CrossAttention, c: Config) -> None:
        hidden = c.integer("hidden_size")
        super().__init__(
            attention,
            mlp,
            lambda: GemmaRMSNorm(hidden),
            _NORMS,
            dropout=c.probability("dropout_rate"),
            order="self_attn norms mlp",
        )
        self.cross_attn = cross
        self.pre_cross_attn_layernorm = GemmaRMSNorm(hidden)
        self.post_cross_attn_layernorm = GemmaRMSNorm(hidden)

    def forward(  # type: ignore[override]
        self,
        hidden: Tensor,
        rotation: Rotation,
        mask: Tensor | None,
        position_ids: Tensor,
        cache: Cache | None,
        states: Tensor,
        states_mask: Tensor | None,
    ) -> Tensor:
        """[b, t, h] to [b, t, h]."""
        before_attention, after_attention, before_mlp, after_mlp = (vars(self)[name] for name in _NORMS)
        residual = hidden
        hidden = before_attention(hidden)
        hidden, _weights = self.self_attn(hidden, rotation, mask)
        hidden = after_attention(hidden)
        hidden = ops.add(residual, self._branch(hidden))
        residual = hidden
        hidden = self.pre_cross_attn_layernorm(hidden)
        hidden, _weights = self.cross_attn(hidden, mask=states_mask, states=states, cache=cache)
        hidden = self.post_cross_attn_layernorm(hidden)
        hidden = ops.add(residual, self._branch(hidden))
        residual = hidden
        hidden = before_mlp(hidden)
        hidden = self.mlp(hidden)
        hidden = after_mlp(hidden)
        return ops.add(residual, self._branch(hidden))


class GemmaSide(Module):
    """Encoder or decoder: a table of its own, blocks of which every other one has the sliding window, and a norm.

    With `states`, the width of the encoder's, it is a decoder.
    """

    assumption = OWN_ONES_NOTE

    def __init__(self, c: Config, states: int | None) -> None:
        hidden, bias = c.integer("hidden_size"), c.flag("attention_bias")
        windows = windows_by_layer_type(c, 2)
        self.decoder = states is not None
        self.embed_tokens = Embedding(c.integer("vocab_size"), hidden)
        self.norm = GemmaRMSNorm(hidden)
        self.dropout = c.probability("dropout_rate")

        def block(layer: int) -> Module:
            attention = GroupedQueryAttention(
                hidden,
                *c.heads(),
                bias=bias,
                out_bias=bias,
                dropout=c.probability("attention_dropout"),
                window=windows[layer],
                attn_logit_softcapping=c.has("attn_logit_softcapping"),
            )
            mlp = GatedMLP(
                hidden, c.integer("intermediate_size"), c.text("hidden_activation"), inner_dropout=self.dropout
            )
            if states is not None:
                return CrossBlock(attention, mlp, CrossAttention(c, states), c)
            return DecoderBlock(attention, mlp, lambda: GemmaRMSNorm(hidden), _NORMS, dropout=self.dropout)

        self.layers = Stack(windows, block, name="decoder block" if self.decoder else "encoder block")
        self.windows = sorted_windows([None, c.optional("sliding_window")])
        self.rotary_emb = RotaryEmbedding(c.head_dim())

    def forward(self, ids: Tensor, padding: bool, states: Tensor | None = None, cache: Cache | None = None) -> Tensor:
        """Ids [b, s], and the encoder's states in a decoder, to hidden states [b, s, h].

        A mask of what is no padding token is made where none is given, so that real masks reach attention.
        """
        tape = ids.tape
        inputs_embeds = self.embed_tokens(ids)
        position_ids = positions(tape, ids.shape[1])
        _seen = ops.to(ops.compare(ids), INT64) if cache is None else None
        states_mask = None
        if states is None:
            masks = {window: bidirectional_mask(inputs_embeds, True, window=window) for window in self.windows}
        else:
            past = 0 if cache is None else cache.past
            masks = {window: causal_mask(inputs_embeds, True, window, past=past) for window in self.windows}
            states_mask = bidirectional_mask(inputs_embeds, padding, states.shape[1])
        hidden = inputs_embeds
        normalizer = tape.empty((), hidden.dtype)
        hidden = ops.mul(hidden, normalizer)
        hidden = ops.dropout(hidden, self.dropout)
        rotation = self.rotary_emb(hidden, position_ids)
        for layer in self.layers:
            mask = masks[vars(layer.module)["self_attn"].window]
            if states is None:
                hidden = layer(hidden, rotation, mask, position_ids)
            else:
                hidden = layer(hidden, rotation, mask, position_ids, cache, states, states_mask)
        hidden = self.norm(hidden)
        return ops.dropout(hidden, self.dropout)


class T5GemmaForConditionalGeneration(Network):
    """Encoder and decoder with a table each, and a head that shares the decoder's."""

    def __init__(self, c: Config) -> None:
        encoder, decoder = (_side(c, key) for key in ("encoder", "decoder"))
        self.encoder = GemmaSide(encoder, None)
        self.decoder = GemmaSide(decoder, encoder.integer("hidden_size"))
        table = self.decoder.embed_tokens
        self.lm_head = Linear(*reversed(table.weight.shape), group="LM head")
        if c.flag("tie_word_embeddings"):
            self.lm_head.weight = table.weight
        self.attn_logit_softcapping = decoder.has("final_logit_softcapping")

    def forward(self, batch: Batch) -> Outputs:
        """Loss and logits. In generation, the first call encodes and decodes a start token, later ones decode."""
        tape = batch.ids.tape
        cache = decoder_cache(tape, in_training=False)
        labels = None if batch.labels is None else batch.target()
        if labels is None and cache is not None:  # generation encodes first
            encoded(batch, cache, self.encoder)
        decoder_ids = decoder_input(batch, labels, cache)
        states = encoded(batch, cache, self.encoder)
        hidden = self.decoder(decoder_ids, batch.padding, states, cache)
        if cache is not None:
            cache.past += decoder_ids.shape[1]
        with tape.scoped("head and loss"):
            logits = self.lm_head(hidden)
            for function in SOFT_CAP if self.attn_logit_softcapping else ():
                logits = function(logits)
            loss = None if labels is None else token_loss(ops.to(logits, FP32), labels)
        return Outputs(loss, (logits, states))


def _side(c: Config, key: str) -> Config:
    """The encoder's or decoder's own config; dropout is that of the whole."""
    return c.nested(key, _MODULE).replaced(
        dropout_rate=c.probability("dropout_rate"), attention_dropout=c.probability("attention_dropout")
    )


def t5gemma(c: Config, architecture: str | None) -> Network:
    """T5Gemma in every pairing of encoder and decoder."""
    name = architecture or ""
    if name and not name.endswith(("ForConditionalGeneration", "T5GemmaModel")):
        raise unknown_head(c, name, ("ForConditionalGeneration",))
    return T5GemmaForConditionalGeneration(c)


_MODULE = sizes(
    (256000, 2304, 9216, 26, 8, 4, 0),
    head_dim=256,
    hidden_activation="gelu_pytorch_tanh",
    sliding_window=4096,
    final_logit_softcapping=30.0,
    attn_logit_softcapping=50.0,
)
FAMILIES = table(
    Family(
        "t5gemma",
        t5gemma,
        {"dropout_rate": 0.0, "attention_dropout": 0.0, "tie_word_embeddings": True},
        {},
        "encoder-decoder",
        "eager, flash",
        "measured rows, exact counts",
    )
)
