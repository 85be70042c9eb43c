"""GPT-Neo: GPT-2's block with eager attention in fp32; every layer keeps a causal mask of all positions."""

from __future__ import annotations

from collections.abc import Sequence

from memcalc import ops
from memcalc.autograd.tensor import Tensor
from memcalc.config.reader import Config
from memcalc.errors import ConfigError
from memcalc.models.common import heads
from memcalc.models.registry import Family
from memcalc.nn.layers.linear import Embedding, Linear, PositionTable
from memcalc.nn.layers.masks import causal_mask
from memcalc.nn.layers.mlp import PlainMLP
from memcalc.nn.layers.norms import LayerNorm
from memcalc.nn.model import Network, positions
from memcalc.nn.module import Buffer, Module
from memcalc.nn.run_context import run_context
from memcalc.nn.stack import Stack
from memcalc.tables.dtypes import BOOL, FP32


class NeoAttention(Module):
    """Scores from fp32 copies of query and key, with the layer's own mask (local or global) and the model's."""

    scope = "attention"

    def __init__(self, c: Config, hidden: int) -> None:
        _, _, self.head_dim = c.heads()
        longest = c.integer("max_position_embeddings")
        self.bias = Buffer(1, 1, longest, longest, dtype=BOOL, group="attention")
        self.k_proj = Linear(hidden, hidden, group="attention")
        self.v_proj = Linear(hidden, hidden, group="attention")
        self.q_proj = Linear(hidden, hidden, group="attention")
        self.out_proj = Linear(hidden, hidden, bias=True, group="attention")
        self.dropout, self.resid_dropout = c.probability("attention_dropout"), c.probability("resid_dropout")

    def _heads(self, x: Tensor) -> Tensor:
        return ops.permute(ops.view(x, *x.shape[:-1], -1, self.head_dim), 0, 2, 1, 3)

    def _attend(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
        query = ops.to(query, FP32)
        key = ops.to(key, FP32)
        weights = ops.matmul(query, ops.transpose(key, -1, -2))
        own = ops.narrow(ops.narrow(self.bias, -2, query.shape[-2]), -1, key.shape[-2])
        lowest = query.tape.empty((), weights.dtype)
        weights = ops.where(own, weights, lowest)
        if mask is not None:
            weights = ops.add(weights, mask)
        weights = ops.softmax(weights)
        weights = ops.to(weights, value.dtype)
        weights = ops.dropout(weights, self.dropout)
        return ops.matmul(weights, value), weights

    def forward(self, hidden: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
        """[b, s, h] to [b, s, h], and the probabilities."""
        query = self.q_proj(hidden)
        key = self.k_proj(hidden)
        value = self.v_proj(hidden)
        query = self._heads(query)
        key = self._heads(key)
        value = self._heads(value)
        if (cache := run_context(query).cache) is not None:
            key, value = cache.update(self, key, value)
        out, weights = self._attend(query, key, value, mask)
        out = ops.view(ops.contiguous(ops.permute(out, 0, 2, 1, 3)), *hidden.shape[:-1], -1)
        out = self.out_proj(out)
        return ops.dropout(out, self.resid_dropout), weights


class NeoBlock(Module):
    """LayerNorm, attention, add; LayerNorm, MLP, add."""

    scope = "residual stream"

    def __init__(self, c: Config, hidden: int) -> None:
        self.ln_1 = LayerNorm(hidden)
        self.attn = NeoAttention(c, hidden)
        self.ln_2 = LayerNorm(hidden)
        self.mlp = PlainMLP(
            hidden,
            c.integer("intermediate_size", 4 * hidden),
            c.text("activation_function"),
            names=("c_fc", "c_proj"),
            bias=True,
            dropout=c.probability("resid_dropout"),
        )

    def forward(self, hidden: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
        """[b, s, h] to [b, s, h], and the probabilities."""
        residual = hidden
        hidden = self.ln_1(hidden)
        attended, weights = self.attn(hidden, mask=mask)
        hidden = ops.add(attended, residual)
        residual = hidden
        hidden = self.ln_2(hidden)
        fed = self.mlp(hidden)
        return ops.add(residual, fed), weights


class NeoModel(Module):
    """Token and learned position embeddings, dropout, blocks, LayerNorm."""

    def __init__(self, c: Config, hidden: int) -> None:
        self.wte = Embedding(c.integer("vocab_size"), hidden)
        self.wpe = PositionTable(c.integer("max_position_embeddings"), hidden)
        self.dropout = c.probability("embed_dropout")
        self.h = Stack(_layers(c), lambda _: NeoBlock(c, hidden))
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
            outputs = block(hidden, mask=mask)
            hidden = outputs[0]
        hidden = self.ln_f(hidden)
        return ops.view(hidden, *hidden.shape)


def _layers(c: Config) -> list[str]:
    """The blocks, which are alike: a local layer only holds another mask. `attention_types` must count as many."""
    depth = c.integer("num_hidden_layers")
    types = c.items("attention_types") or [[["global", "local"], 12]]
    counts = [item for item in types if isinstance(item, Sequence) and len(item) == 2 and isinstance(item[1], int)]
    counts = [item for item in counts if isinstance(item[0], Sequence)]
    total = sum(len(item[0]) * item[1] for item in counts)
    if len(counts) != len(types) or total != depth:
        raise ConfigError(f"{c.where} has 'attention_types' for {total} layers, but {depth} 'num_layers'; correct one.")
    return ["block"] * depth


def gpt_neo(c: Config, architecture: str | None) -> Network:
    """GPT-Neo 125M to 2.7B."""
    hidden = c.integer("hidden_size")
    model = NeoModel(c, hidden)
    return heads.decoder(
        c, architecture, model, hidden, model.wte, tied=c.flag("tie_word_embeddings"), own_token_loss=True
    )


FAMILIES = {
    "gpt_neo": Family(
        "gpt_neo",
        gpt_neo,
        {
            "vocab_size": 50257,
            "max_position_embeddings": 2048,
            "hidden_size": 2048,
            "num_hidden_layers": 24,
            "num_attention_heads": 16,
            "activation_function": "gelu_new",
            "resid_dropout": 0.0,
            "embed_dropout": 0.0,
            "attention_dropout": 0.0,
            "classifier_dropout": 0.1,
            "tie_word_embeddings": True,
        },
        {"num_layers": "num_hidden_layers", "num_heads": "num_attention_heads"},
        attention="eager",
        verified="measured rows, exact counts",
    )
}
