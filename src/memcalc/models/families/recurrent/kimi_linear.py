"""Kimi Linear: delta attention with a decay a channel, latent attention without positions, and DeepSeek's experts."""

from __future__ import annotations

from memcalc import ops
from memcalc.autograd.tensor import Tensor
from memcalc.config.reader import Config
from memcalc.errors import ConfigError
from memcalc.models.common.decoder import dense_decoder
from memcalc.models.families.moe.deepseek import V3, layered, shared_and_routed
from memcalc.models.family import Family, sizes, table
from memcalc.nn.layers.attention_backends import attend
from memcalc.nn.layers.latent_attention import LatentAttention
from memcalc.nn.layers.linear import Linear
from memcalc.nn.layers.masks import RECURRENT
from memcalc.nn.layers.mlp import activation
from memcalc.nn.layers.recurrent.causal_conv import CausalConv
from memcalc.nn.layers.recurrent.gated_delta_net import NOTE, STATE
from memcalc.nn.layers.recurrent.kimi_delta_rule import chunk_rule, token_rule
from memcalc.nn.layers.recurrent.ssd_scan import masked
from memcalc.nn.model import Network
from memcalc.nn.module import Module, Parameter
from memcalc.nn.run_context import run_context
from memcalc.nn.state_space_kernels import LinearAttentionMixer
from memcalc.tables.dtypes import FP32


class ForgetGate(Module):
    """The decay of each channel [b, s, heads, d] in fp32, through a narrow projection."""

    scope = "delta net"

    def __init__(self, hidden: int, heads: int, head_dim: int) -> None:
        self.head_dim = head_dim
        self.f_a_proj = Linear(hidden, head_dim, group="delta net")
        self.f_b_proj = Linear(head_dim, heads * head_dim, group="delta net")
        self.dt_bias = Parameter(heads * head_dim, dtype=FP32, group="delta net")
        self.A_log = Parameter(1, 1, heads, 1, group="delta net")

    def forward(self, hidden: Tensor) -> Tensor:
        """States [b, s, h] to logarithms of decay."""
        forget = self.f_b_proj(self.f_a_proj(hidden))
        bias = ops.view(self.dt_bias, 1, 1, -1)
        g = ops.view(ops.add(ops.to(forget, FP32), bias), *hidden.shape[:2], -1, self.head_dim)
        rate = ops.exp(ops.to(self.A_log, FP32))
        large = ops.compare(g)
        softplus = ops.where(large, g, ops.log(ops.add_scalar(ops.exp(g))))
        del large
        return ops.mul(ops.neg(rate), softplus)


class GatedNorm(Module):
    """RMSNorm in fp32 with its weight, times the sigmoid of a gate, cast back."""

    scope = "norms"

    def __init__(self, width: int) -> None:
        self.weight = Parameter(width, group="norms")

    def forward(self, hidden: Tensor, gate: Tensor) -> Tensor:
        """[..., width] to [..., width]."""
        dtype = hidden.dtype
        hidden = ops.to(hidden, FP32)
        variance = ops.mean(ops.pow(hidden))
        hidden = ops.mul(hidden, ops.rsqrt(ops.add_scalar(variance)))
        hidden = ops.mul(ops.to(self.weight, FP32), hidden)
        hidden = ops.mul(hidden, ops.sigmoid(ops.to(gate, FP32)))
        return ops.to(hidden, dtype)


class KimiDeltaAttention(LinearAttentionMixer):
    """Projections, a causal convolution over all three, the delta rule, a gated norm, output."""

    scope = "delta net"
    window = RECURRENT
    assumption = NOTE

    def __init__(self, hidden: int, heads: int, head_dim: int, kernel: int, act: str) -> None:
        width = heads * head_dim
        self.heads, self.head_dim = heads, head_dim
        self.q_proj, self.k_proj, self.v_proj = (Linear(hidden, width, group="delta net") for _ in range(3))
        self.conv1d = CausalConv(3 * width, kernel, activation(act), bias=False)
        self.forget_gate = ForgetGate(hidden, heads, head_dim)
        self.b_proj = Linear(hidden, heads, group="delta net")
        self.g_a_proj = Linear(hidden, head_dim, group="delta net")
        self.g_b_proj = Linear(head_dim, width, group="delta net")
        self.o_norm = GatedNorm(head_dim)
        self.o_proj = Linear(width, hidden, group="delta net")

    def forward(self, hidden: Tensor, rotation: object, mask: Tensor | None) -> tuple[Tensor, None]:
        """[b, s, h] to [b, s, h], as an attention answers, without rotary embedding and probabilities."""
        cache, lead = run_context(hidden).cache, hidden.shape[:2]
        hidden = masked(hidden, mask)
        seen = cache is not None and cache.has_state(self, STATE)
        pieces = [self.q_proj(hidden), self.k_proj(hidden), self.v_proj(hidden)]
        mixed = ops.cat(pieces, -1)
        del pieces
        mixed = ops.transpose(mixed, 1, 2)
        mixed = self.conv1d.remembered(mixed, self)
        mixed = self.conv1d(mixed, self, lead[1])
        parts = ops.split(ops.transpose(mixed, 1, 2), [self.heads * self.head_dim] * 3, -1)
        query, key, value = (ops.view(part, *lead, -1, self.head_dim) for part in parts)
        del parts
        decay = self.forget_gate(hidden)
        beta = ops.sigmoid(self.b_proj(hidden))
        shape = (lead[0], self.heads, self.head_dim, self.head_dim)
        state = cache.state(self, shape, FP32, hidden, STATE) if cache is not None and seen else None
        last: Tensor | None
        if state is not None and lead[1] == 1:
            once = ops.fla_recurrent if self.fused_kernels else token_rule
            out, last = once(query, key, value, beta, decay, state)
        else:
            rule = ops.fla_kda if self.fused_kernels else chunk_rule
            out, last = rule(query, key, value, beta, decay, state, keep=cache is not None)
        if cache is not None and last is not None:
            stored = cache.state(self, shape, FP32, last, STATE)
            stored.node, stored.slot = last.node, last.slot
        gate = ops.view(self.g_b_proj(self.g_a_proj(hidden)), *lead, -1, self.head_dim)
        out = ops.reshape(self.o_norm(out, gate), *lead, -1)
        return self.o_proj(out), None


class UnrotatedLatentAttention(LatentAttention):
    """DeepSeek's latent attention without positions; the part that would be rotated is still shared by the heads."""

    def forward(
        self, hidden: Tensor, rotation: tuple[Tensor, ...] | None, mask: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """Hidden states [b, s, h] to [b, s, h], and the probabilities where they exist."""
        batch, length, _ = hidden.shape
        query = self._query(hidden)
        query_states = ops.transpose(ops.view(query, batch, length, -1, sum(self.query_dims)), 1, 2)
        compressed = self.kv_a_proj_with_mqa(hidden)
        latent, key_rot = ops.split(compressed, self.kv_dims, -1)
        latent = self.kv_a_layernorm(latent)
        latent = ops.view(latent, batch, 1, length, -1)
        key_rot = ops.view(key_rot, batch, 1, length, -1)
        if (cache := run_context(query).cache) is not None:
            latent, key_rot = cache.update(self, latent, key_rot)
            if cache.absorbs_latent and length == 1:
                query_pass, query_rot = ops.split(query_states, self.query_dims, -1)
                return self.o_proj(self._absorbed(query_pass, query_rot, latent)), None
        key, value = self._expand(latent, key_rot)
        out, weights = attend(query_states, key, value, mask, 1, self.dropout)
        out = ops.contiguous(ops.reshape(out, batch, length, -1))
        return self.o_proj(out), weights


def _layer_types(c: Config) -> list[str]:
    """`layer_types`, or what `linear_attn_config` numbers from one, or every fourth layer's full attention."""
    depth, given = c.integer("num_hidden_layers"), c.section("linear_attn_config")
    usual = ["full_attention" if i and i % 4 == 0 else "linear_attention" for i in range(depth)]
    numbered = given.get("full_attn_layers")
    if isinstance(numbered, (list, tuple)) and "kda_layers" in given:
        usual = ["full_attention" if i + 1 in numbered else "linear_attention" for i in range(depth)]
    types = c.layer_types(usual)
    if not set(types) <= {"full_attention", "linear_attention"}:
        raise ConfigError(
            f"{c.where} has 'layer_types' that are neither 'full_attention' nor 'linear_attention'; correct them."
        )
    return types


def kimi_linear(c: Config, architecture: str | None) -> Network:
    """Kimi Linear."""
    linear = Config(
        {**c.values, **{_OLD[key]: value for key, value in c.section("linear_attn_config").items() if key in _OLD}},
        c.defaults,
        where=c.where,
    )
    types = _layer_types(c)

    def attention(layer: int) -> Module:
        hidden = c.integer("hidden_size")
        if types[layer] == "full_attention":
            return UnrotatedLatentAttention(
                hidden,
                c.integer("num_attention_heads"),
                q_rank=c.optional("q_lora_rank"),
                kv_rank=c.integer("kv_lora_rank"),
                nope_dim=c.integer("qk_nope_head_dim"),
                rope_dim=c.integer("qk_rope_head_dim"),
                value_dim=c.integer("v_head_dim"),
                bias=c.flag("attention_bias"),
                dropout=c.probability("attention_dropout"),
            )
        sized = linear.integer("linear_num_heads"), linear.integer("linear_head_dim")
        return KimiDeltaAttention(hidden, *sized, linear.integer("linear_conv_kernel_dim"), c.text("hidden_act"))

    return dense_decoder(
        c,
        architecture,
        windows=[RECURRENT if kind == "linear_attention" else None for kind in types],
        masks=[None, RECURRENT],
        make_attention=attention,
        mlp=layered(c, shared_and_routed),
        rotary=False,
    )


_OLD = {
    "head_dim": "linear_head_dim",
    "num_heads": "linear_num_heads",
    "short_conv_kernel_size": "linear_conv_kernel_dim",
}

FAMILIES = table(
    Family(
        "kimi_linear",
        kimi_linear,
        V3
        | sizes(
            (163840, 2304, 9216, 27, 32, 32, 1048576),
            moe_intermediate_size=1024,
            n_routed_experts=256,
            n_group=1,
            topk_group=1,
            first_k_dense_replace=1,
            q_lora_rank=None,
            pad_token_id=163839,
            linear_head_dim=128,
            linear_num_heads=32,
            linear_conv_kernel_dim=4,
        ),
        {
            "num_local_experts": "n_routed_experts",
            "num_experts": "n_routed_experts",
            "num_experts_per_token": "num_experts_per_tok",
            "num_shared_experts": "n_shared_experts",
            "num_expert_group": "n_group",
            "moe_renormalize": "norm_topk_prob",
            "model_max_length": "max_position_embeddings",
        },
        kinds="Kimi delta attention, latent attention, experts",
    )
)
