"""MPT: ALiBi added to eager scores, LayerNorm without bias, no biases at all."""

from __future__ import annotations

from memcalc import ops
from memcalc.autograd.tape import Tape
from memcalc.autograd.tensor import Tensor
from memcalc.config.reader import Config
from memcalc.models.common import heads
from memcalc.models.family import Family, table
from memcalc.nn.layers.linear import Embedding, Linear, check_length
from memcalc.nn.layers.masks import causal_mask
from memcalc.nn.layers.norms import LayerNorm
from memcalc.nn.model import Network
from memcalc.nn.module import Module
from memcalc.nn.run_context import run_context
from memcalc.nn.stack import Stack
from memcalc.tables.dtypes import BOOL, FP32, INT32, INT64


class MptAttention(Module):
    """One projection, which may be clamped; the bias is cut to the keys that there are."""

    scope = "attention"

    def __init__(self, c: Config, options: Config, hidden: int) -> None:
        self.heads, _, self.head_dim = c.heads()
        self.Wqkv = Linear(hidden, 3 * hidden, group="attention")
        self.out_proj = Linear(hidden, hidden, group="attention")
        self.dropout = options.probability("attn_pdrop", 0.0)
        self.clipped = options.has("clip_qkv")

    def _heads(self, x: Tensor) -> Tensor:
        return ops.transpose(ops.reshape(x, *x.shape[:2], self.heads, self.head_dim), 1, 2)

    def forward(self, hidden: Tensor, bias: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
        """[b, s, h] to [b, s, h], and the probabilities."""
        mixed = self.Wqkv(hidden)
        if self.clipped:
            mixed = ops.clamp(mixed)
        query, key, value = ops.chunk(mixed, 3, 2)
        query = self._heads(query)
        key = self._heads(key)
        value = self._heads(value)
        if (cache := run_context(query).cache) is not None:
            key, value = cache.update(self, key, value)
        scores = ops.mul_scalar(ops.matmul(query, ops.transpose(key, -1, -2)))
        bias = ops.narrow(bias, 2, min(bias.shape[2], key.shape[-2]))
        scores = ops.add(scores, bias)
        if mask is not None:
            scores = ops.masked_fill(scores, mask)
        weights = ops.to(ops.softmax(ops.to(scores, FP32)), value.dtype)
        weights = ops.dropout(weights, self.dropout)
        out = ops.matmul(weights, value)
        out = ops.view(ops.contiguous(ops.permute(out, 0, 2, 1, 3)), *hidden.shape[:2], -1)
        return self.out_proj(out), weights


class MptMLP(Module):
    """down(gelu(up(x))) with dropout, and the residual added."""

    scope = "MLP"

    def __init__(self, hidden: int, dropout: float) -> None:
        self.up_proj = Linear(hidden, 4 * hidden, group="MLP")
        self.down_proj = Linear(4 * hidden, hidden, group="MLP")
        self.dropout = dropout

    def forward(self, hidden: Tensor, residual: Tensor) -> Tensor:
        """[b, s, h] twice to [b, s, h]."""
        hidden = ops.gelu(self.up_proj(hidden))
        down = self.down_proj(hidden)
        out = ops.dropout(down, self.dropout)
        return ops.add(out, residual)


class MptBlock(Module):
    """LayerNorm, attention; LayerNorm, MLP."""

    scope = "residual stream"

    def __init__(self, c: Config, options: Config, hidden: int) -> None:
        self.dropout = options.probability("attn_pdrop", 0.0)
        self.norm_1 = LayerNorm(hidden, bias=False)
        self.attn = MptAttention(c, options, hidden)
        self.norm_2 = LayerNorm(hidden, bias=False)
        self.ffn = MptMLP(hidden, self.dropout)

    def forward(self, hidden: Tensor, bias: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
        """[b, s, h] to [b, s, h], and the probabilities."""
        normed = self.norm_1(hidden)
        residual = hidden
        attended, weights = self.attn(normed, bias=bias, mask=mask)
        hidden = ops.add(ops.dropout(attended, self.dropout), residual)
        normed = self.norm_2(hidden)
        residual = hidden
        return self.ffn(normed, residual), weights


class MptModel(Module):
    """Embeddings, the bias for the longest sequence, blocks, LayerNorm."""

    def __init__(self, c: Config, hidden: int) -> None:
        options = Config(c.section("attn_config"), where=f"'attn_config' of {c.where}")
        self.wte = Embedding(c.integer("vocab_size"), hidden)
        self.blocks = Stack(["block"] * c.integer("num_hidden_layers"), lambda _: MptBlock(c, options, hidden))
        self.norm_f = LayerNorm(hidden, bias=False)
        self.heads, self.longest = c.integer("num_attention_heads"), c.integer("max_seq_len")

    def forward(self, ids: Tensor, padding: bool) -> Tensor:
        """Ids [b, s] to hidden states [b, s, h]."""
        check_length(ids, self.longest)
        inputs_embeds = self.wte(ids)
        hidden = inputs_embeds
        with ids.tape.scoped("attention mask"):
            alibi = _alibi(ids.tape, self.heads, self.longest)
            additive = causal_mask(inputs_embeds, padding)
            mask = None if additive is None else ops.to(additive, BOOL)
            del additive
        for block in self.blocks:
            outputs = block(hidden, bias=alibi, mask=mask)
            hidden = outputs[0]
        return self.norm_f(hidden)


def _alibi(tape: Tape, heads: int, length: int) -> Tensor:
    """The bias [heads, 1, length] in fp32, with a slope for each head."""
    power_of_two = 1 << (heads - 1).bit_length()
    distances = ops.view(tape.empty((length,), INT32), 1, 1, 1, length)
    base = ops.to(tape.empty((power_of_two,), INT64), FP32)
    base = ops.mul_scalar(base)
    slopes = ops.view(ops.mul_scalar(ops.empty_like(base)), 1, power_of_two, 1, 1)
    if power_of_two != heads:
        half = ops.slice(slopes, 1, 2)
        slopes = ops.narrow(ops.cat((half, half), 1), 1, heads)
    return ops.squeeze(ops.mul(distances, slopes), 0)


def mpt(c: Config, architecture: str | None) -> Network:
    """MPT 7B and 30B."""
    hidden = c.integer("hidden_size")
    model = MptModel(c, hidden)
    return heads.decoder(
        c, architecture, model, hidden, model.wte, tied=c.flag("tie_word_embeddings"), own_token_loss=True
    )


FAMILIES = table(
    Family(
        "mpt",
        mpt,
        {
            "vocab_size": 50368,
            "hidden_size": 2048,
            "num_hidden_layers": 24,
            "num_attention_heads": 16,
            "max_seq_len": 2048,
            "tie_word_embeddings": True,
        },
        {"d_model": "hidden_size", "n_heads": "num_attention_heads", "n_layers": "num_hidden_layers"},
        attention="eager",
        verified="measured rows",
    )
)
