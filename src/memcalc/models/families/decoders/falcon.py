"""Falcon: attention and MLP side by side; one projection, with a key and value for all heads, for some, or for each."""

from __future__ import annotations

from memcalc import ops
from memcalc.autograd.tensor import Tensor
from memcalc.config.reader import Config
from memcalc.models.common import heads
from memcalc.models.families.decoders.bloom import dropout_add
from memcalc.models.family import Family, sizes, table
from memcalc.nn.layers.alibi import alibi_by_mask
from memcalc.nn.layers.linear import Embedding, Linear
from memcalc.nn.layers.masks import causal_mask, padding_input
from memcalc.nn.layers.mlp import activation
from memcalc.nn.layers.norms import LayerNorm
from memcalc.nn.layers.rotary import RotaryEmbedding, Rotation, apply_rotary
from memcalc.nn.model import Network, positions
from memcalc.nn.module import Module
from memcalc.nn.run_context import run_context
from memcalc.nn.stack import Stack
from memcalc.tables.dtypes import BOOL, FP32, INT64


class FalconLinear(Linear):
    """x @ W.T + bias as two operations. Autocast casts the transposed weight anew at every call."""

    def forward(self, x: Tensor) -> Tensor:
        """[..., in] to [..., out]."""
        out = ops.matmul(x, ops.transpose(self.weight, 0, 1))
        return out if self.bias is None else ops.add(out, self.bias)


class FalconAttention(Module):
    """Attention over grouped heads; `alibi` stands for the rotary embedding where it is given."""

    scope = "attention"

    def __init__(self, c: Config, hidden: int) -> None:
        self.heads, _, self.head_dim = c.heads()
        self.grouped, self.multi_query = c.flag("new_decoder_architecture"), c.flag("multi_query", True)
        self.kv_heads = 1
        if self.grouped or not self.multi_query:
            self.kv_heads = c.divides("num_kv_heads", "num_attention_heads") if c.has("num_kv_heads") else self.heads
        bias = c.flag("bias")
        width = 3 * self.heads
        if self.grouped:
            width = self.heads + 2 * self.kv_heads
        elif self.multi_query:
            width = self.heads + 2
        self.query_key_value = FalconLinear(hidden, width * self.head_dim, bias=bias, group="attention")
        self.dense = FalconLinear(hidden, hidden, bias=bias, group="attention")
        self.dropout = c.probability("attention_dropout")

    def _split(self, fused: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """[b, s, all] to query, key and value [b, s, heads, d]."""
        if self.grouped:
            groups = self.heads // self.kv_heads
            apart = ops.view(fused, *fused.shape[:-1], -1, groups + 2, self.head_dim)
            query = ops.narrow(apart, 3, groups)
            key = ops.index_list(apart, 3)
            value = ops.index_list(apart, 3)
            key = ops.expand(key, *query.shape)
            value = ops.expand(value, *query.shape)
            flat = [ops.reshape(x, *x.shape[:2], -1, self.head_dim) for x in (query, key, value)]
            return flat[0], flat[1], flat[2]
        if not self.multi_query:
            apart = ops.view(fused, *fused.shape[:-1], self.heads, 3, self.head_dim)
            return ops.select(apart, -2), ops.select(apart, -2), ops.select(apart, -2)
        apart = ops.view(fused, *fused.shape[:-1], self.heads + 2, self.head_dim)
        return ops.narrow(apart, -2, self.heads), ops.index_list(apart, -2), ops.index_list(apart, -2)

    def forward(
        self, hidden: Tensor, alibi: Tensor | None, rotation: Rotation, mask: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """[b, s, h] to [b, s, h], and the probabilities where they exist."""
        batch, length, _ = hidden.shape
        fused = self.query_key_value(hidden)
        query, key, value = self._split(fused)
        query, key, value = (_rows(x, x.shape[2]) for x in (query, key, value))
        if alibi is None:
            query, key = apply_rotary(query, key, *rotation)
        if (cache := run_context(query).cache) is not None:
            key, value = cache.update(self, key, value)
        if run_context(query).attention != "eager":
            dropout = 0.0 if alibi is None else self.dropout
            is_causal = run_context(query).causal
            out = ops.scaled_dot_product_attention(query, key, value, mask, dropout, is_causal=is_causal)
            weights = None
        elif alibi is None:
            weights, out = _scores(query, key, value, mask, hidden)
        else:
            weights, out = self._scores_with_alibi(query, key, value, mask, alibi, hidden)
        out = ops.permute(ops.view(out, batch, self.heads, length, self.head_dim), 0, 2, 1, 3)
        out = ops.reshape(out, batch, length, -1)
        out = self.dense(out)
        return out, weights

    def _scores_with_alibi(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, alibi: Tensor, hidden: Tensor
    ) -> tuple[Tensor, Tensor]:
        scores = ops.matmul(query, ops.transpose(key, -1, -2))
        if scores.dtype is not FP32:
            scores = ops.to(scores, FP32)
        logits = ops.add(scores, ops.view(alibi, query.shape[0], self.heads, 1, -1))
        logits = ops.mul_scalar_(logits)
        weights = ops.softmax(logits if mask is None else ops.add(logits, mask), hidden.dtype)
        weights = ops.dropout(weights, self.dropout)
        out = ops.matmul(weights, value)
        return weights, ops.view(out, -1, *out.shape[2:])


def _scores(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, hidden: Tensor) -> tuple[Tensor, Tensor]:
    scores = ops.matmul(query, ops.transpose(key, -1, -2))
    scores = ops.mul_scalar_(scores)
    scores = ops.softmax(scores if mask is None else ops.add(scores, mask), hidden.dtype)
    return scores, ops.matmul(scores, value)


def _rows(x: Tensor, count: int) -> Tensor:
    """[b, s, heads, d] to [b, heads, s, d]."""
    batch, length, _, dim = x.shape
    return ops.reshape(ops.transpose(x, 1, 2), batch, count, length, dim)


class FalconMLP(Module):
    """down(act(up(x)))."""

    scope = "MLP"

    def __init__(self, c: Config, hidden: int) -> None:
        width, bias = c.integer("ffn_hidden_size", 4 * hidden), c.flag("bias")
        self.dense_h_to_4h = FalconLinear(hidden, width, bias=bias, group="MLP")
        self.act = activation(c.text("activation"))
        self.dense_4h_to_h = FalconLinear(width, hidden, bias=bias, group="MLP")

    def forward(self, x: Tensor) -> Tensor:
        """[b, s, h] to [b, s, h]."""
        x = self.act(self.dense_h_to_4h(x))
        return self.dense_4h_to_h(x)


class FalconBlock(Module):
    """Attention and MLP from one LayerNorm or from two, side by side or one after the other."""

    scope = "residual stream"

    def __init__(self, c: Config, hidden: int) -> None:
        self.self_attention = FalconAttention(c, hidden)
        self.mlp = FalconMLP(c, hidden)
        self.grouped, self.parallel = c.flag("new_decoder_architecture"), c.flag("parallel_attn", True)
        norms = c.integer("num_ln_in_parallel_attn", 2 if self.grouped else 1)
        self.two_norms = self.grouped and self.parallel and norms == 2
        if self.two_norms:
            self.ln_attn = LayerNorm(hidden)
            self.ln_mlp = LayerNorm(hidden)
        else:
            if not self.parallel:
                self.post_attention_layernorm = LayerNorm(hidden)
            self.input_layernorm = LayerNorm(hidden)
        self.attention_dropout, self.dropout = c.probability("attention_dropout"), c.probability("hidden_dropout")

    def forward(
        self, hidden: Tensor, alibi: Tensor | None, rotation: Rotation, mask: Tensor | None, position_ids: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        """[b, s, h] to [b, s, h], and the probabilities where they exist."""
        residual = hidden
        for_mlp = None
        if self.two_norms:
            for_attention = self.ln_attn(hidden)
            for_mlp = self.ln_mlp(hidden)
        else:
            for_attention = self.input_layernorm(hidden)
        attended, weights = self.self_attention(for_attention, alibi=alibi, rotation=rotation, mask=mask)
        if self.parallel:
            for_mlp = for_attention if for_mlp is None else for_mlp
        else:
            residual = dropout_add(attended, residual, self.attention_dropout)
            for_mlp = self.post_attention_layernorm(residual)
        fed = self.mlp(for_mlp)
        if self.parallel:
            fed = ops.add_(fed, attended)
        return dropout_add(fed, residual, self.dropout), weights


class FalconModel(Module):
    """Embeddings, blocks, LayerNorm; a mask is always made, and ALiBi is laid into it."""

    def __init__(self, c: Config, hidden: int) -> None:
        self.word_embeddings = Embedding(c.integer("vocab_size"), hidden)
        self.h = Stack(["block"] * c.integer("num_hidden_layers"), lambda _: FalconBlock(c, hidden))
        self.ln_f = LayerNorm(hidden)
        self.rotary_emb = RotaryEmbedding(c.head_dim())
        self.heads = c.integer("num_attention_heads")
        self.alibi = c.flag("alibi")

    def forward(self, ids: Tensor, padding: bool) -> Tensor:
        """Ids [b, s] to hidden states [b, s, h]."""
        tape = ids.tape
        inputs_embeds = self.word_embeddings(ids)
        alibi = None
        if self.alibi:
            seen = ids.shape[1] + run_context(tape).past_length
            tokens = padding_input(ids) if padding else tape.empty((ids.shape[0], seen), INT64)
            alibi = alibi_by_mask(tokens, self.heads, inputs_embeds.dtype, rounded=True)
        position_ids = positions(tape, ids.shape[1])
        mask = causal_mask(inputs_embeds, padding, always=True)
        if alibi is not None and mask is not None:
            if mask.dtype is BOOL:
                mask = _as_numbers(mask, inputs_embeds)
            alibi = ops.reshape(alibi, ids.shape[0], -1, *alibi.shape[1:])
            mask = ops.masked_fill(ops.mul_scalar(alibi), ops.compare(mask))
        hidden = inputs_embeds
        rotation = self.rotary_emb(hidden, position_ids)
        for block in self.h:
            outputs = block(hidden, alibi=alibi, rotation=rotation, mask=mask, position_ids=position_ids)
            hidden = outputs[0]
        return self.ln_f(hidden)


def _as_numbers(mask: Tensor, like: Tensor) -> Tensor:
    """A boolean mask as zeros and large negative numbers, one for each sequence."""
    tape = mask.tape
    fill = tape.empty((), like.dtype), tape.empty((), like.dtype)
    out = tape.empty((like.shape[0], *mask.shape[1:]), like.dtype)
    del fill
    return out


def falcon(c: Config, architecture: str | None) -> Network:
    """Falcon 1B to 180B."""
    hidden = c.integer("hidden_size")
    model = FalconModel(c, hidden)
    return heads.decoder(
        c, architecture, model, hidden, model.word_embeddings, tied=c.flag("tie_word_embeddings"), own_token_loss=True
    )


_DEFAULTS = sizes(
    (65024, 4544, 0, 32, 71, 0, 2048),
    hidden_dropout=0.0,
    attention_dropout=0.0,
    multi_query=True,
    parallel_attn=True,
    bias=False,
    activation="gelu",
    tie_word_embeddings=True,
)
_ALIASES = {
    "n_embed": "hidden_size",
    "n_layer": "num_hidden_layers",
    "n_head": "num_attention_heads",
    "n_head_kv": "num_kv_heads",
}
_BEFORE = "exact counts; tensors as Transformers' falcon keeps them"
FAMILIES = table(
    Family("falcon", falcon, _DEFAULTS, _ALIASES),
    # what the repositories said before Falcon was part of Transformers: the 40B, and the 7B
    Family("RefinedWeb", falcon, {**_DEFAULTS, "new_decoder_architecture": True}, _ALIASES, verified=_BEFORE),
    Family("RefinedWebModel", falcon, _DEFAULTS, _ALIASES, verified=_BEFORE),
)
