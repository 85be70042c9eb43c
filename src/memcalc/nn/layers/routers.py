"""Routers: which experts a token meets, and with which weights.

Each gives logits, weights and indices. The logits stay with the caller, as in Transformers.
"""

from __future__ import annotations

from typing import Any, Literal

from memcalc import ops
from memcalc.autograd.tensor import Tensor
from memcalc.nn.module import Buffer, Module, Parameter
from memcalc.nn.run_context import Routed, run_context
from memcalc.tables.dtypes import BOOL, FP32

Routing = tuple[Tensor, Tensor, Tensor]
"""Logits [n, experts], weights [n, k] and indices [n, k]."""


class Router(Module):
    """A router whose logits a model may make an auxiliary loss of."""

    per_token: int

    def __call__(self, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Tokens [n, h] to their routing."""
        routing = super().__call__(x, *args, **kwargs)
        tape, collected = x.tape, run_context(x).router_outputs
        if collected is not None and tape.phase != "backward":
            collected.append(Routed(tape.block, routing[0], self.per_token))
        return routing


class TopKRouter(Router):
    """Softmax in fp32 over all experts, then the best `per_token` (Mixtral, Qwen).

    normalise: the weights of a token are divided by their sum, in place.
    cast: the weights are cast to the dtype of the logits, of the hidden states, or not.
    fp32: the router's weight is in fp32 (Hunyuan).
    """

    def __init__(
        self,
        hidden: int,
        count: int,
        per_token: int,
        *,
        normalise: bool = True,
        cast: Literal["logits", "hidden", "not"] = "logits",
        fp32: bool = False,
    ) -> None:
        self.weight = Parameter(count, hidden, dtype=FP32 if fp32 else None, group="experts")
        self.per_token = per_token
        self.normalise = normalise
        self.cast = cast

    def forward(self, hidden: Tensor) -> Routing:
        """Tokens [n, h] to their routing."""
        hidden = ops.reshape(hidden, -1, hidden.shape[-1])
        if self.weight.dtype is FP32:
            hidden = ops.to(hidden, FP32)
        logits = ops.linear(hidden, self.weight)
        probs = ops.softmax(ops.to(logits, FP32)) if self.cast == "not" else ops.softmax(logits, FP32)
        weights, indices = ops.topk(probs, self.per_token)
        if self.normalise:
            weights = ops.div_(weights, ops.sum(weights, keepdim=True))
        if self.cast != "not":
            weights = ops.to(weights, logits.dtype if self.cast == "logits" else hidden.dtype)
        return logits, weights, indices


class TopKThenSoftmaxRouter(Router):
    """The best `per_token` experts by their logits, then a softmax over those (gpt-oss; in fp32: Granite)."""

    def __init__(self, hidden: int, count: int, per_token: int, *, bias: bool = False, fp32: bool = False) -> None:
        self.weight = Parameter(count, hidden, group="experts")
        self.bias = Parameter(count, group="experts") if bias else None
        self.per_token = per_token
        self.fp32 = fp32

    def forward(self, hidden: Tensor) -> Routing:
        """Tokens [n, h] to their routing."""
        logits = ops.linear(hidden, self.weight, self.bias)
        if self.fp32:
            logits = ops.to(logits, FP32)
        values, indices = ops.topk(logits, self.per_token)
        weights = ops.softmax(values, values.dtype)
        return logits, ops.to(weights, hidden.dtype) if self.fp32 else weights, indices


class GroupLimitedRouter(Module):
    """DeepSeek-V3's: sigmoid scores with a correction per expert; only experts of the best `top_groups` groups count.

    Weight and correction are kept in fp32, whatever the model's dtype.
    """

    def __init__(
        self, hidden: int, count: int, per_token: int, *, groups: int, top_groups: int, normalise: bool = True
    ) -> None:
        self.weight = Parameter(count, hidden, dtype=FP32, group="experts")
        self.correction = Buffer(count, group="experts")
        self.per_token = per_token
        self.groups = groups
        self.top_groups = top_groups
        self.normalise = normalise

    def forward(self, hidden: Tensor) -> Routing:
        """Tokens [n, h] to their routing."""
        hidden = ops.view(hidden, -1, hidden.shape[-1])
        logits = ops.linear(ops.to(hidden, FP32), ops.to(self.weight, FP32))
        scores = ops.sigmoid(logits)
        choice = ops.add(scores, self.correction)
        group_scores = ops.sum(ops.topk(ops.view(choice, -1, self.groups, choice.shape[-1] // self.groups), 2)[0])
        _group_mask, score_mask, _index = group_limit(group_scores, self.top_groups, choice)
        choice = ops.masked_fill(choice, ops.empty_like(ops.empty_like(score_mask, BOOL)))
        indices = ops.topk(choice, self.per_token)[1]
        weights = ops.gather(scores, indices)
        if self.normalise:
            total = ops.add_scalar(ops.sum(weights, keepdim=True))
            weights = ops.div_(weights, total)
        return logits, ops.mul_scalar(weights), indices


class SigmoidRouter(Module):
    """LFM2's: sigmoid scores; with `corrected`, a bias per expert takes part in the choice, but not in the weights."""

    def __init__(self, hidden: int, count: int, per_token: int, *, corrected: bool, normalise: bool) -> None:
        self.weight = Parameter(count, hidden, group="experts")
        self.expert_bias = Buffer(count, group="experts") if corrected else None
        self.per_token = per_token
        self.normalise = normalise

    def forward(self, hidden: Tensor) -> Routing:
        """Tokens [n, h] to their routing."""
        logits = ops.linear(hidden, self.weight)
        weights = ops.sigmoid(logits)
        if self.expert_bias is None:
            weights, indices = ops.topk(weights, self.per_token)
        else:
            choice = ops.add(weights, self.expert_bias)
            _values, indices = ops.topk(choice, self.per_token)
            weights = ops.to(ops.gather(weights, indices), logits.dtype)
        if self.normalise:
            weights = ops.div(weights, ops.add_scalar(ops.sum(weights, keepdim=True)))
        weights = ops.mul_scalar(weights)
        return logits, weights, indices


class BiasCorrectedRouter(Router):
    """Scores plus a correction choose the experts; their own scores become the weights, and sum to one.

    MiniMax M2: sigmoid scores in fp32, and weights normalised in place. With `softmax` (ERNIE 4.5): router, correction
    and scores in fp32 even under autocast, and weights cast to the dtype of the hidden states.
    """

    def __init__(self, hidden: int, count: int, per_token: int, *, softmax: bool) -> None:
        self.weight = Parameter(count, hidden, dtype=FP32 if softmax else None, group="experts")
        self.correction: Tensor = Parameter(1, count, dtype=FP32, group="experts") if softmax else Buffer(count)
        if isinstance(self.correction, Parameter):
            self.correction.trainable = False
        self.per_token = per_token
        self.softmax = softmax

    def forward(self, hidden: Tensor) -> Routing:
        """Tokens [n, h] to their routing."""
        hidden = ops.reshape(hidden, -1, hidden.shape[-1])
        if not self.softmax:
            logits = ops.linear(hidden, self.weight)
            weights = ops.sigmoid(ops.to(logits, FP32))
            choice = ops.add(weights, self.correction)
            _values, indices = ops.topk(choice, self.per_token)
            weights = ops.gather(weights, indices)
            return logits, ops.div_(weights, ops.sum(weights, keepdim=True)), indices
        with hidden.tape.autocasting(None):
            logits = ops.linear(ops.to(hidden, FP32), ops.to(self.weight, FP32))
            weights = ops.softmax(logits, FP32)
            _values, indices = ops.topk(ops.add(weights, ops.select(self.correction, 0)), self.per_token)
            weights = ops.gather(weights, indices)
            weights = ops.div(weights, ops.clamp(ops.sum(weights, keepdim=True), 1))
        weights = ops.to(weights, hidden.dtype)
        return logits, weights, indices


class SoftmaxGroupRouter(Module):
    """DeepSeek-V2: softmax scores, of experts in the best `top_groups` of `groups` if given. The weight is in fp32."""

    def __init__(
        self, hidden: int, count: int, per_token: int, *, groups: int | None = None, top_groups: int | None = None
    ) -> None:
        self.weight = Parameter(count, hidden, dtype=FP32, group="experts")
        self.per_token = per_token
        self.groups = groups
        self.top_groups = top_groups

    def forward(self, hidden: Tensor) -> Routing:
        """Tokens [n, h] to their routing."""
        hidden = ops.view(hidden, -1, hidden.shape[-1])
        logits = ops.linear(ops.to(hidden, FP32), ops.to(self.weight, FP32))
        scores = ops.softmax(logits, FP32)
        if self.groups is not None and self.top_groups is not None:
            group_scores = ops.max(ops.view(scores, -1, self.groups, scores.shape[-1] // self.groups))[0]
            _group_mask, score_mask, _index = group_limit(group_scores, self.top_groups, scores)
            scores = ops.masked_fill(scores, ops.empty_like(ops.empty_like(score_mask, BOOL)))
        weights, indices = ops.topk(scores, self.per_token)
        return logits, ops.mul_scalar(weights), indices


class SoftmaxLimitedRouter(Router):
    """Mistral 4's: softmax scores; only experts of the best `top_groups` groups count, and their scores are weights."""

    def __init__(
        self, hidden: int, count: int, per_token: int, *, groups: int, top_groups: int, normalise: bool
    ) -> None:
        self.weight = Parameter(count, hidden, group="experts")
        self.per_token, self.groups, self.top_groups, self.normalise = per_token, groups, top_groups, normalise

    def forward(self, hidden: Tensor) -> Routing:
        """Tokens [n, h] to their routing."""
        hidden = ops.view(hidden, -1, hidden.shape[-1])
        logits = ops.linear(hidden, self.weight)
        scores = ops.softmax(logits)
        group_scores = ops.sum(ops.topk(ops.view(scores, -1, self.groups, scores.shape[-1] // self.groups), 2)[0])
        _group_mask, score_mask, _index = group_limit(group_scores, self.top_groups, scores)
        choice = ops.masked_fill(scores, ops.empty_like(ops.empty_like(score_mask, BOOL)))
        indices = ops.topk(choice, self.per_token)[1]
        weights = ops.gather(scores, indices)
        if self.normalise:
            total = ops.add_scalar(ops.sum(weights, keepdim=True))
            weights = ops.div_(weights, total)
        return logits, ops.mul_scalar(weights), indices


def group_limit(group_scores: Tensor, top_groups: int, scores: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Masks of the groups that count [n, groups] and of their experts [n, experts], and the groups' indices."""
    index = ops.topk(group_scores, top_groups)[1]
    mask = ops.empty_like(group_scores)
    tokens, groups = mask.shape
    wide = ops.expand(ops.unsqueeze(mask, -1), tokens, groups, scores.shape[-1] // groups)
    return mask, ops.reshape(wide, tokens, scores.shape[-1]), index
