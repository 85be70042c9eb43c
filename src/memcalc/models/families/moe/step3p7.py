"""Step 3.5: windows with more heads, a gate on every head, clamped SwiGLU, and experts beside a shared one."""

from __future__ import annotations

from functools import partial

from memcalc import ops
from memcalc.autograd.tensor import Tensor
from memcalc.config.reader import Config
from memcalc.errors import ConfigError
from memcalc.models.common.decoder import dense_decoder, sorted_windows, windows_from
from memcalc.models.family import Family, llama_sizes
from memcalc.nn.layers.attention_backends import attend
from memcalc.nn.layers.linear import Linear
from memcalc.nn.layers.mixture_of_experts import CountedTogether
from memcalc.nn.layers.norms import GemmaRMSNorm
from memcalc.nn.layers.rotary import RotaryByWindow, RotaryEmbedding, Rotation, rotary_of_part
from memcalc.nn.layers.routers import BiasCorrectedRouter
from memcalc.nn.model import Network
from memcalc.nn.module import Module
from memcalc.nn.run_context import run_context


class StepAttention(Module):
    """Grouped-query attention with norms of query and key; a sigmoid multiplies the output of every head."""

    scope = "attention"

    def __init__(self, c: Config, window: int | None) -> None:
        heads, kv_heads, self.head_dim = c.heads()
        if window is not None:
            heads = c.integer("num_sliding_attention_heads", heads)
        hidden, bias = c.integer("hidden_size"), c.flag("attention_bias")
        if heads % kv_heads:
            raise ConfigError(f"{c.where} has {heads} heads, which the {kv_heads} key-value heads do not divide.")
        self.repeats, self.window, self.dropout = heads // kv_heads, window, c.probability("attention_dropout")
        self.q_proj = Linear(hidden, heads * self.head_dim, bias=bias, group="attention")
        self.k_proj = Linear(hidden, kv_heads * self.head_dim, bias=bias, group="attention")
        self.v_proj = Linear(hidden, kv_heads * self.head_dim, bias=bias, group="attention")
        self.o_proj = Linear(heads * self.head_dim, hidden, bias=bias, group="attention")
        self.q_norm, self.k_norm = GemmaRMSNorm(self.head_dim), GemmaRMSNorm(self.head_dim)
        self.g_proj = Linear(hidden, heads, group="attention")

    def _split(self, x: Tensor) -> Tensor:
        return ops.view(x, *x.shape[:-1], -1, self.head_dim)

    def forward(self, hidden: Tensor, rotation: Rotation, mask: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Hidden states [b, s, h] to [b, s, h], and the probabilities where they exist."""
        query = ops.transpose(self.q_norm(self._split(self.q_proj(hidden))), 1, 2)
        key = ops.transpose(self.k_norm(self._split(self.k_proj(hidden))), 1, 2)
        value = ops.transpose(self._split(self.v_proj(hidden)), 1, 2)
        gate = self.g_proj(hidden)
        query, key = rotary_of_part(query, key, *rotation)
        if (cache := run_context(query).cache) is not None:
            key, value = cache.update(self, key, value, self.window)
        out, weights = attend(query, key, value, mask, self.repeats, self.dropout)
        out = ops.mul(out, ops.sigmoid(ops.unsqueeze(gate, -1)))
        out = self.o_proj(ops.view(out, *hidden.shape[:-1], -1))
        return out, weights


class ClampedMLP(Module):
    """SwiGLU whose two factors are clamped, though the bound may be infinite."""

    scope = "MLP"

    def __init__(self, hidden: int, width: int, *, bias: bool) -> None:
        self.gate_proj = Linear(hidden, width, bias=bias, group="MLP")
        self.up_proj = Linear(hidden, width, bias=bias, group="MLP")
        self.down_proj = Linear(width, hidden, bias=bias, group="MLP")

    def forward(self, x: Tensor) -> Tensor:
        """[..., h] to [..., h]."""
        gate = ops.clamp(ops.silu(self.gate_proj(x)), 1)
        up = ops.clamp(self.up_proj(x))
        return self.down_proj(ops.mul(gate, up))


def _clamped(up: Tensor) -> Tensor:
    gate, linear = ops.chunk(up, 2, -1)
    gate = ops.clamp(ops.silu(gate), 1)
    linear = ops.clamp(linear)
    return ops.mul(gate, linear)


class StepMixture(Module):
    """A shared expert first, then routed ones, whose sum a number multiplies."""

    scope = "experts"

    def __init__(self, c: Config) -> None:
        hidden, count = c.integer("hidden_size"), c.integer("n_routed_experts")
        per_token = c.within("num_experts_per_tok", "n_routed_experts")
        self.gate = BiasCorrectedRouter(hidden, count, per_token, softmax=False)
        self.experts = CountedTogether(hidden, c.integer("moe_intermediate_size"), count, per_token, _clamped)
        self.shared_experts = ClampedMLP(hidden, c.integer("share_expert_dim"), bias=c.flag("mlp_bias"))

    def forward(self, hidden: Tensor) -> Tensor:
        """[b, s, h] to [b, s, h]."""
        shape = hidden.shape
        hidden = ops.view(hidden, -1, shape[-1])
        shared = self.shared_experts(hidden)
        _logits, weights, indices = self.gate(hidden)
        hidden = self.experts(hidden, weights, indices)
        hidden = ops.mul_scalar(hidden)
        hidden = ops.add(hidden, shared)
        return ops.reshape(hidden, *shape)


def _rotated(c: Config, window: int | None) -> int:
    """How many elements of a head are rotated in layers with this window."""
    kind = "full_attention" if window is None else "sliding_attention"
    given = c.section("rope_parameters").get(kind)
    if isinstance(given, dict):
        return int(c.head_dim() * _share(c, given.get("partial_rotary_factor", 1.0)))
    factors, types = c.items("partial_rotary_factors"), c.items("layer_types")
    if factors and types and kind in types[: len(factors)]:
        return int(c.head_dim() * _share(c, factors[types.index(kind)]))
    return c.head_dim()


def _share(c: Config, factor: object) -> float:
    if isinstance(factor, bool) or not isinstance(factor, (int, float)) or not 0 < factor <= 1:
        raise ConfigError(f"{c.where} has a 'partial_rotary_factor' that is no number over 0 and up to 1.")
    return float(factor)


def _experts_in(c: Config, depth: int) -> list[bool]:
    """Which layers have experts: by `mlp_layer_types` or `moe_layers_enum`; without either, all but the first three."""
    types = c.items("mlp_layer_types")
    if types is not None:
        if len(types) > depth:  # of layers that are not built
            c = c.replaced(mlp_layer_types=list(types[:depth]))
        return [kind == "sparse" for kind in c.layer_types([""] * depth, "mlp_layer_types")]
    listed = c.get("moe_layers_enum")
    items = listed.split(",") if isinstance(listed, str) else c.items("moe_layers_enum")
    named = [str(item).strip() for item in items or range(3, depth) if str(item).strip()]
    if not all(name.isdecimal() for name in named):
        raise ConfigError(f"{c.where} has a 'moe_layers_enum' that is no list of layer numbers.")
    chosen = {int(name) for name in named}
    return [layer in chosen for layer in range(depth)]


def step3p5(c: Config, architecture: str | None) -> Network:
    """Step 3.5's decoder, which Step 3.7 sees with."""
    depth, hidden, window = c.integer("num_hidden_layers"), c.integer("hidden_size"), c.optional("sliding_window")
    other = c.section("attention_other_setting").get("num_attention_heads")
    if other is not None and not c.has("num_sliding_attention_heads"):
        c = c.replaced(num_sliding_attention_heads=other)
    types = c.items("layer_types")
    if types is not None and len(types) > depth:  # layers that predict further tokens follow, and are not built
        c = c.replaced(layer_types=list(types[:depth]))
    windows = windows_from(c, [False] * depth, window)
    widths = iter([_rotated(c, window) for window in sorted_windows(windows)])
    dense = partial(ClampedMLP, hidden, c.integer("intermediate_size"), bias=c.flag("mlp_bias"))
    experts = partial(StepMixture, c)
    return dense_decoder(
        c,
        architecture,
        windows=windows,
        masks=windows if window is None else [None, window],
        make_attention=lambda layer: StepAttention(c, windows[layer]),
        mlp=[experts if sparse else dense for sparse in _experts_in(c, depth)],
        norm=GemmaRMSNorm,
        rotary=RotaryByWindow(sorted_windows(windows), lambda: RotaryEmbedding(next(widths))),
    )


STEP_TEXT = Family(
    "step3p5",
    step3p5,
    llama_sizes(
        (128815, 4096, 11264, 45, 64, 8, 128000),
        head_dim=128,
        attention_dropout=0.0,
        moe_intermediate_size=1280,
        n_routed_experts=288,
        num_experts_per_tok=8,
        share_expert_dim=1280,
    ),
    {
        "num_local_experts": "n_routed_experts",
        "moe_num_experts": "n_routed_experts",
        "num_attention_groups": "num_key_value_heads",
        "moe_top_k": "num_experts_per_tok",
        "share_expert_dims": "share_expert_dim",
    },
    kinds="decoder, experts",
)
