"""Hunyuan 3 and Arcee's AFMoE (Trinity): sigmoid routing with a correction beside shared experts."""

from __future__ import annotations

from functools import partial

from memcalc import ops
from memcalc.autograd.tensor import Tensor
from memcalc.config.reader import Config
from memcalc.models.common.decoder import biases, dense_decoder, windows_by_layer_type
from memcalc.models.families.decoders.llama_variants import AFTER_TRANSPOSE
from memcalc.models.families.moe.deepseek import layered
from memcalc.models.family import Family, llama_sizes, table
from memcalc.nn.layers.attention_backends import attend
from memcalc.nn.layers.decoder_blocks import DecoderBlock, NormNames
from memcalc.nn.layers.linear import Linear
from memcalc.nn.layers.mixture_of_experts import Experts, swiglu
from memcalc.nn.layers.mlp import GatedMLP, activation
from memcalc.nn.layers.norms import RMSNorm
from memcalc.nn.layers.rotary import Rotation, apply_rotary
from memcalc.nn.layers.routers import Router, Routing
from memcalc.nn.model import Network
from memcalc.nn.module import Buffer, Module, Parameter
from memcalc.nn.run_context import run_context
from memcalc.tables.dtypes import FP32

_mixed_norm = partial(RMSNorm, scale_in="mixed")
_AROUND_AFMOE: NormNames = ("input_layernorm", "post_attention_layernorm", "pre_mlp_layernorm", "post_mlp_layernorm")


class CorrectedRouter(Router):
    """Sigmoid scores in fp32, chosen with a correction that the block has; their sum divides them, out of place.

    keeps_fp32: the router's weight is in fp32, and so is the multiplication (Hunyuan).
    """

    def __init__(self, hidden: int, count: int, per_token: int, *, keeps_fp32: bool) -> None:
        self.weight = Parameter(count, hidden, dtype=FP32 if keeps_fp32 else None, group="experts")
        self.per_token, self.keeps_fp32 = per_token, keeps_fp32

    def forward(self, hidden: Tensor, correction: Tensor) -> Routing:
        """Tokens [n, h] to their routing."""
        if self.keeps_fp32:
            logits = ops.linear(ops.to(hidden, FP32), ops.to(self.weight, FP32))
        else:
            logits = ops.to(ops.linear(hidden, self.weight), FP32)
        scores = ops.sigmoid(logits)
        indices = ops.topk(ops.add(scores, correction), self.per_token)[1]
        weights = ops.gather(scores, indices)
        weights = ops.div(weights, ops.add_scalar(ops.sum(weights, keepdim=True)))
        return logits, ops.mul_scalar(weights), indices


class HunyuanMixture(Module):
    """Experts and a shared MLP, added in fp32 (`enable_moe_fp32_combine`) or as they are."""

    scope = "experts"

    def __init__(self, gate: CorrectedRouter, experts: Experts, shared: Module, *, fp32: bool) -> None:
        self.gate, self.experts, self.shared_experts, self.fp32 = gate, experts, shared, fp32
        self.e_score_correction_bias = Buffer(experts.count, group="experts")

    def forward(self, hidden: Tensor) -> Tensor:
        """[b, s, h] to [b, s, h]."""
        shape = hidden.shape
        hidden = ops.view(hidden, -1, shape[-1])
        _logits, weights, indices = self.gate(hidden, self.e_score_correction_bias)
        routed = self.experts(hidden, weights, indices)
        if self.fp32:
            both = ops.add(ops.to(routed, FP32), ops.to(self.shared_experts(hidden), FP32))
            hidden = ops.to(both, hidden.dtype)
        else:
            hidden = ops.add(routed, self.shared_experts(hidden))
        return ops.reshape(hidden, *shape)


class AfmoeMixture(Module):
    """Shared experts first, then the routed ones; a correction of the choice that is no buffer but is not trained."""

    scope = "experts"

    def __init__(self, router: CorrectedRouter, shared: Module, experts: Experts) -> None:
        self.router, self.shared_experts, self.experts = router, shared, experts
        self.expert_bias = Parameter(experts.count, dtype=FP32, group="experts")
        self.expert_bias.trainable = False

    def forward(self, hidden: Tensor) -> Tensor:
        """[b, s, h] to [b, s, h]."""
        flat = ops.view(hidden, -1, hidden.shape[-1])
        _logits, weights, indices = self.router(flat, self.expert_bias)
        shared = ops.view(self.shared_experts(flat), *hidden.shape)
        routed = ops.view(self.experts(flat, weights, indices), *hidden.shape)
        return ops.add(shared, routed)


class GatedAttention(Module):
    """Grouped-query attention with norms of query and key, whose output a gate multiplies (AFMoE).

    Only layers with a sliding window are rotated.
    """

    scope = "attention"

    def __init__(self, c: Config, window: int | None) -> None:
        heads, kv_heads, self.head_dim = c.heads()
        hidden, bias = c.integer("hidden_size"), c.flag("attention_bias")
        self.repeats, self.window, self.dropout = heads // kv_heads, window, c.probability("attention_dropout")
        self.q_proj = Linear(hidden, heads * self.head_dim, bias=bias, group="attention")
        self.k_proj = Linear(hidden, kv_heads * self.head_dim, bias=bias, group="attention")
        self.v_proj = Linear(hidden, kv_heads * self.head_dim, bias=bias, group="attention")
        self.o_proj = Linear(heads * self.head_dim, hidden, bias=bias, group="attention")
        self.q_norm, self.k_norm = _mixed_norm(self.head_dim), _mixed_norm(self.head_dim)
        self.gate_proj = Linear(hidden, heads * self.head_dim, group="attention")

    def _split(self, x: Tensor) -> Tensor:
        return ops.view(x, *x.shape[:-1], -1, self.head_dim)

    def forward(self, hidden: Tensor, rotation: Rotation, mask: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Hidden states [b, s, h] to [b, s, h], and the probabilities where they exist."""
        query = self._split(self.q_proj(hidden))
        key = self._split(self.k_proj(hidden))
        value = self._split(self.v_proj(hidden))
        gate = self.gate_proj(hidden)
        query = ops.transpose(self.q_norm(query), 1, 2)
        key = ops.transpose(self.k_norm(key), 1, 2)
        value = ops.transpose(value, 1, 2)
        if self.window is not None:
            query, key = apply_rotary(query, key, *rotation)
        if (cache := run_context(query).cache) is not None:
            key, value = cache.update(self, key, value, self.window)
        out, weights = attend(query, key, value, mask, self.repeats, self.dropout)
        out = ops.contiguous(ops.view(out, *hidden.shape[:-1], -1))
        out = ops.mul(out, ops.sigmoid(gate))
        return self.o_proj(out), weights


def _experts(c: Config) -> Experts:
    gate = swiglu(activation(c.text("hidden_act")))
    width, count = c.integer("moe_intermediate_size"), c.integer("num_experts")
    return Experts(c.integer("hidden_size"), width, count, c.within("num_experts_per_tok", "num_experts"), gate)


def _shared(c: Config) -> GatedMLP:
    width = c.integer("moe_intermediate_size") * c.integer("num_shared_experts")
    return GatedMLP(c.integer("hidden_size"), width, c.text("hidden_act"))


def hy_v3(c: Config, architecture: str | None) -> Network:
    """Hunyuan 3: a dense first layer, then experts."""

    def mixture(c: Config) -> Module:
        experts = _experts(c)
        gate = CorrectedRouter(c.integer("hidden_size"), experts.count, experts.per_token, keeps_fp32=True)
        return HunyuanMixture(gate, experts, _shared(c), fp32=c.flag("enable_moe_fp32_combine"))

    bias = c.flag("mlp_bias")
    attention = {**biases(c), "qk_norm": AFTER_TRANSPOSE}
    return dense_decoder(c, architecture, mlp=layered(c, mixture, bias=bias), attention=attention)


def afmoe(c: Config, architecture: str | None) -> Network:
    """AFMoE: every fourth layer attends to everything, unrotated; norms around every sublayer."""

    def mixture(c: Config) -> Module:
        experts = _experts(c)
        router = CorrectedRouter(c.integer("hidden_size"), experts.count, experts.per_token, keeps_fp32=False)
        return AfmoeMixture(router, _shared(c), experts)

    windows = windows_by_layer_type(c, c.integer("global_attn_every_n_layers"))
    return dense_decoder(
        c,
        architecture,
        windows=windows,
        masks=[None, c.optional("sliding_window")],
        make_attention=lambda layer: GatedAttention(c, windows[layer]),
        mlp=layered(c, mixture),
        norm=_mixed_norm,
        block=partial(DecoderBlock, names=_AROUND_AFMOE),
        embedding_multiplier="beside" if c.flag("mup_enabled") else False,
    )


FAMILIES = table(
    Family(
        "hy_v3",
        hy_v3,
        llama_sizes(
            (120832, 4096, 13312, 80, 64, 8, 131072),
            head_dim=128,
            attention_dropout=0.0,
            num_experts=192,
            num_experts_per_tok=8,
            num_shared_experts=1,
            moe_intermediate_size=1536,
            enable_moe_fp32_combine=True,
            first_k_dense_replace=1,
        ),
        {"num_local_experts": "num_experts"},
        kinds="decoder, experts",
    ),
    Family(
        "afmoe",
        afmoe,
        llama_sizes(
            (200192, 2048, 6144, 32, 16, 0, 16384),
            head_dim=128,
            attention_dropout=0.0,
            moe_intermediate_size=1408,
            num_experts=64,
            num_experts_per_tok=6,
            num_shared_experts=2,
            first_k_dense_replace=1,
            global_attn_every_n_layers=4,
            sliding_window=1024,
        ),
        {"num_local_experts": "num_experts", "num_dense_layers": "first_k_dense_replace"},
        kinds="decoder, experts",
    ),
)
