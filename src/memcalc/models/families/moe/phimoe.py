"""Phi-3.5-MoE: LayerNorms, and two experts drawn one after the other, each with a gradient estimate of its own."""

from __future__ import annotations

from memcalc import ops
from memcalc.autograd.tensor import Tensor
from memcalc.config.reader import Config
from memcalc.models.common.decoder import biases, dense_decoder, same_window
from memcalc.models.family import Family, llama_sizes, table
from memcalc.nn.layers.mixture_of_experts import Experts, MixtureOfExperts, swiglu
from memcalc.nn.layers.mlp import activation
from memcalc.nn.layers.norms import LayerNorm
from memcalc.nn.layers.rotary import RotaryEmbedding
from memcalc.nn.layers.routers import Router, Routing
from memcalc.nn.model import Network
from memcalc.nn.module import Module, Parameter
from memcalc.nn.run_context import run_context
from memcalc.tables.dtypes import FP32


class SparseMixer(Router):
    """The best expert, and the best without it: in training drawn from scores with noise, among the near best."""

    def __init__(self, hidden: int, count: int) -> None:
        self.weight = Parameter(count, hidden, group="experts")
        self.per_token = 2

    def forward(self, hidden: Tensor) -> Routing:
        """Tokens [n, h] to their routing."""
        logits = ops.linear(hidden, self.weight)
        weights, indices = _drawn(logits)
        return logits, weights, indices


def _far(source: Tensor, scores: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Which scores are far below the best of `source`, outside the graph; and the best's indices, and a divisor."""
    source, scores = source.detach(), scores.detach()
    threshold, best = ops.max(source, keepdim=True)
    magnitude = ops.empty_like(scores)
    divisor = ops.empty_like(scores)
    del magnitude
    distance = ops.div(ops.sub(threshold, scores), divisor)
    return ops.compare(distance), best, divisor


def _drawn(scores: Tensor) -> tuple[Tensor, Tensor]:
    tape = scores.tape
    weights: list[Tensor] = []
    indices: list[Tensor] = []
    alive: list[Tensor] = []
    source = scores
    for turn in range(2):
        threshold, best, divisor = _far(source, scores)
        gates = ops.masked_fill(source, threshold)
        if run_context(tape).training:
            chosen = ops.unsqueeze(ops.max(ops.sub(gates, ops.log(ops.empty_like(gates.detach()))))[1], -1)
        else:
            chosen = best
        gates = ops.softmax(gates)
        multiplier = ops.gather(gates, chosen)
        weight = multiplier
        if run_context(tape).training:
            highest, best = ops.max(gates, keepdim=True)
            either = ops.empty_like(ops.compare(chosen, best))
            factor = ops.to(ops.empty_like(either, FP32), gates.dtype)
            del either
            weight = ops.routed_multiplier(scores, multiplier, chosen, gates)
            alive += [highest, factor]
        alive += [gates, multiplier, threshold, divisor]
        weights.append(weight)
        indices.append(chosen)
        if not turn:
            source = ops.scatter(scores, chosen)
    return ops.cat(weights, -1), ops.cat(indices, -1)


def phimoe(c: Config, architecture: str | None) -> Network:
    """Phi-3.5-MoE and Phi-mini-MoE."""
    hidden, count, width = c.integer("hidden_size"), c.integer("num_local_experts"), c.integer("intermediate_size")
    act = activation(c.text("hidden_act"))
    windows = same_window(c)
    noisy = c.number("input_jitter_noise", 0.0) > 0  # the block multiplies its input by noise, and the router again

    def mixture() -> Module:
        experts = Experts(hidden, width, count, 2, swiglu(act))
        return MixtureOfExperts(SparseMixer(hidden, count), experts, jitters=2 * noisy)

    return dense_decoder(
        c,
        architecture,
        windows=windows,
        mlp=mixture,
        norm=LayerNorm,
        attention=biases(c),
        rotary=RotaryEmbedding(c.head_dim()),
        head_bias=c.flag("lm_head_bias"),
    )


FAMILIES = table(
    Family(
        "phimoe",
        phimoe,
        llama_sizes(
            (32064, 4096, 6400, 32, 32, 8, 0), attention_dropout=0.0, num_local_experts=16, router_aux_loss_coef=0.001
        ),
        kinds="decoder, experts",
    )
)
