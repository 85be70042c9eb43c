"""GPT-Neo: GPT-2's block with eager attention in fp32; every layer keeps a causal mask of all positions."""

from __future__ import annotations

from collections.abc import Sequence

from memcalc import ops
from memcalc.autograd.tensor import Tensor
from memcalc.config.reader import Config
from memcalc.errors import ConfigError
from memcalc.models.families.decoders.gpt2 import GPT2Block, LearnedPositionsModel, learned_positions_lm
from memcalc.models.family import Family, sizes, table
from memcalc.nn.layers.linear import Linear
from memcalc.nn.model import Network
from memcalc.nn.module import Buffer, Module
from memcalc.nn.run_context import run_context
from memcalc.tables.dtypes import BOOL, FP32


class GPTNeoAttention(Module):
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


def _check_layers(c: Config) -> None:
    """Raise ConfigError unless `attention_types` has as many layers. A local one differs in its mask's values only."""
    depth = c.integer("num_hidden_layers")
    types = c.items("attention_types") or [[["global", "local"], 12]]
    counts = [item for item in types if isinstance(item, Sequence) and len(item) == 2 and isinstance(item[1], int)]
    counts = [item for item in counts if isinstance(item[0], Sequence)]
    total = sum(len(item[0]) * item[1] for item in counts)
    if len(counts) != len(types) or total != depth:
        raise ConfigError(f"{c.where} has 'attention_types' for {total} layers, but {depth} 'num_layers'; correct one.")


def gpt_neo(c: Config, architecture: str | None) -> Network:
    """GPT-Neo 125M to 2.7B."""
    _check_layers(c)
    hidden = c.integer("hidden_size")

    def block() -> Module:
        attention = GPTNeoAttention(c, hidden)
        return GPT2Block(c, hidden, attention, width="intermediate_size", dropout="resid_dropout", returns_weights=True)

    model = LearnedPositionsModel(c, hidden, block, dropout="embed_dropout")
    return learned_positions_lm(c, architecture, model, hidden)


FAMILIES = table(
    Family(
        "gpt_neo",
        gpt_neo,
        sizes(
            (50257, 2048, 0, 24, 16, 0, 2048),
            activation_function="gelu_new",
            resid_dropout=0.0,
            embed_dropout=0.0,
            attention_dropout=0.0,
            classifier_dropout=0.1,
            tie_word_embeddings=True,
        ),
        {"num_layers": "num_hidden_layers", "num_heads": "num_attention_heads"},
        attention="eager",
    )
)
