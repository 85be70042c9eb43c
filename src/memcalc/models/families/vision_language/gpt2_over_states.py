"""GPT-2 as a decoder over the states of an encoder: every block looks at them between attention and MLP."""

from __future__ import annotations

from functools import partial

from memcalc import ops
from memcalc.autograd.tensor import Tensor
from memcalc.config.reader import Config
from memcalc.models.families.decoders.gpt2 import FusedAttention
from memcalc.nn.kv_cache import Cache
from memcalc.nn.layers.attention_backends import attend_same_dtype, split_heads
from memcalc.nn.layers.linear import Conv1D, Embedding, Linear, PositionTable
from memcalc.nn.layers.masks import causal_mask
from memcalc.nn.layers.mlp import PlainMLP
from memcalc.nn.layers.norms import LayerNorm
from memcalc.nn.model import positions
from memcalc.nn.module import Module
from memcalc.nn.stack import Stack


class CrossAttention(Module):
    """Attention over an encoder's states, whose keys and values come from one projection."""

    scope = "attention"

    def __init__(self, c: Config, hidden: int) -> None:
        self.head_dim = hidden // c.divides("num_attention_heads", "hidden_size")
        self.c_attn = Conv1D(hidden, 2 * hidden, group="attention")
        self.q_attn = Conv1D(hidden, hidden, group="attention")
        self.c_proj = Conv1D(hidden, hidden, group="attention")
        self.attn_dropout = c.probability("attn_pdrop")
        self.resid_dropout = c.probability("resid_pdrop")

    def forward(self, hidden: Tensor, states: Tensor, cache: Cache | None) -> tuple[Tensor, Tensor | None]:
        """[b, t, h] and states [b, n, h] to [b, t, h], and the probabilities where they exist."""
        query = self.q_attn(hidden)
        cached = None if cache is None else cache.cross_attention_key_values(self)
        if cached is not None:
            key, value = cached
        else:
            key, value = ops.chunk(self.c_attn(states), 2, 2)
            key = split_heads(key, self.head_dim)
            value = split_heads(value, self.head_dim)
        query = split_heads(query, self.head_dim)
        if cache is not None and cached is None:
            key, value = cache.update(self, key, value)
        del cached
        out, weights = attend_same_dtype(query, key, value, None, self.attn_dropout)
        out = ops.contiguous(ops.reshape(out, *out.shape[:-2], -1))
        out = self.c_proj(out)
        out = ops.dropout(out, self.resid_dropout)
        return out, weights


class GPT2CrossBlock(Module):
    """LayerNorm, attention, add; the same over the states; LayerNorm, MLP, add."""

    scope = "residual stream"

    def __init__(self, c: Config, hidden: int) -> None:
        inner, act = c.integer("n_inner", 4 * hidden), c.text("activation_function")
        self.ln_1 = LayerNorm(hidden)
        self.attn = FusedAttention(c, hidden)
        self.ln_2 = LayerNorm(hidden)
        self.crossattention = CrossAttention(c, hidden)
        self.ln_cross_attn = LayerNorm(hidden)
        conv = partial(Conv1D, group="MLP")
        rate = c.probability("resid_pdrop")
        self.mlp = PlainMLP(hidden, inner, act, names=("c_fc", "c_proj"), bias=True, dropout=rate, linear=conv)

    def forward(
        self, hidden: Tensor, mask: Tensor | None, states: Tensor, position_ids: Tensor, cache: Cache | None
    ) -> Tensor:
        """[b, t, h] to [b, t, h]. Position ids are given, and not used."""
        residual = hidden
        hidden = self.ln_1(hidden)
        attended, _weights = self.attn(hidden, mask=mask, cache=cache)
        hidden = ops.add(attended, residual)
        residual = hidden
        hidden = self.ln_cross_attn(hidden)
        crossed, _weights = self.crossattention(hidden, states, cache)
        hidden = ops.add(residual, crossed)
        residual = hidden
        hidden = self.ln_2(hidden)
        fed = self.mlp(hidden)
        return ops.add(residual, fed)


class GPT2OverStates(Module):
    """Token and position embeddings, blocks, LayerNorm, and a head that shares the table of tokens."""

    def __init__(self, c: Config) -> None:
        hidden, vocab = c.integer("hidden_size"), c.integer("vocab_size")
        self.wte = Embedding(vocab, hidden)
        self.wpe = PositionTable(c.integer("max_position_embeddings"), hidden)
        self.dropout = c.probability("embd_pdrop")
        self.h = Stack(
            ["block"] * c.integer("num_hidden_layers"), lambda _: GPT2CrossBlock(c, hidden), name="decoder block"
        )
        self.ln_f = LayerNorm(hidden)
        self.lm_head = Linear(hidden, vocab, group="LM head")
        if c.flag("tie_word_embeddings"):
            self.lm_head.weight = self.wte.weight

    def forward(self, ids: Tensor, states: Tensor, cache: Cache | None) -> Tensor:
        """Ids [b, t] and encoder states [b, n, h] to logits [b, t, V]."""
        hidden = self._decoded(ids, states, cache)
        with ids.tape.scoped("head and loss"):
            logits: Tensor = self.lm_head(hidden)
        return logits

    def _decoded(self, ids: Tensor, states: Tensor, cache: Cache | None) -> Tensor:
        ids = ops.view(ids, -1, ids.shape[-1])
        inputs_embeds = self.wte(ids)
        position_ids = positions(ids.tape, ids.shape[1])
        position_embeds = self.wpe(position_ids)
        hidden = ops.add(inputs_embeds, position_embeds)
        mask = causal_mask(inputs_embeds, False, past=0 if cache is None else cache.past)
        hidden = ops.dropout(hidden, self.dropout)
        for block in self.h:
            hidden = block(hidden, mask, states, position_ids=position_ids, cache=cache)
        hidden = self.ln_f(hidden)
        return ops.view(hidden, *hidden.shape)
