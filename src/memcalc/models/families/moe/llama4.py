"""Llama 4: chunked attention, layers without positions, and experts that all run on all tokens."""

from __future__ import annotations

from collections.abc import Callable

from memcalc import ops
from memcalc.autograd.tensor import Tensor
from memcalc.common.assumption import Assumption
from memcalc.config.reader import Config
from memcalc.models.common.decoder import dense_decoder
from memcalc.models.family import Family, llama_sizes, table
from memcalc.nn.layers.attention_backends import repeat_kv, sdpa
from memcalc.nn.layers.linear import Linear
from memcalc.nn.layers.mixture_of_experts import ExpertWeights
from memcalc.nn.layers.mlp import GatedMLP, activation
from memcalc.nn.layers.rotary import ComplexRotaryEmbedding
from memcalc.nn.model import Network
from memcalc.nn.module import Module, Parameter
from memcalc.nn.run_context import run_context
from memcalc.tables.dtypes import FP32, INT64


def _divided(x: Tensor) -> Tensor:
    return ops.mul(x, ops.rsqrt(ops.add_scalar(ops.mean(ops.pow(x)))))


class OutputScaledNorm(Module):
    """RMSNorm in fp32, cast back, times its weight."""

    scope = "norms"

    def __init__(self, width: int) -> None:
        self.weight = Parameter(width, group="norms")

    def forward(self, x: Tensor) -> Tensor:
        """[..., width] to [..., width]."""
        out = ops.to(_divided(ops.to(x, FP32)), x.dtype)
        return ops.mul(out, self.weight)


def _l2_norm(x: Tensor) -> Tensor:
    return ops.to(_divided(ops.to(x, FP32)), x.dtype)


def rotated(query: Tensor, key: Tensor, table: Tensor) -> tuple[Tensor, Tensor]:
    """Query and key [b, s, h, d] as complex numbers, rotated by `table` [rows, s, d / 2]."""
    query_pairs = ops.view_as_complex(ops.reshape(ops.to(query, FP32), *query.shape[:-1], -1, 2))
    key_pairs = ops.view_as_complex(ops.reshape(ops.to(key, FP32), *key.shape[:-1], -1, 2))
    query_out = _flat(ops.view_as_real(ops.mul_complex(query_pairs, ops.unsqueeze(table, 2))))
    key_out = _flat(ops.view_as_real(ops.mul_complex(key_pairs, ops.unsqueeze(table, 2))))
    return ops.to(query_out, query.dtype), ops.to(key_out, key.dtype)


def _flat(pairs: Tensor) -> Tensor:
    return ops.reshape(pairs, *pairs.shape[:-2], -1)


class Llama4Attention(Module):
    """Grouped-query attention with complex rotary embedding. Eager softmax is in the scores' dtype.

    rotated, normed: queries and keys are rotated, and normalised.
    tuned: queries are multiplied by a factor that grows with the context (layers without positions).
    """

    scope = "attention"

    def __init__(
        self,
        hidden: int,
        heads: int,
        kv_heads: int,
        head_dim: int,
        *,
        rotated: bool,
        normed: bool,
        tuned: bool,
        bias: bool,
        dropout: float,
        window: int | None,
    ) -> None:
        self.head_dim, self.repeats, self.dropout, self.window = head_dim, heads // kv_heads, dropout, window
        self.rotated, self.normed, self.tuned = rotated, normed, tuned
        self.q_proj = Linear(hidden, heads * head_dim, bias=bias, group="attention")
        self.k_proj = Linear(hidden, kv_heads * head_dim, bias=bias, group="attention")
        self.v_proj = Linear(hidden, kv_heads * head_dim, bias=bias, group="attention")
        self.o_proj = Linear(heads * head_dim, hidden, bias=bias, group="attention")

    def _split(self, x: Tensor) -> Tensor:
        return ops.view(x, *x.shape[:-1], -1, self.head_dim)

    def _scales(self, positions: Tensor) -> Tensor:
        """A factor for each position [1, s, 1, 1]."""
        scales = ops.empty_like(positions, FP32)
        for _ in range(6):
            scales = ops.empty_like(scales)
        return ops.view(scales, 1, -1, 1, 1)

    def forward(self, hidden: Tensor, rotation: tuple[Tensor], mask: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Hidden states [b, s, h] to [b, s, h], and the probabilities where they exist."""
        query = self._split(self.q_proj(hidden))
        key = self._split(self.k_proj(hidden))
        value = ops.transpose(self._split(self.v_proj(hidden)), 1, 2)
        if self.rotated:
            query, key = rotated(query, key, *rotation)
        if self.normed:
            query = _l2_norm(query)
            key = _l2_norm(key)
        if self.tuned:
            positions = ops.add_scalar(hidden.tape.empty((hidden.shape[1],), INT64))
            scales = ops.expand(self._scales(positions), *hidden.shape[:2], 1, 1)
            query = ops.to(ops.mul(query, scales), query.dtype)
        query = ops.transpose(query, 1, 2)
        key = ops.transpose(key, 1, 2)
        if (cache := run_context(query).cache) is not None:
            key, value = cache.update(self, key, value, self.window)
        out, weights = self._attend(query, key, value, mask)
        out = ops.contiguous(ops.reshape(out, *hidden.shape[:-1], -1))
        return self.o_proj(out), weights

    def _attend(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor | None]:
        if run_context(query).attention != "eager":
            return sdpa(query, key, value, mask, self.repeats, self.dropout), None
        key = repeat_kv(key, self.repeats)
        value = repeat_kv(value, self.repeats)
        weights = ops.mul_scalar(ops.matmul(query, ops.transpose(key, 2, 3)))
        if mask is not None:
            weights = ops.add(weights, mask)
        weights = ops.softmax(weights)
        weights = ops.dropout(weights, self.dropout)
        out = ops.matmul(weights, value)
        return ops.contiguous(ops.transpose(out, 1, 2)), weights


class AllExperts(ExpertWeights):
    """`count` experts as two batched matmuls, each over all the tokens that it is given."""

    assumption = Assumption(
        "experts_run_on_every_token",
        "every expert runs on every token, as Transformers' Llama 4 does (batched matmuls)",
    )

    transposed = True

    def __init__(self, hidden: int, width: int, count: int, per_token: int, act: str) -> None:
        self.count, self.per_token = count, per_token
        self.gate_up_proj = Parameter(count, hidden, 2 * width, group="experts")
        self.down_proj = Parameter(count, width, hidden, group="experts")
        self.act = activation(act)

    def forward(self, hidden: Tensor) -> Tensor:
        """Tokens of all experts [experts * n, h] to [experts * n, h]."""
        hidden = ops.view(hidden, self.count, -1, hidden.shape[-1])
        gate, up = ops.chunk(ops.bmm(hidden, self.gate_up_proj), 2, -1)
        out = ops.bmm(ops.mul(up, self.act(gate)), self.down_proj)
        return ops.view(out, -1, hidden.shape[-1])


class Llama4Experts(Module):
    """Every expert gets every token, times its score: zero but for the best `per_token`. A shared MLP is added."""

    scope = "experts"

    def __init__(self, hidden: int, width: int, count: int, per_token: int, act: str) -> None:
        self.experts = AllExperts(hidden, width, count, per_token, act)
        self.router = Linear(hidden, count, group="experts")
        self.shared_expert = GatedMLP(hidden, width, act)

    def _scores(self, flat: Tensor) -> tuple[Tensor, Tensor]:
        logits = self.router(flat)
        values, indices = ops.topk(logits, self.experts.per_token)
        scores = ops.scatter_(ops.empty_like(logits), indices, values)
        scores = ops.to(ops.sigmoid(ops.to(scores, FP32)), scores.dtype)
        return scores, logits

    def forward(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """[b, s, h] to [b, s, h], and the router's logits."""
        flat = ops.reshape(hidden, -1, hidden.shape[-1])
        scores, logits = self._scores(flat)
        count = self.experts.count
        routed = ops.repeat(flat, count)
        routed = ops.mul(routed, ops.reshape(ops.transpose(scores, 0, 1), -1, 1))
        done = self.experts(routed)
        out = self.shared_expert(flat)
        out = ops.add_(out, ops.sum(ops.reshape(done, count, -1, hidden.shape[-1]), 0))
        return out, logits


class Llama4Block(Module):
    """Norm, attention, add; norm, MLP or experts, add. What attention gave stays bound."""

    scope = "residual stream"

    def __init__(self, attention: Module, mlp: Module, norm: Callable[[], Module]) -> None:
        self.self_attn = attention
        self.feed_forward = mlp
        self.input_layernorm = norm()
        self.post_attention_layernorm = norm()

    def forward(self, hidden: Tensor, rotation: tuple[Tensor], mask: Tensor | None, position_ids: Tensor) -> Tensor:
        """[b, s, h] to [b, s, h]."""
        residual = hidden
        hidden = self.input_layernorm(hidden)
        attended, _weights = self.self_attn(hidden, rotation, mask)
        hidden = ops.add(residual, attended)
        residual = hidden
        hidden = self.post_attention_layernorm(hidden)
        fed = self.feed_forward(hidden)
        hidden, _weights = fed if isinstance(fed, tuple) else (fed, _weights)
        del fed
        return ops.add(residual, ops.view(hidden, *residual.shape))


def llama4_text(c: Config, architecture: str | None) -> Network:
    """The text model of Llama 4 Scout and Maverick."""
    hidden, depth, act = c.integer("hidden_size"), c.integer("num_hidden_layers"), c.text("hidden_act")
    interval, step = c.integer("no_rope_layer_interval"), c.integer("interleave_moe_layer_step")
    rotated = [bool(flag) for flag in c.items("no_rope_layers") or [(i + 1) % interval for i in range(depth)]]
    chunk = c.optional("attention_chunk_size")
    types = c.layer_types(
        ["chunked_attention" if rope_layers and chunk else "full_attention" for rope_layers in rotated]
    )
    windows = [chunk if kind == "chunked_attention" else None for kind in types]
    mixed = c.items("moe_layers")
    with_experts = set(range(step - 1, depth, step) if mixed is None else mixed)

    def attend(layer: int) -> Module:
        rope_layers = rotated[layer]
        return Llama4Attention(
            hidden,
            *c.heads(),
            rotated=rope_layers,
            normed=rope_layers and c.flag("use_qk_norm"),
            tuned=not rope_layers and c.flag("attn_temperature_tuning"),
            window=windows[layer],
            bias=c.flag("attention_bias"),
            dropout=c.probability("attention_dropout"),
        )

    def mixture() -> Module:
        count, per_token = c.integer("num_local_experts"), c.within("num_experts_per_tok", "num_local_experts")
        return Llama4Experts(hidden, c.integer("intermediate_size"), count, per_token, act)

    def mlp() -> Module:
        return GatedMLP(hidden, c.integer("intermediate_size_mlp"), act)

    return dense_decoder(
        c,
        architecture,
        windows=windows,
        rope_layers=rotated,
        make_attention=attend,
        norm=OutputScaledNorm,
        block=Llama4Block,
        mlp=[mixture if layer in with_experts else mlp for layer in range(depth)],
        rotary=ComplexRotaryEmbedding(c.head_dim()),
        chunked=True,
    )


FAMILIES = table(
    Family(
        "llama4_text",
        llama4_text,
        llama_sizes(
            (202048, 5120, 8192, 48, 40, 8, 0),
            intermediate_size_mlp=16384,
            head_dim=128,
            num_local_experts=16,
            num_experts_per_tok=1,
            interleave_moe_layer_step=1,
            use_qk_norm=True,
            no_rope_layer_interval=4,
            attention_chunk_size=8192,
            attn_temperature_tuning=True,
            attention_dropout=0.0,
        ),
        kinds="decoder, experts",
        verified="measured rows",
    )
)
