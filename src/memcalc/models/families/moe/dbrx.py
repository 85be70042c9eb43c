"""DBRX: one clamped projection of query, key and value, LayerNorm without bias, experts one after another."""

from __future__ import annotations

from collections.abc import Callable

from memcalc import ops
from memcalc.autograd.tensor import Tensor
from memcalc.config.reader import Config
from memcalc.models.common.decoder import dense_decoder
from memcalc.models.family import Family, table
from memcalc.nn.layers.attention_backends import attend
from memcalc.nn.layers.linear import Linear
from memcalc.nn.layers.looped_experts import LoopedExperts
from memcalc.nn.layers.mlp import activation
from memcalc.nn.layers.norms import LayerNorm
from memcalc.nn.layers.rotary import Rotation, apply_rotary
from memcalc.nn.layers.routers import Router, Routing
from memcalc.nn.model import Network
from memcalc.nn.module import Module, Parameter
from memcalc.nn.run_context import run_context
from memcalc.ops.jitter import jitter_


class DbrxAttention(Module):
    """Grouped-query attention of one projection, which is clamped into a new tensor."""

    scope = "attention"

    def __init__(self, c: Config, options: Config) -> None:
        self.heads, self.kv_heads, self.head_dim = c.heads()
        hidden = c.integer("hidden_size")
        self.dropout = options.probability("attn_pdrop", 0.0)
        self.clipped = options.has("clip_qkv")
        self.Wqkv = Linear(hidden, hidden + 2 * self.kv_heads * self.head_dim, group="attention")
        self.out_proj = Linear(hidden, hidden, group="attention")

    def forward(self, hidden: Tensor, rotation: Rotation, mask: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Hidden states [b, s, h] to [b, s, h], and the probabilities where they exist."""
        projected = self.Wqkv(hidden)
        if self.clipped:
            projected = ops.clamp(projected)
        sizes = [count * self.head_dim for count in (self.heads, self.kv_heads, self.kv_heads)]
        pieces = ops.split(projected, sizes, 2)
        query, key, value = (ops.transpose(ops.view(x, *x.shape[:-1], -1, self.head_dim), 1, 2) for x in pieces)
        del pieces
        query, key = apply_rotary(query, key, *rotation)
        if (cache := run_context(query).cache) is not None:
            key, value = cache.update(self, key, value)
        out, weights = attend(query, key, value, mask, self.heads // self.kv_heads, self.dropout)
        out = ops.contiguous(ops.reshape(out, *hidden.shape[:-1], -1))
        out = self.out_proj(out)
        return out, weights


class DbrxRouter(Router):
    """The best of the softmax in the logits' dtype, divided by their norm."""

    def __init__(self, hidden: int, count: int, per_token: int, *, normalise: bool) -> None:
        self.layer = Linear(hidden, count, group="experts")
        self.per_token, self.normalise = per_token, normalise

    def forward(self, hidden: Tensor) -> Routing:
        """Tokens [n, h] to their routing."""
        logits = self.layer(hidden)
        weights, indices = ops.topk(ops.softmax(logits, logits.dtype), self.per_token)
        if self.normalise:
            weights = ops.div(weights, ops.vector_norm(weights))
        return logits, weights, indices


class DbrxExperts(LoopedExperts):
    """The weights of all experts in one matrix each; an expert's is a view, whose gradient is as large as the whole."""

    def __init__(self, hidden: int, width: int, count: int, per_token: int, act: Callable[[Tensor], Tensor]) -> None:
        self.count, self.per_token, self.width, self.act = count, per_token, width, act
        self.w1 = Parameter(count * width, hidden, group="experts")
        self.v1 = Parameter(count * width, hidden, group="experts")
        self.w2 = Parameter(count * width, hidden, group="experts")

    def _slice(self, weight: Tensor) -> Tensor:
        return ops.select(ops.view(weight, -1, self.width, weight.shape[-1]), 0)

    def forward(self, hidden: Tensor, weights: Tensor, indices: Tensor) -> Tensor:
        """Tokens [n, h], weights and indices of their experts [n, k], to [n, h]."""

        def expert(hidden: Tensor, token: Tensor) -> Tensor:
            v1, w1, w2 = self._slice(self.v1), self._slice(self.w1), self._slice(self.w2)
            rows = ops.index(hidden, token)
            gate = ops.matmul(rows, ops.transpose(w1, 0, 1))
            up = ops.matmul(rows, ops.transpose(v1, 0, 1))
            gate = self.act(gate)
            inner = ops.mul(gate, up)
            return ops.matmul(inner, w2)

        return self.looped(hidden, weights, indices, expert)


class DbrxFFN(Module):
    """Router and experts; in training noise may multiply what both read."""

    scope = "experts"

    def __init__(self, c: Config, options: Config) -> None:
        hidden, count = c.integer("hidden_size"), options.integer("moe_num_experts")
        per_token = options.within("moe_top_k", "moe_num_experts")
        normalise = options.has("moe_normalize_expert_weights")
        act = activation(str(options.section("ffn_act_fn").get("name", "silu")))
        self.noisy = options.has("moe_jitter_eps")
        self.router = DbrxRouter(hidden, count, per_token, normalise=normalise)
        self.experts = DbrxExperts(hidden, options.integer("ffn_hidden_size"), count, per_token, act)

    def forward(self, hidden: Tensor) -> Tensor:
        """[b, s, h] to [b, s, h]."""
        if self.noisy and run_context(hidden).training:
            hidden = jitter_(hidden)
        _logits, weights, indices = self.router(ops.view(hidden, -1, hidden.shape[-1]))
        out = self.experts(ops.reshape(hidden, -1, hidden.shape[-1]), weights, indices)
        return ops.view(out, *hidden.shape)


class DbrxBlock(Module):
    """Norm, attention, add; norm, experts, add."""

    scope = "residual stream"

    def __init__(self, attention: Module, mlp: Module, norm: Callable[[], Module], dropout: float) -> None:
        self.norm_1 = norm()
        self.self_attn = attention
        self.norm_2 = norm()
        self.ffn = mlp
        self.dropout = dropout

    def _attended(self, hidden: Tensor, rotation: Rotation, mask: Tensor | None) -> tuple[Tensor, Tensor]:
        residual = hidden
        hidden = self.norm_1(hidden)
        hidden, _weights = self.self_attn(hidden, rotation, mask)
        hidden = ops.add(ops.dropout(hidden, self.dropout), residual)
        residual = hidden
        return residual, self.norm_2(hidden)

    def forward(self, hidden: Tensor, rotation: Rotation, mask: Tensor | None, position_ids: Tensor) -> Tensor:
        """[b, s, h] to [b, s, h]."""
        residual, hidden = self._attended(hidden, rotation, mask)
        hidden = self.ffn(hidden)
        hidden = ops.dropout(hidden, self.dropout)
        return ops.add(residual, hidden)


_EXPERTS = {"ffn_hidden_size": 3584, "moe_num_experts": 4, "moe_top_k": 1, "moe_normalize_expert_weights": 1.0}


def dbrx(c: Config, architecture: str | None) -> Network:
    """DBRX."""
    attention = c.nested("attn_config", {"kv_n_heads": 1})
    experts = c.nested("ffn_config", _EXPERTS)
    c = c.replaced(num_key_value_heads=attention.integer("kv_n_heads"))
    dropout = c.probability("resid_pdrop", 0.0)
    return dense_decoder(
        c,
        architecture,
        make_attention=lambda _: DbrxAttention(c, attention),
        mlp=lambda: DbrxFFN(c, experts),
        norm=lambda width: LayerNorm(width, bias=False),
        block=lambda attention, mlp, norm: DbrxBlock(attention, mlp, norm, dropout),
    )


FAMILIES = table(
    Family(
        "dbrx",
        dbrx,
        {
            "vocab_size": 32000,
            "hidden_size": 2048,
            "num_hidden_layers": 24,
            "num_attention_heads": 16,
            "max_position_embeddings": 2048,
            "router_aux_loss_coef": 0.01,
            "tie_word_embeddings": False,
        },
        {
            "d_model": "hidden_size",
            "n_heads": "num_attention_heads",
            "n_layers": "num_hidden_layers",
            "max_seq_len": "max_position_embeddings",
        },
        kinds="decoder, experts",
    )
)
