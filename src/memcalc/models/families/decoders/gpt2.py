"""GPT-2: learned positions, LayerNorm before attention and MLP, one projection for query, key and value, dropout."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from memcalc import ops
from memcalc.autograd.tensor import Tensor
from memcalc.config.reader import Config
from memcalc.errors import ConfigError
from memcalc.models.common import heads
from memcalc.models.family import Family, sizes, table
from memcalc.nn.kv_cache import Cache
from memcalc.nn.layers.attention_backends import attend, attend_same_dtype
from memcalc.nn.layers.linear import Conv1D, Embedding, Linear, PositionTable
from memcalc.nn.layers.masks import causal_mask, padding_input
from memcalc.nn.layers.mlp import PlainMLP
from memcalc.nn.layers.norms import LayerNorm
from memcalc.nn.model import Network, positions
from memcalc.nn.module import Buffer, Module
from memcalc.nn.run_context import run_context
from memcalc.nn.stack import Stack
from memcalc.tables.dtypes import BOOL, FP32


class FusedAttention(Module):
    """Attention with one projection for query, key and value, and dropout on probabilities and output."""

    scope = "attention"

    def __init__(self, c: Config, hidden: int) -> None:
        count = c.integer("num_attention_heads")
        if hidden % count:
            raise ConfigError(f"{c.where} has 'n_embd' {hidden}, which 'n_head' {count} does not divide; correct one.")
        self.head_dim = hidden // count
        self.upcast = c.flag("reorder_and_upcast_attn")
        self.c_attn = Conv1D(hidden, 3 * hidden, group="attention")
        self.c_proj = Conv1D(hidden, hidden, group="attention")
        self.attn_dropout = c.probability("attn_pdrop")
        self.resid_dropout = c.probability("resid_pdrop")

    def forward(self, hidden: Tensor, mask: Tensor | None, cache: Cache | None = None) -> tuple[Tensor, Tensor | None]:
        """[b, s, h] to [b, s, h], and the probabilities where they exist. A `cache` is filled in training too."""
        query, key, value = ops.chunk(self.c_attn(hidden), 3, 2)
        key = ops.transpose(ops.view(key, *key.shape[:-1], -1, self.head_dim), 1, 2)
        value = ops.transpose(ops.view(value, *value.shape[:-1], -1, self.head_dim), 1, 2)
        query = ops.transpose(ops.view(query, *query.shape[:-1], -1, self.head_dim), 1, 2)
        if (cache := cache or run_context(query).cache) is not None:
            key, value = cache.update(self, key, value)
        own = _upcast if self.upcast and run_context(query).attention == "eager" else attend_same_dtype
        out, weights = own(query, key, value, mask, self.attn_dropout)
        out = ops.contiguous(ops.reshape(out, *out.shape[:-2], -1))
        out = self.c_proj(out)
        out = ops.dropout(out, self.resid_dropout)
        return out, weights


def _upcast(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, dropout: float
) -> tuple[Tensor, Tensor | None]:
    """Eager attention whose scores come from fp32 copies of query and key, outside autocast."""
    batch, count, length, dim = query.shape
    tape, seen = query.tape, key.shape[2]
    weights = tape.empty((batch * count, length, seen), FP32)  # what the product replaces
    with tape.autocasting(None):
        q = ops.reshape(query, -1, length, dim)
        k = ops.reshape(ops.transpose(key, -1, -2), -1, dim, seen)
        weights = ops.baddbmm(weights, ops.to(q, FP32), ops.to(k, FP32), scaled=True)
        weights = ops.reshape(weights, batch, count, length, seen)
    if mask is not None:
        weights = ops.add(weights, mask)
    weights = ops.softmax(weights)
    weights = ops.to(weights, value.dtype)
    weights = ops.dropout(weights, dropout)
    out = ops.matmul(weights, value)
    return ops.transpose(out, 1, 2), weights


class GPT2Block(Module):
    """LayerNorm, attention, add; LayerNorm, MLP, add.

    width, dropout: config keys of the MLP's width and of the dropout on its output.
    linear: makes the MLP's linear layers.
    returns_weights: return the attention's probabilities too.
    """

    scope = "residual stream"

    def __init__(
        self,
        c: Config,
        hidden: int,
        attention: Module,
        *,
        width: str = "n_inner",
        dropout: str = "resid_pdrop",
        linear: Callable[[int, int], Module] | None = None,
        returns_weights: bool = False,
    ) -> None:
        self.ln_1 = LayerNorm(hidden)
        self.attn = attention
        self.ln_2 = LayerNorm(hidden)
        inner, act, rate = c.integer(width, 4 * hidden), c.text("activation_function"), c.probability(dropout)
        self.mlp = PlainMLP(hidden, inner, act, names=("c_fc", "c_proj"), bias=True, dropout=rate, linear=linear)
        self.returns_weights = returns_weights

    def forward(
        self, hidden: Tensor, mask: Tensor | None, position_ids: Tensor | None = None
    ) -> Tensor | tuple[Tensor, Tensor | None]:
        """[b, s, h] to [b, s, h], and the probabilities if they are returned."""
        residual = hidden
        hidden = self.ln_1(hidden)
        attended, weights = self.attn(hidden, mask=mask)
        hidden = ops.add(attended, residual)
        residual = hidden
        hidden = self.ln_2(hidden)
        fed = self.mlp(hidden)
        out = ops.add(residual, fed)
        return (out, weights) if self.returns_weights else out


class GPT2Model(Module):
    """Token and position embeddings, dropout, blocks, final LayerNorm."""

    def __init__(self, c: Config, hidden: int) -> None:
        self.wte = Embedding(c.integer("vocab_size"), hidden)
        self.wpe = PositionTable(c.integer("max_position_embeddings"), hidden)
        self.embd_dropout = c.probability("embd_pdrop")
        self.h = Stack(
            ["block"] * c.integer("num_hidden_layers"),
            lambda _: GPT2Block(c, hidden, FusedAttention(c, hidden), linear=partial(Conv1D, group="MLP")),
        )
        self.ln_f = LayerNorm(hidden)

    def forward(self, ids: Tensor, padding: bool) -> Tensor:
        """Ids [b, s] to hidden states [b, s, h]."""
        ids = ops.view(ids, -1, ids.shape[-1])
        inputs_embeds = self.wte(ids)
        position_ids = positions(ids.tape, ids.shape[1])
        position_embeds = self.wpe(position_ids)
        hidden = ops.add(inputs_embeds, position_embeds)
        if padding:
            ops.view(padding_input(ids), *ids.shape)
        mask = causal_mask(inputs_embeds, padding)
        hidden = ops.dropout(hidden, self.embd_dropout)
        for block in self.h:
            hidden = block(hidden, mask, position_ids=position_ids)
        hidden = self.ln_f(hidden)
        return ops.view(hidden, *hidden.shape)


class BigCodeAttention(Module):
    """Attention from one projection: all queries, one key and one value; or, head by head, a query, key and value."""

    scope = "attention"

    def __init__(self, c: Config, hidden: int) -> None:
        self.heads, _, self.head_dim = c.heads()
        self.multi_query = c.flag("multi_query", True)
        self.repeats = self.heads if self.multi_query else 1
        width = hidden + 2 * hidden // self.repeats
        self.c_attn = Linear(hidden, width, bias=True, group="attention")
        self.c_proj = Linear(hidden, hidden, bias=True, group="attention")
        self.attn_dropout = c.probability("attn_pdrop")
        self.resid_dropout = c.probability("resid_pdrop")

    def forward(self, hidden: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """[b, s, h] to [b, s, h], and the probabilities where they exist."""
        lead, dim = hidden.shape[:-1], self.head_dim
        if self.multi_query:
            sizes = [self.heads * dim, dim, dim]
            query, key, value = ops.split(ops.unsqueeze(self.c_attn(hidden), 1), sizes, 3)
            query = ops.transpose(ops.view(query, *lead, -1, dim), 1, 2)
        else:
            apart = ops.transpose(ops.view(self.c_attn(hidden), *lead, self.heads, 3 * dim), 1, 2)
            query, key, value = ops.split(apart, [dim] * 3, 3)
            del apart
        if (cache := run_context(query).cache) is not None:
            key, value = cache.update(self, key, value)
        out, weights = attend(query, key, value, mask, self.repeats, self.attn_dropout)
        out = ops.contiguous(ops.reshape(out, *lead, -1))
        out = self.c_proj(out)
        return ops.dropout(out, self.resid_dropout), weights


class LearnedPositionsModel(Module):
    """GPT-2's model as its successors have it. `dropout` is the config key of the dropout on the embeddings."""

    def __init__(self, c: Config, hidden: int, block: Callable[[], Module], *, dropout: str = "embd_pdrop") -> None:
        self.wte = Embedding(c.integer("vocab_size"), hidden)
        self.wpe = PositionTable(c.integer("max_position_embeddings"), hidden)
        self.dropout = c.probability(dropout)
        self.h = Stack(["block"] * c.integer("num_hidden_layers"), lambda _: block())
        self.ln_f = LayerNorm(hidden)

    def forward(self, ids: Tensor, padding: bool) -> Tensor:
        """Ids [b, s] to hidden states [b, s, h]."""
        inputs_embeds = self.wte(ids)
        position_ids = positions(ids.tape, ids.shape[1])
        mask = causal_mask(inputs_embeds, padding)
        position_embeds = self.wpe(position_ids)
        hidden = ops.add(inputs_embeds, position_embeds)
        hidden = ops.dropout(hidden, self.dropout)
        for block in self.h:
            outputs = block(hidden, mask=mask)  # a tuple keeps the probabilities until the next block returns
            hidden = outputs[0] if isinstance(outputs, tuple) else outputs
        hidden = self.ln_f(hidden)
        return ops.view(hidden, *hidden.shape)


class BigCodeModel(LearnedPositionsModel):
    """StarCoder: a causal mask of all positions is kept though nothing uses it."""

    def __init__(self, c: Config, hidden: int) -> None:
        super().__init__(c, hidden, lambda: GPT2Block(c, hidden, BigCodeAttention(c, hidden)))
        longest = c.integer("max_position_embeddings")
        self.bias = Buffer(longest, longest, dtype=BOOL, group="attention")


def learned_positions_lm(
    c: Config, architecture: str | None, model: GPT2Model | LearnedPositionsModel, hidden: int
) -> Network:
    """The decoder `model` of width `hidden` with its head."""
    tied = c.flag("tie_word_embeddings")
    return heads.decoder(c, architecture, model, hidden, model.wte, tied=tied, own_token_loss=True)


def _no_cross_attention(c: Config) -> None:
    if c.flag("add_cross_attention"):
        raise ConfigError(f"{c.where} has 'add_cross_attention', which memcalc does not describe here; remove it.")


def gpt2(c: Config, architecture: str | None) -> Network:
    """GPT-2 in every size, and what shares its config (Cerebras-GPT, DialoGPT)."""
    _no_cross_attention(c)
    hidden = c.integer("hidden_size")
    return learned_positions_lm(c, architecture, GPT2Model(c, hidden), hidden)


def gpt_bigcode(c: Config, architecture: str | None) -> Network:
    """StarCoder and SantaCoder: one key and value for all heads."""
    _no_cross_attention(c)
    hidden = c.integer("hidden_size")
    return learned_positions_lm(c, architecture, BigCodeModel(c, hidden), hidden)


_ALIASES = {
    "n_embd": "hidden_size",
    "n_positions": "max_position_embeddings",
    "n_head": "num_attention_heads",
    "n_layer": "num_hidden_layers",
}
_DROPOUTS = {"resid_pdrop": 0.1, "embd_pdrop": 0.1, "attn_pdrop": 0.1, "tie_word_embeddings": True}
FAMILIES = table(
    Family(
        "gpt2", gpt2, sizes((50257, 768, 0, 12, 12, 0, 1024), activation_function="gelu_new", **_DROPOUTS), _ALIASES
    ),
    Family(
        "gpt_bigcode",
        gpt_bigcode,
        sizes((50257, 768, 0, 12, 12, 0, 1024), activation_function="gelu_pytorch_tanh", **_DROPOUTS),
        _ALIASES,
    ),
)
