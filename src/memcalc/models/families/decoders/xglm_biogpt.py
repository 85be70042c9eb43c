"""Decoders made of BART's blocks without attention over encoder states: XGLM, BioGPT."""

from __future__ import annotations

from memcalc import ops
from memcalc.autograd.tensor import Tensor
from memcalc.config.reader import Config
from memcalc.errors import ConfigError
from memcalc.models.common import heads
from memcalc.models.family import Family, llama_sizes, table
from memcalc.nn.kv_cache import Cache
from memcalc.nn.layers.attention_backends import split_heads
from memcalc.nn.layers.bart import BartAttention, BlockStyle, DecoderBlock
from memcalc.nn.layers.linear import Embedding, PositionTable
from memcalc.nn.layers.masks import OWN_ONES_NOTE, causal_mask, padding_input
from memcalc.nn.layers.norms import LayerNorm
from memcalc.nn.layers.position_embeddings import BufferedPositions, token_range
from memcalc.nn.model import Network
from memcalc.nn.module import Module
from memcalc.nn.run_context import run_context
from memcalc.nn.stack import Stack
from memcalc.tables.dtypes import FP16, FP32


class FlatAttention(BartAttention):
    """Attention over batch and heads as one dimension, with scores kept above the least number there is."""

    def forward(  # type: ignore[override]
        self, hidden: Tensor, mask: Tensor | None, cache: Cache | None
    ) -> tuple[Tensor, Tensor]:
        """[b, s, h] to [b, s, h], and the probabilities."""
        tape = hidden.tape
        batch, length, width = hidden.shape
        query = ops.mul_scalar(self.q_proj(hidden))
        key = self.k_proj(hidden)
        value = self.v_proj(hidden)
        key = split_heads(key, self.head_dim)
        value = split_heads(value, self.head_dim)
        if cache is not None:
            key, value = cache.update(self, key, value)
        count, seen = batch * (width // self.head_dim), key.shape[2]
        query = split_heads(query, self.head_dim)
        query = ops.reshape(query, count, -1, self.head_dim)
        key = ops.reshape(key, count, -1, self.head_dim)
        value = ops.reshape(value, count, -1, self.head_dim)
        weights = ops.bmm(query, ops.transpose(key, 1, 2))
        if mask is not None:
            weights = ops.add(ops.view(weights, batch, -1, length, seen), mask)
            weights = ops.maximum(weights, tape.empty((), FP32))
            weights = ops.view(weights, count, length, seen)
        half = weights.dtype is FP16
        weights = ops.to(ops.softmax(weights, FP32), FP16) if half else ops.softmax(weights)
        by_head = ops.view(weights, batch, -1, length, seen)
        weights = ops.view(by_head, count, length, seen)
        probs = ops.dropout(weights, self.dropout)
        out = ops.bmm(probs, value)
        out = ops.view(out, batch, -1, length, self.head_dim)
        out = ops.transpose(out, 1, 2)
        out = ops.reshape(out, batch, length, width)
        return self.out_proj(out), by_head


class XGLMModel(Module):
    """Scaled token embeddings, sinusoids from a buffer, blocks, LayerNorm."""

    def __init__(self, c: Config, hidden: int) -> None:
        if c.flag("add_cross_attention", False):
            raise ConfigError(f"{c.where} asks for 'add_cross_attention', which needs an encoder; take it out.")
        style = BlockStyle(
            hidden, c.text("activation_function"), c.probability("dropout"), c.probability("activation_dropout"), True
        )
        self.embed_tokens = Embedding(c.integer("vocab_size"), hidden)
        self.embed_positions = BufferedPositions(c.integer("max_position_embeddings") + 2, hidden)
        self.dropout = style.dropout

        def block(_: int) -> Module:
            attention = FlatAttention(hidden, c.integer("attention_heads"), c.probability("attention_dropout"))
            return DecoderBlock(style, attention, None, c.integer("ffn_dim"))

        self.layers = Stack(["block"] * c.integer("num_layers"), block)
        self.layer_norm = LayerNorm(hidden)

    def forward(self, ids: Tensor, padding: bool) -> Tensor:
        """Ids [b, s] to hidden states [b, s, h]."""
        inputs_embeds = ops.mul_scalar(self.embed_tokens(ids))
        mask = causal_mask(inputs_embeds, padding)
        position_ids = ops.unsqueeze(token_range(ids), 0)
        hidden = ops.add(inputs_embeds, self.embed_positions(ids, position_ids))
        hidden = ops.dropout(hidden, self.dropout)
        for layer in self.layers:
            hidden = layer(hidden, mask, cache=run_context(ids).cache)
        return self.layer_norm(hidden)


class BioGptModel(Module):
    """Scaled token embeddings, learned positions, blocks, LayerNorm.

    It makes a mask of ones where it gets none, so that a real causal mask reaches attention.
    """

    assumption = OWN_ONES_NOTE

    def __init__(self, c: Config, hidden: int) -> None:
        style = BlockStyle(
            hidden,
            c.text("hidden_act"),
            c.probability("hidden_dropout_prob"),
            c.probability("activation_dropout"),
            norm_first=True,
            act_apart=True,
        )
        heads_, _, _ = c.heads()
        self.embed_tokens = Embedding(c.integer("vocab_size"), hidden)
        self.embed_positions = PositionTable(c.integer("max_position_embeddings") + 2, hidden, offset=2)
        self.dropout = style.dropout

        def block(_: int) -> Module:
            attention = BartAttention(hidden, heads_, c.probability("attention_probs_dropout_prob"))
            return DecoderBlock(style, attention, None, c.integer("intermediate_size"))

        self.layers = Stack(["block"] * c.integer("num_hidden_layers"), block)
        self.layer_norm = LayerNorm(hidden)

    def forward(self, ids: Tensor, padding: bool) -> Tensor:
        """Ids [b, s] to hidden states [b, s, h]."""
        tape = ids.tape
        inputs_embeds = ops.mul_scalar(self.embed_tokens(ids))
        past = run_context(tape).past_length
        _seen = padding_input(ids) if padding else tape.empty((ids.shape[0], past + ids.shape[1]), FP32)
        mask = causal_mask(inputs_embeds, padding=True)
        position_ids = ops.unsqueeze(ops.add_scalar(token_range(ids)), 0)
        positions = self.embed_positions(ops.add_scalar(position_ids))
        hidden = ops.add(inputs_embeds, positions)
        hidden = ops.dropout(hidden, self.dropout)
        for layer in self.layers:
            hidden = layer(hidden, mask=mask, cache=run_context(tape).cache, position_ids=position_ids)
        return self.layer_norm(hidden)


def xglm(c: Config, architecture: str | None) -> Network:
    """XGLM of every size."""
    hidden = c.integer("d_model")
    model = XGLMModel(c, hidden)
    return heads.decoder(c, architecture, model, hidden, model.embed_tokens, tied=c.flag("tie_word_embeddings"))


def biogpt(c: Config, architecture: str | None) -> Network:
    """BioGPT, with a language-model head or as a sequence classifier."""
    hidden = c.integer("hidden_size")
    model = BioGptModel(c, hidden)
    if (architecture or "").endswith("ForTokenClassification"):
        raise heads.unknown_head(c, architecture or "", ("ForCausalLM", "ForSequenceClassification", "Model"))
    return heads.decoder(c, architecture, model, hidden, model.embed_tokens, tied=c.flag("tie_word_embeddings"))


FAMILIES = table(
    Family(
        "xglm",
        xglm,
        {
            "vocab_size": 256008,
            "max_position_embeddings": 2048,
            "d_model": 1024,
            "ffn_dim": 4096,
            "num_layers": 24,
            "attention_heads": 16,
            "activation_function": "gelu",
            "dropout": 0.1,
            "attention_dropout": 0.1,
            "activation_dropout": 0.0,
            "tie_word_embeddings": True,
            "pad_token_id": 1,
        },
        {"num_attention_heads": "attention_heads", "hidden_size": "d_model", "num_hidden_layers": "num_layers"},
        attention="eager",
    ),
    Family(
        "biogpt",
        biogpt,
        llama_sizes(
            (42384, 1024, 4096, 24, 16, 0, 1024),
            hidden_act="gelu",
            hidden_dropout_prob=0.1,
            attention_probs_dropout_prob=0.1,
            activation_dropout=0.0,
            tie_word_embeddings=True,
            pad_token_id=1,
        ),
        verified="measured rows",
    ),
)
