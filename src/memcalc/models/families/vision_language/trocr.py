"""The decoder of TrOCR: BART's blocks with attention that is always written out, over the states of an image."""

from __future__ import annotations

from memcalc import ops
from memcalc.autograd.tensor import Tensor
from memcalc.config.reader import Config
from memcalc.errors import ConfigError
from memcalc.nn.kv_cache import Cache
from memcalc.nn.layers.attention_backends import split_heads
from memcalc.nn.layers.bart import BlockStyle, DecoderBlock
from memcalc.nn.layers.linear import Embedding, Linear
from memcalc.nn.layers.masks import causal_mask
from memcalc.nn.layers.norms import LayerNorm
from memcalc.nn.layers.position_embeddings import BufferedPositions, LearnedPositions
from memcalc.nn.module import Module
from memcalc.nn.run_context import run_context
from memcalc.nn.stack import Stack


class TrocrAttention(Module):
    """Attention over its own input, or over states of width `states`: batched products, no fused kernel."""

    scope = "attention"

    def __init__(self, hidden: int, heads: int, dropout: float, states: int | None = None) -> None:
        if hidden % heads:
            raise ConfigError(f"'d_model' is {hidden}, which the {heads} attention heads do not divide; correct one.")
        self.heads, self.head_dim, self.dropout = heads, hidden // heads, dropout
        self.k_proj = Linear(states or hidden, hidden, bias=True, group="attention")
        self.v_proj = Linear(states or hidden, hidden, bias=True, group="attention")
        self.q_proj = Linear(hidden, hidden, bias=True, group="attention")
        self.out_proj = Linear(hidden, hidden, bias=True, group="attention")

    def forward(
        self, hidden: Tensor, mask: Tensor | None = None, states: Tensor | None = None, cache: Cache | None = None
    ) -> tuple[Tensor, None]:
        """[b, s, h] to [b, s, h]; keys and values from `states` if given."""
        batch, length, width = hidden.shape
        query = ops.mul_scalar(self.q_proj(hidden))
        current = hidden if states is None else states
        cached = None if cache is None or states is None else cache.cross_attention_key_values(self)
        if cached is not None:
            key, value = cached
        else:
            key = self.k_proj(current)
            value = self.v_proj(current)
            key = split_heads(key, self.head_dim)
            value = split_heads(value, self.head_dim)
            if cache is not None:
                key, value = cache.update(self, key, value)
        del cached
        query = split_heads(query, self.head_dim)
        query = ops.reshape(query, -1, length, self.head_dim)
        key = ops.reshape(key, -1, key.shape[2], self.head_dim)
        value = ops.reshape(value, -1, value.shape[2], self.head_dim)
        weights = ops.bmm(query, ops.transpose(key, 1, 2))
        if mask is not None:
            weights = ops.add(ops.view(weights, batch, self.heads, length, key.shape[1]), mask)
            weights = ops.view(weights, -1, length, key.shape[1])
        weights = ops.softmax(weights)
        probs = ops.dropout(weights, self.dropout)
        out = ops.bmm(probs, value)
        out = ops.transpose(ops.view(out, batch, self.heads, length, self.head_dim), 1, 2)
        out = ops.reshape(out, batch, length, width)
        return self.out_proj(out), None


class TrocrDecoder(Module):
    """Embeddings, blocks and a head that shares the table of tokens unless the config unties it.

    states: width of what the encoder gives, where that is not the decoder's own.
    """

    def __init__(self, c: Config, states: int | None) -> None:
        hidden, heads, width = (c.integer(key) for key in ("hidden_size", "decoder_attention_heads", "decoder_ffn_dim"))
        vocab, longest = c.integer("vocab_size"), c.integer("max_position_embeddings")
        rate, self.dropout = c.probability("attention_dropout"), c.probability("dropout")
        self.embed_tokens = Embedding(vocab, hidden)
        self.learned = c.flag("use_learned_position_embeddings", True)
        self.embed_positions = (
            LearnedPositions(longest + 2, hidden) if self.learned else BufferedPositions(longest + 2, hidden)
        )
        self.layernorm_embedding = LayerNorm(hidden) if c.flag("layernorm_embedding", True) else None
        act_dropout = c.probability("activation_dropout")
        style = BlockStyle(hidden, c.text("activation_function"), self.dropout, act_dropout, norm_first=False)
        if c.number("decoder_layerdrop", 0.0):
            raise ConfigError(f"{c.where} has 'decoder_layerdrop', which skips blocks at random; set it to 0.")

        def block(_: int) -> Module:
            own, cross = TrocrAttention(hidden, heads, rate), TrocrAttention(hidden, heads, rate, states)
            return DecoderBlock(style, own, cross, width)

        self.layers = Stack(["block"] * c.integer("decoder_layers"), block, name="decoder block")
        self.output_projection = Linear(hidden, vocab, group="LM head")
        if c.flag("tie_word_embeddings", True):
            self.output_projection.weight = self.embed_tokens.weight

    def forward(self, ids: Tensor, states: Tensor, cache: Cache | None) -> Tensor:
        """Ids [b, t] and encoder states [b, n, h] to logits [b, t, V]."""
        with run_context(ids).attention_backend("eager"):
            hidden = self._decoded(ids, states, cache)
        with ids.tape.scoped("head and loss"):
            logits: Tensor = self.output_projection(hidden)
        return logits

    def _decoded(self, ids: Tensor, states: Tensor, cache: Cache | None) -> Tensor:
        inputs_embeds = ops.mul_scalar(self.embed_tokens(ids))
        positions = self.embed_positions(ids)
        hidden = ops.add(inputs_embeds, positions)
        if self.layernorm_embedding is not None:
            hidden = self.layernorm_embedding(hidden)
        hidden = ops.dropout(hidden, self.dropout)
        mask = causal_mask(inputs_embeds, False, past=0 if cache is None else cache.past)
        for layer in self.layers:
            hidden = layer(hidden, mask, states, states_mask=None, cache=cache)
        return hidden


TROCR_DEFAULTS: dict[str, object] = {
    "vocab_size": 50265,
    "hidden_size": 1024,
    "decoder_layers": 12,
    "decoder_attention_heads": 16,
    "decoder_ffn_dim": 4096,
    "activation_function": "gelu",
    "max_position_embeddings": 512,
    "dropout": 0.1,
    "attention_dropout": 0.0,
    "activation_dropout": 0.0,
}
