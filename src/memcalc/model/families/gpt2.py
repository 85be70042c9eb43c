"""GPT-2: learned positions, LayerNorm before attention and MLP, one projection for query, key and value, dropout."""

from __future__ import annotations

from memcalc.errors import ConfigError
from memcalc.model import ops
from memcalc.model.config import Config
from memcalc.model.families import Family
from memcalc.model.module import Module, Stack
from memcalc.model.network import CausalLM, Network, positions
from memcalc.model.sublayers.attention import attend_same_dtype
from memcalc.model.sublayers.linear import Conv1D, Embedding
from memcalc.model.sublayers.masks import causal_mask
from memcalc.model.sublayers.mlp import activation
from memcalc.model.sublayers.norms import LayerNorm
from memcalc.model.tensor import Tensor


class FusedAttention(Module):
    """Attention with one projection for query, key and value, and dropout on probabilities and output."""

    scope = "attention"

    def __init__(self, c: Config, hidden: int) -> None:
        heads = c.integer("num_attention_heads")
        if hidden % heads:
            raise ConfigError(f"{c.where} has 'n_embd' {hidden}, which 'n_head' {heads} does not divide; correct one.")
        self.head_dim = hidden // heads
        self.c_attn = Conv1D(hidden, 3 * hidden, group="attention")
        self.c_proj = Conv1D(hidden, hidden, group="attention")
        self.attn_dropout = c.probability("attn_pdrop")
        self.resid_dropout = c.probability("resid_pdrop")

    def forward(self, hidden: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """[b, s, h] to [b, s, h], and the probabilities where they exist."""
        query, key, value = ops.chunk(self.c_attn(hidden), 3, 2)
        key = ops.transpose(ops.view(key, *key.shape[:-1], -1, self.head_dim), 1, 2)
        value = ops.transpose(ops.view(value, *value.shape[:-1], -1, self.head_dim), 1, 2)
        query = ops.transpose(ops.view(query, *query.shape[:-1], -1, self.head_dim), 1, 2)
        if query.tape.cache is not None:
            key, value = query.tape.cache.update(self, key, value)
        out, weights = attend_same_dtype(query, key, value, mask, self.attn_dropout)
        out = ops.contiguous(ops.reshape(out, *out.shape[:-2], -1))
        out = self.c_proj(out)
        out = ops.dropout(out, self.resid_dropout)
        return out, weights


class MLP(Module):
    """c_proj(act(c_fc(x))) with dropout behind it."""

    scope = "MLP"

    def __init__(self, c: Config, hidden: int, width: int) -> None:
        self.c_fc = Conv1D(hidden, width, group="MLP")
        self.c_proj = Conv1D(width, hidden, group="MLP")
        self.act = activation(c.text("activation_function"))
        self.dropout = c.probability("resid_pdrop")

    def forward(self, hidden: Tensor) -> Tensor:
        """[b, s, h] to [b, s, h]."""
        hidden = self.c_fc(hidden)
        hidden = self.act(hidden)
        hidden = self.c_proj(hidden)
        return ops.dropout(hidden, self.dropout)


class GPT2Block(Module):
    """LayerNorm, attention, add; LayerNorm, MLP, add."""

    scope = "residual stream"

    def __init__(self, c: Config, hidden: int) -> None:
        self.ln_1 = LayerNorm(hidden)
        self.attn = FusedAttention(c, hidden)
        self.ln_2 = LayerNorm(hidden)
        self.mlp = MLP(c, hidden, c.integer("n_inner", 4 * hidden))

    def forward(self, hidden: Tensor, mask: Tensor | None, position_ids: Tensor) -> Tensor:
        """[b, s, h] to [b, s, h]."""
        residual = hidden
        hidden = self.ln_1(hidden)
        attended, _weights = self.attn(hidden, mask=mask)
        hidden = ops.add(attended, residual)
        residual = hidden
        hidden = self.ln_2(hidden)
        fed = self.mlp(hidden)
        return ops.add(residual, fed)


class GPT2Model(Module):
    """Token and position embeddings, dropout, blocks, final LayerNorm."""

    def __init__(self, c: Config, hidden: int) -> None:
        self.wte = Embedding(c.integer("vocab_size"), hidden)
        self.wpe = Embedding(c.integer("max_position_embeddings"), hidden)
        self.embd_dropout = c.probability("embd_pdrop")
        self.h = Stack(["block"] * c.integer("num_hidden_layers"), lambda _: GPT2Block(c, hidden))
        self.ln_f = LayerNorm(hidden)

    def forward(self, ids: Tensor, padding: bool) -> Tensor:
        """Ids [b, s] to hidden states [b, s, h]."""
        ids = ops.view(ids, -1, ids.shape[-1])
        inputs_embeds = self.wte(ids)
        position_ids = positions(ids.tape, ids.shape[1])
        position_embeds = self.wpe(position_ids)
        hidden = ops.add(inputs_embeds, position_embeds)
        mask = causal_mask(inputs_embeds, padding)
        hidden = ops.dropout(hidden, self.embd_dropout)
        for block in self.h:
            hidden = block(hidden, mask=mask, position_ids=position_ids)
        hidden = self.ln_f(hidden)
        return ops.view(hidden, *hidden.shape)


def gpt2(c: Config, architecture: str | None) -> Network:
    """GPT-2 in every size, and what shares its config (Cerebras-GPT, DialoGPT)."""
    hidden = c.integer("hidden_size")
    model = GPT2Model(c, hidden)
    return CausalLM(
        model, hidden, c.integer("vocab_size"), tied_to=model.wte if c.flag("tie_word_embeddings", True) else None
    )


FAMILIES = {
    "gpt2": Family("gpt2", gpt2, {
        "vocab_size": 50257, "max_position_embeddings": 1024, "hidden_size": 768, "num_hidden_layers": 12,
        "num_attention_heads": 12, "activation_function": "gelu_new", "resid_pdrop": 0.1, "embd_pdrop": 0.1,
        "attn_pdrop": 0.1, "tie_word_embeddings": True,
    }, {
        "n_embd": "hidden_size", "n_positions": "max_position_embeddings", "n_head": "num_attention_heads",
        "n_layer": "num_hidden_layers",
    }, verified="measured rows, exact counts"),
}  # fmt: skip
