"""JetMoE: mixtures of attention heads and of MLPs, whose experts are linear layers run one after another.

Source: transformers/models/jetmoe 5.24. Keys and values are shared by all experts; queries and the output projection
are the experts' own. How many rows an expert gets is data; here every expert gets the same share.
"""

from __future__ import annotations

from typing import NamedTuple

from memcalc import ops
from memcalc.autograd.tensor import Tensor
from memcalc.config.reader import Config
from memcalc.models.common.decoder import dense_decoder
from memcalc.models.family import Family, sizes, table
from memcalc.nn.layers.attention_backends import attend, split_heads
from memcalc.nn.layers.decoder_blocks import DecoderBlock
from memcalc.nn.layers.linear import Linear
from memcalc.nn.layers.looped_experts import EVEN_SHARES
from memcalc.nn.layers.mixture_of_experts import ExpertWeights
from memcalc.nn.layers.mlp import activation
from memcalc.nn.layers.rotary import Rotation, apply_rotary
from memcalc.nn.layers.routers import Router
from memcalc.nn.model import Network
from memcalc.nn.module import Module, Parameter
from memcalc.nn.run_context import run_context
from memcalc.tables.dtypes import FP32, INT64


class Sorted(NamedTuple):
    """How rows are sorted by expert: the logits [n, experts], and for each of [n · k] rows where it was, of which
    token, and its weight."""

    logits: Tensor
    order: Tensor
    tokens: Tensor
    weights: Tensor


class JetMoeTopKGating(Router):
    """Softmax in fp32 over the best `per_token` logits, and the rows in the order of their experts."""

    def __init__(self, hidden: int, count: int, per_token: int) -> None:
        self.layer = Linear(hidden, count, group="experts")
        self.count, self.per_token = count, per_token

    def forward(self, hidden: Tensor) -> Sorted:
        """Tokens [n, h] to their sorted rows."""
        logits = ops.to(self.layer(hidden), FP32)
        best, indices = ops.topk(logits, self.per_token)
        weights = ops.to(ops.softmax(best), hidden.dtype)
        zeros = hidden.tape.empty((hidden.shape[0], self.count), weights.dtype)
        ones = ops.scatter(zeros, indices)
        counts = hidden.tape.empty((self.count,), INT64)
        del counts
        _values, order = ops.sort(ops.view(indices, -1))
        tokens = ops.empty_like(order)
        rows = ops.index_select(ops.view(weights, -1), order)
        del ones
        return Sorted(logits, order, tokens, rows)


class JetMoeParallelExperts(ExpertWeights):
    """A linear layer [in] to [out] for each expert, over its share of the rows."""

    assumption = EVEN_SHARES

    def __init__(self, count: int, inputs: int, outputs: int, per_token: int) -> None:
        self.count, self.per_token = count, per_token
        self.weight = Parameter(count, outputs, inputs, group="experts")

    def forward(self, rows: Tensor) -> Tensor:
        """Rows [n · k, in] sorted by expert to [n · k, out]."""
        share, more = divmod(rows.shape[0], self.count)
        pieces = ops.split(rows, [share + (expert < more) for expert in range(self.count)], 0)
        made = [ops.linear(piece, ops.select(self.weight, 0)) for piece in pieces]
        return ops.cat(made, 0)


class _Mixture(Module):
    """What both mixtures have: two layers of experts, a router, and a bias on the sum."""

    scope = "experts"

    def __init__(self, c: Config, width: int, gated: int) -> None:
        self.hidden, count = c.integer("hidden_size"), c.integer("num_local_experts")
        self.per_token = c.within("num_experts_per_tok", "num_local_experts")
        self.bias = Parameter(self.hidden, group="experts")
        self.input_linear = JetMoeParallelExperts(count, self.hidden, width * gated, self.per_token)
        self.output_linear = JetMoeParallelExperts(count, width, self.hidden, self.per_token)
        self.router = JetMoeTopKGating(self.hidden, count, self.per_token)

    def _summed(self, made: Tensor, by: Sorted, tokens: int) -> Tensor:
        """What the experts made of each row [n · k, h], summed for each token [n, h], plus the bias."""
        zeros = made.tape.empty((tokens, self.hidden), made.dtype)
        return ops.add(ops.index_add(zeros, by.tokens, made), self.bias)


class JetMoeMoE(_Mixture):
    """An MLP of experts."""

    def __init__(self, c: Config) -> None:
        super().__init__(c, c.integer("intermediate_size"), 2)
        self.act = activation(c.text("activation_function"))

    def forward(self, hidden: Tensor) -> Tensor:
        """[b, s, h] to [b, s, h]."""
        flat = ops.reshape(hidden, -1, self.hidden)
        by = self.router(flat)
        rows = ops.index_select(flat, by.tokens)
        gate, up = ops.chunk(self.input_linear(rows), 2, -1)
        inner = ops.mul(self.act(gate), up)
        made = self.output_linear(inner)
        made = ops.mul(made, ops.unsqueeze(by.weights, 1))
        return ops.view(self._summed(made, by, flat.shape[0]), *hidden.shape)


class JetMoeMoA(_Mixture):
    """Query and output projections of experts, around the attention of all."""

    def queries(self, hidden: Tensor) -> tuple[Tensor, Sorted]:
        """[b, s, h] to queries [b, s, k, width] in the order of the tokens, and how their rows are sorted."""
        flat = ops.reshape(hidden, -1, self.hidden)
        by = self.router(flat)
        rows = ops.index_select(flat, by.tokens)
        made = self.input_linear(rows)
        zeros = made.tape.empty((flat.shape[0] * self.per_token, made.shape[1]), made.dtype)
        out = ops.index_add(zeros, by.order, made)
        return ops.view(out, *hidden.shape[:2], self.per_token, -1), by

    def reduce(self, attended: Tensor, by: Sorted) -> Tensor:
        """[b, s, k, width] to [b, s, h]."""
        batch, length, _, width = attended.shape
        rows = ops.index_select(ops.reshape(attended, -1, width), by.order)
        made = self.output_linear(rows)
        made = ops.mul(made, ops.unsqueeze(by.weights, 1))
        return ops.view(self._summed(made, by, batch * length), batch, length, self.hidden)


class JetMoeAttention(Module):
    """Attention of `k` groups of heads, of which each token's queries come from other experts; keys are repeated."""

    scope = "attention"

    def __init__(self, c: Config) -> None:
        hidden, heads = c.integer("hidden_size"), c.integer("num_key_value_heads")
        self.head_dim = c.integer("kv_channels")
        self.dropout = c.probability("attention_dropout")
        self.experts = JetMoeMoA(c, heads * self.head_dim, 1)
        self.kv_proj = Linear(hidden, 2 * heads * self.head_dim, group="attention")

    def forward(self, hidden: Tensor, rotation: Rotation, mask: Tensor | None) -> tuple[Tensor, Tensor]:
        """Hidden states [b, s, h] to [b, s, h], and the logits of the router, which the block holds."""
        per_token = self.experts.per_token
        query, by = self.experts.queries(hidden)
        key, value = ops.chunk(self.kv_proj(hidden), 2, -1)
        query = split_heads(ops.view(query, *hidden.shape[:2], -1), self.head_dim)
        key = split_heads(key, self.head_dim)
        value = split_heads(value, self.head_dim)
        query, key = apply_rotary(query, key, *rotation)
        if (cache := run_context(query).cache) is not None:
            key, value = cache.update(self, key, value)
        key = ops.repeat(key, 1, per_token, 1, 1)
        value = ops.repeat(value, 1, per_token, 1, 1)
        out, _weights = attend(query, key, value, mask, 1, self.dropout)
        out = ops.view(out, *hidden.shape[:2], per_token, -1)
        out = self.experts.reduce(out, by)
        return out, by.logits


class JetMoeBlock(DecoderBlock):
    """Llama's block, which Transformers does not let checkpoint its activations."""

    supports_checkpointing = False


def jetmoe(c: Config, architecture: str | None) -> Network:
    """JetMoE."""
    heads = c.integer("num_key_value_heads") * c.within("num_experts_per_tok", "num_local_experts")
    c = c.replaced(head_dim=c.integer("kv_channels"), num_attention_heads=heads)
    return dense_decoder(
        c,
        architecture,
        make_attention=lambda _: JetMoeAttention(c),
        mlp=lambda: JetMoeMoE(c),
        block=lambda attention, mlp, norm: JetMoeBlock(attention, mlp, norm, order="mlp norms self_attn"),
    )


FAMILIES = table(
    Family(
        "jetmoe",
        jetmoe,
        sizes(
            (32000, 2048, 5632, 12, 0, 16, 4096),
            kv_channels=128,
            activation_function="silu",
            num_local_experts=8,
            num_experts_per_tok=2,
            router_aux_loss_coef=0.01,
            attention_dropout=0.0,
            tie_word_embeddings=True,
        ),
        {"head_dim": "kv_channels", "aux_loss_coef": "router_aux_loss_coef"},
        kinds="decoder, experts",
    )
)
