"""BLOOM: positions as a bias on the scores (ALiBi), one projection for query, key and value, a GELU of its own."""

from __future__ import annotations

from memcalc import ops
from memcalc.autograd.tensor import Tensor
from memcalc.config.reader import Config
from memcalc.models.common import heads
from memcalc.models.family import Family, table
from memcalc.nn.layers.alibi import alibi_by_mask, alibi_slopes
from memcalc.nn.layers.linear import Embedding, Linear
from memcalc.nn.layers.masks import causal_mask, padding_input
from memcalc.nn.layers.norms import LayerNorm
from memcalc.nn.model import Network
from memcalc.nn.module import Module
from memcalc.nn.run_context import run_context
from memcalc.nn.stack import Stack
from memcalc.tables.dtypes import FP32, INT64


def _gelu(x: Tensor) -> Tensor:
    """x·0.5·(1 + tanh(c·x·(1 + a·x·x)))."""
    return ops.mul(
        ops.mul_scalar(x),
        ops.add_scalar(ops.tanh(ops.mul(ops.mul_scalar(x), ops.add_scalar(ops.mul(ops.mul_scalar(x), x))))),
    )


def _gelu_gradient(grad: Tensor, x: Tensor) -> Tensor:
    tanh = ops.tanh(ops.mul(ops.mul_scalar(x), ops.add_scalar(ops.mul(ops.mul_scalar(x), x))))
    slope = ops.add(
        ops.mul(
            ops.mul_scalar(x),
            ops.mul(ops.add_scalar(ops.mul(tanh, tanh)), ops.add_scalar(ops.mul(ops.mul_scalar(x), x))),
        ),
        ops.mul_scalar(ops.add_scalar(tanh)),
    )
    return ops.mul(slope, grad)


def dropout_add(x: Tensor, residual: Tensor, dropout: float) -> Tensor:
    """residual + dropout(x)."""
    return ops.add(residual, ops.dropout(x, dropout))


class BloomAttention(Module):
    """Eager attention: the ALiBi bias goes into the product of queries and keys."""

    scope = "attention"

    def __init__(self, c: Config, hidden: int) -> None:
        self.heads, _, self.head_dim = c.heads()
        self.query_key_value = Linear(hidden, 3 * hidden, bias=True, group="attention")
        self.dense = Linear(hidden, hidden, bias=True, group="attention")
        self.dropout, self.hidden_dropout = c.probability("attention_dropout"), c.probability("hidden_dropout")

    def forward(
        self, hidden: Tensor, residual: Tensor, alibi: Tensor, mask: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """[b, s, h] to [b, s, h] with the residual added, and the probabilities."""
        batch, length, _ = hidden.shape
        fused = self.query_key_value(hidden)
        apart = ops.view(fused, batch, length, self.heads, 3, self.head_dim)
        query, key, value = (ops.transpose(ops.select(apart, -2), 1, 2) for _ in range(3))
        del apart
        if (cache := run_context(query).cache) is not None:
            key, value = cache.update(self, key, value)
        rows = batch * self.heads
        query = ops.reshape(query, rows, -1, self.head_dim)
        key = ops.transpose(ops.reshape(key, rows, -1, self.head_dim), -1, -2)
        value = ops.reshape(value, rows, -1, self.head_dim)
        scores = ops.baddbmm(alibi, query, key, scaled=True)
        weights = ops.view(scores, batch, self.heads, length, -1)
        if mask is not None:
            weights = ops.add(weights, mask)
        probs = ops.to(ops.softmax(weights, FP32), query.dtype)
        probs = ops.dropout(probs, self.dropout)
        flat = ops.view(probs, rows, length, -1)
        context = ops.bmm(flat, value)
        context = ops.permute(ops.view(context, batch, self.heads, length, self.head_dim), 0, 2, 1, 3)
        context = ops.reshape(context, batch, length, -1)
        out = self.dense(context)
        return dropout_add(out, residual, self.hidden_dropout), probs


class BloomMLP(Module):
    """down(gelu(up(x))) with dropout, and the residual added."""

    scope = "MLP"

    def __init__(self, c: Config, hidden: int) -> None:
        self.dense_h_to_4h = Linear(hidden, 4 * hidden, bias=True, group="MLP")
        self.dense_4h_to_h = Linear(4 * hidden, hidden, bias=True, group="MLP")
        self.dropout = c.probability("hidden_dropout")

    def forward(self, hidden: Tensor, residual: Tensor) -> Tensor:
        """[b, s, h] twice to [b, s, h]."""
        hidden = ops.autograd_function(self.dense_h_to_4h(hidden), _gelu, _gelu_gradient)
        out = self.dense_4h_to_h(hidden)
        return dropout_add(out, residual, self.dropout)


class BloomBlock(Module):
    """LayerNorm, attention; LayerNorm, MLP. What is added is their input, or that normalised."""

    scope = "residual stream"

    def __init__(self, c: Config, hidden: int) -> None:
        self.input_layernorm = LayerNorm(hidden)
        self.self_attention = BloomAttention(c, hidden)
        self.post_attention_layernorm = LayerNorm(hidden)
        self.mlp = BloomMLP(c, hidden)
        self.normed_residual = c.flag("apply_residual_connection_post_layernorm")

    def forward(self, hidden: Tensor, alibi: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """[b, s, h] to [b, s, h], and the probabilities."""
        normed = self.input_layernorm(hidden)
        residual = normed if self.normed_residual else hidden
        attended, weights = self.self_attention(normed, residual, alibi=alibi, mask=mask)
        normed = self.post_attention_layernorm(attended)
        residual = normed if self.normed_residual else attended
        return self.mlp(normed, residual), weights


class BloomModel(Module):
    """Embeddings with a LayerNorm, the bias, blocks, LayerNorm."""

    def __init__(self, c: Config, hidden: int) -> None:
        self.word_embeddings = Embedding(c.integer("vocab_size"), hidden)
        self.word_embeddings_layernorm = LayerNorm(hidden)
        self.h = Stack(["block"] * c.integer("num_hidden_layers"), lambda _: BloomBlock(c, hidden))
        self.ln_f = LayerNorm(hidden)
        self.heads = c.integer("num_attention_heads")

    def forward(self, ids: Tensor, padding: bool) -> Tensor:
        """Ids [b, s] to hidden states [b, s, h]."""
        tape, batch = ids.tape, ids.shape[0]
        inputs_embeds = self.word_embeddings(ids)
        hidden = self.word_embeddings_layernorm(inputs_embeds)
        with tape.scoped("attention mask"):
            if padding:
                alibi = alibi_by_mask(padding_input(ids), self.heads, hidden.dtype)
            else:
                seen = ids.shape[1] + run_context(tape).past_length
                slopes = alibi_slopes(tape, self.heads)
                alibi = ops.mul(ops.view(slopes, -1, 1, 1), tape.empty((seen,), INT64))
                alibi = ops.to(ops.repeat(alibi, batch), hidden.dtype)
        mask = causal_mask(inputs_embeds, padding)
        for block in self.h:
            outputs = block(hidden, alibi=alibi, mask=mask)
            hidden = outputs[0]
        return self.ln_f(hidden)


def bloom(c: Config, architecture: str | None) -> Network:
    """BLOOM and BLOOMZ."""
    hidden = c.integer("hidden_size")
    model = BloomModel(c, hidden)
    return heads.decoder(
        c, architecture, model, hidden, model.word_embeddings, tied=c.flag("tie_word_embeddings"), own_token_loss=True
    )


FAMILIES = table(
    Family(
        "bloom",
        bloom,
        {
            "vocab_size": 250880,
            "hidden_size": 64,
            "num_hidden_layers": 2,
            "num_attention_heads": 8,
            "hidden_dropout": 0.0,
            "attention_dropout": 0.0,
            "tie_word_embeddings": True,
        },
        {"n_embed": "hidden_size", "n_layer": "num_hidden_layers", "n_head": "num_attention_heads"},
        attention="eager",
    )
)
