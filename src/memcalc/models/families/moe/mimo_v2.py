"""MiMo V2 Flash: windows with sinks and twice the key-value heads, narrower values, and experts without shared ones."""

from __future__ import annotations

from memcalc import ops
from memcalc.autograd.tensor import Tensor
from memcalc.config.reader import Config
from memcalc.models.common.decoder import dense_decoder, sorted_windows, windows_from
from memcalc.models.families.moe.deepseek import layered
from memcalc.models.family import Family, llama_sizes, table
from memcalc.nn.layers.attention_backends import eager_with_sinks, repeat_kv
from memcalc.nn.layers.linear import Linear
from memcalc.nn.layers.mixture_of_experts import Experts, MixtureOfExperts, swiglu
from memcalc.nn.layers.mlp import activation
from memcalc.nn.layers.rotary import RotaryByWindow, RotaryEmbedding, Rotation, rotary_of_part
from memcalc.nn.layers.routers import GroupLimitedRouter
from memcalc.nn.model import Network
from memcalc.nn.module import Module, Parameter
from memcalc.nn.run_context import run_context


class MimoAttention(Module):
    """Grouped-query attention, always eager; layers with a window have sinks and twice the key-value heads."""

    scope = "attention"

    def __init__(self, c: Config, window: int | None) -> None:
        hidden, bias = c.integer("hidden_size"), c.flag("attention_bias")
        heads, kv_heads, self.head_dim = c.heads()
        kv_heads *= 1 if window is None else 2
        self.value_dim, self.window = c.integer("v_head_dim"), window
        self.repeats, self.dropout = heads // kv_heads, c.probability("attention_dropout")
        self.q_proj = Linear(hidden, heads * self.head_dim, bias=bias, group="attention")
        self.k_proj = Linear(hidden, kv_heads * self.head_dim, bias=bias, group="attention")
        self.v_proj = Linear(hidden, kv_heads * self.value_dim, bias=bias, group="attention")
        self.o_proj = Linear(heads * self.value_dim, hidden, group="attention")
        self.sinks = None if window is None else Parameter(heads, group="attention")

    def forward(self, hidden: Tensor, rotation: Rotation, mask: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Hidden states [b, s, h] to [b, s, h], and the probabilities."""
        lead = hidden.shape[:-1]
        query = ops.transpose(ops.view(self.q_proj(hidden), *lead, -1, self.head_dim), 1, 2)
        key = ops.transpose(ops.view(self.k_proj(hidden), *lead, -1, self.head_dim), 1, 2)
        value = ops.mul_scalar(ops.transpose(ops.view(self.v_proj(hidden), *lead, -1, self.value_dim), 1, 2))
        query, key = rotary_of_part(query, key, *rotation)
        if (cache := run_context(query).cache) is not None:
            key, value = cache.update(self, key, value, self.window)
        if self.sinks is not None:
            out, weights = eager_with_sinks(query, key, value, mask, self.sinks, self.repeats, self.dropout)
        else:
            out, weights = _eager(query, key, value, mask, self.repeats, self.dropout)
        out = ops.contiguous(ops.reshape(out, *lead, -1))
        return self.o_proj(out), weights


def _eager(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, repeats: int, dropout: float
) -> tuple[Tensor, Tensor]:
    """Eager attention whose largest score is taken off before a softmax in the scores' own dtype."""
    key = repeat_kv(key, repeats)
    value = repeat_kv(value, repeats)
    weights = ops.mul_scalar(ops.matmul(query, ops.transpose(key, 2, 3)))
    if mask is not None:
        weights = ops.add(weights, mask)
    weights = ops.sub(weights, ops.max(weights, keepdim=True)[0])
    probs = ops.softmax(weights, weights.dtype)
    weights = ops.to(ops.dropout(probs, dropout), value.dtype)
    out = ops.matmul(weights, value)
    return ops.contiguous(ops.transpose(out, 1, 2)), weights


def _rotated(c: Config, window: int | None) -> int:
    """How many elements of a head are rotated in layers with this window: an even number."""
    given = c.section("rope_parameters").get("full_attention" if window is None else "sliding_attention")
    factor = given.get("partial_rotary_factor", 0.334) if isinstance(given, dict) else 0.334
    return -(-int(c.head_dim() * float(factor)) // 2) * 2


def mimo_v2_flash(c: Config, architecture: str | None) -> Network:
    """MiMo V2 Flash."""
    depth = c.integer("num_hidden_layers")
    slides = [layer > 0 and (layer + 1) % 6 != 0 for layer in range(depth)]
    windows = windows_from(c, slides, c.integer("sliding_window"))
    widths = iter([_rotated(c, window) for window in sorted_windows(windows)])

    def mixture(c: Config) -> Module:
        hidden, count = c.integer("hidden_size"), c.integer("n_routed_experts")
        per_token = c.within("num_experts_per_tok", "n_routed_experts")
        gate = GroupLimitedRouter(
            hidden,
            count,
            per_token,
            groups=c.divides("n_group", "n_routed_experts"),
            top_groups=c.within("topk_group", "n_group"),
            normalise=c.flag("norm_topk_prob"),
        )
        act = swiglu(activation(c.text("hidden_act")))
        return MixtureOfExperts(gate, Experts(hidden, c.integer("moe_intermediate_size"), count, per_token, act))

    return dense_decoder(
        c,
        architecture,
        windows=windows,
        make_attention=lambda layer: MimoAttention(c, windows[layer]),
        mlp=layered(c, mixture),
        rotary=RotaryByWindow(sorted_windows(windows), lambda: RotaryEmbedding(next(widths))),
    )


FAMILIES = table(
    Family(
        "mimo_v2_flash",
        mimo_v2_flash,
        llama_sizes(
            (152576, 4096, 16384, 48, 64, 4, 0),
            head_dim=192,
            v_head_dim=128,
            moe_intermediate_size=2048,
            n_routed_experts=256,
            num_experts_per_tok=8,
            n_group=1,
            topk_group=1,
            norm_topk_prob=True,
            first_k_dense_replace=1,
            attention_dropout=0.0,
            sliding_window=129,
        ),
        {"num_local_experts": "n_routed_experts"},
        attention="eager",
        kinds="decoder, experts",
    )
)
