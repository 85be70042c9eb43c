"""Command A with experts: the best logits choose them, and shared ones are added or averaged with what they give."""

from __future__ import annotations

from functools import partial

from memcalc import ops
from memcalc.autograd.tensor import Tensor
from memcalc.config.reader import Config
from memcalc.errors import ConfigError
from memcalc.models.families.decoders.cohere import cohere2_windows, command
from memcalc.models.family import Family, llama_sizes, table
from memcalc.nn.layers.mixture_of_experts import Experts, swiglu
from memcalc.nn.layers.mlp import GatedMLP, activation
from memcalc.nn.layers.norms import EagerLayerNorm, RMSNorm
from memcalc.nn.layers.routers import Router, Routing
from memcalc.nn.model import Network
from memcalc.nn.module import Module, Parameter
from memcalc.tables.dtypes import FP32


class CohereRouter(Router):
    """Scores of the best logits only: their softmax in fp32, or their sigmoids, which may be divided by their sum."""

    def __init__(self, hidden: int, count: int, per_token: int, *, softmax: bool, normalise: bool) -> None:
        self.weight = Parameter(count, hidden, group="experts")
        self.per_token, self.softmax, self.normalise = per_token, softmax, normalise

    def forward(self, hidden: Tensor) -> Routing:
        """Tokens [n, h] to their routing."""
        logits = ops.linear(hidden, self.weight)
        scores, indices = ops.topk(logits, self.per_token)
        if self.softmax:
            scores = ops.softmax(scores, FP32)
        else:
            scores = ops.sigmoid(scores)
            if self.normalise:
                scores = ops.div(scores, ops.sum(scores, keepdim=True))
        return logits, ops.to(scores, hidden.dtype), indices


class CohereMixture(Module):
    """Routed experts, and shared ones if there are any."""

    scope = "experts"

    def __init__(self, c: Config) -> None:
        hidden, width, act = c.integer("hidden_size"), c.integer("intermediate_size"), c.text("hidden_act")
        count, per_token = c.integer("num_experts"), c.within("num_experts_per_tok", "num_experts")
        chosen = c.text("expert_selection_fn")
        self.averages = c.text("shared_expert_combination_strategy") == "average"
        if chosen not in ("softmax", "sigmoid"):
            raise ConfigError(f"{c.where} has an 'expert_selection_fn' that is neither 'softmax' nor 'sigmoid'.")
        normalise = c.flag("norm_topk_prob")
        self.gate = CohereRouter(hidden, count, per_token, softmax=chosen == "softmax", normalise=normalise)
        self.experts = Experts(hidden, width, count, per_token, swiglu(activation(act)))
        shared = c.integer("num_shared_experts", minimum=0)
        self.shared_experts = GatedMLP(hidden, width * shared, act) if shared else None

    def forward(self, hidden: Tensor) -> Tensor:
        """[b, s, h] to [b, s, h]."""
        flat = ops.view(hidden, -1, hidden.shape[-1])
        _logits, weights, indices = self.gate(flat)
        out = self.experts(flat, weights, indices)
        if self.shared_experts is not None:
            shared = self.shared_experts(flat)
            out = ops.mul_scalar(ops.add(out, shared)) if self.averages else ops.add(out, shared)
        return ops.reshape(out, *hidden.shape)


def cohere2_moe(c: Config, architecture: str | None) -> Network:
    """Command A with experts: the first layers may be dense, and then windows have a pattern of their own there."""
    depth, first = c.integer("num_hidden_layers"), c.integer("first_k_dense_replace", 0, minimum=0)
    types = c.layer_types(["dense" if layer < first else "sparse" for layer in range(depth)], "mlp_layer_types")
    prefix = c.integer("prefix_dense_sliding_window_pattern")
    windows = cohere2_windows(c, dense=first, dense_pattern=prefix)
    rotated = [
        window is not None or (kind == "dense" and prefix == 1) for window, kind in zip(windows, types, strict=True)
    ]
    width = c.optional("prefix_dense_intermediate_size") or c.integer("intermediate_size")
    dense = partial(GatedMLP, c.integer("hidden_size"), width, c.text("hidden_act"))
    experts = partial(CohereMixture, c)
    return command(
        c,
        architecture,
        {},
        windows=windows,
        masks=[None, c.optional("sliding_window")],
        rope_layers=rotated,
        mlp=[dense if kind == "dense" else experts for kind in types],
        norm=RMSNorm if c.has("rms_norm_eps") else EagerLayerNorm,
    )


FAMILIES = table(
    Family(
        "cohere2_moe",
        cohere2_moe,
        llama_sizes(
            (256000, 8192, 22528, 40, 64, 0, 8192),
            head_dim=128,
            sliding_window=4096,
            sliding_window_pattern=4,
            prefix_dense_sliding_window_pattern=1,
            num_experts_per_tok=2,
            num_experts=8,
            num_shared_experts=0,
            shared_expert_combination_strategy="average",
            expert_selection_fn="softmax",
            norm_topk_prob=True,
            pad_token_id=0,
            tie_word_embeddings=True,
        ),
        {"num_local_experts": "num_experts"},
        kinds="decoder, experts",
    )
)
