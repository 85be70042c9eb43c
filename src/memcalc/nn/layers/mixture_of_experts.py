"""Mixtures of experts: the experts of a layer as grouped matrix multiplications, and the block around them.

Source: `grouped_mm`, the default of transformers.integrations.moe 5.24. Every pair of a token and one of its experts is
a row, rows are sorted by expert, and one kernel multiplies them all: how evenly tokens are spread changes no size as
long as one GPU holds every expert.
"""

from __future__ import annotations

from collections.abc import Callable

from memcalc import ops
from memcalc.autograd.tensor import Tensor
from memcalc.common.assumption import Assumption
from memcalc.errors import ConfigError
from memcalc.nn.module import Module, Parameter
from memcalc.nn.run_context import run_context
from memcalc.ops.jitter import jitter_
from memcalc.tables.dtypes import BOOL, INT32

ROW_BYTES = 16
"""Rows of a grouped matrix multiplication take a multiple of these (torch/_meta_registrations.py)."""

Gate = Callable[[Tensor], Tensor]
"""What stands between an expert's two projections."""


def swiglu(act: Callable[[Tensor], Tensor]) -> Gate:
    """The first half of the up projection, activated, times the second half."""

    def gate(up: Tensor) -> Tensor:
        first, second = ops.chunk(up, 2, -1)
        return ops.mul(act(first), second)

    return gate


def clamped_swiglu(up: Tensor) -> Tensor:
    """gpt-oss's: interleaved halves, clamped; (up + 1) · gate · sigmoid(alpha · gate)."""
    gate, linear = ops.slice(up, -1, 2), ops.slice(up, -1, 2)
    gate = ops.clamp(gate, 1)
    linear = ops.clamp(linear)
    glu = ops.mul(gate, ops.sigmoid(ops.mul_scalar(gate)))
    return ops.mul(ops.add_scalar(linear), glu)


class ExpertWeights(Module):
    """The weights of `count` experts, of which each token meets `per_token`."""

    scope = "experts"
    count: int
    per_token: int
    masks_rows: bool = False
    """Whether rows of experts that lie elsewhere are masked out (expert parallel)."""
    transposed: bool = False
    """Whether the weights lie as [in, out]."""


class Experts(ExpertWeights):
    """The weights of `count` experts [count, out, in], run as grouped matmuls.

    width: inner size of an expert.
    per_token: experts that each token is routed to.
    gate: activation between the projections.
    gated: the up projection makes gate and up, and is twice as wide.
    bias: both projections have biases.
    transposed: weights lie as [count, in, out].
    """

    assumption = Assumption(
        "experts_grouped_matmuls",
        "experts run as grouped matmuls over the rows routed to them, as Transformers does by default (grouped_mm)",
    )

    def __init__(
        self,
        hidden: int,
        width: int,
        count: int,
        per_token: int,
        gate: Gate,
        *,
        gated: bool = True,
        bias: bool = False,
        transposed: bool = False,
    ) -> None:
        self.count = count
        self.per_token = per_token
        self.gate = gate
        self.transposed = transposed
        gate_up = 2 * width if gated else width
        self.up_proj = Parameter(count, *(hidden, gate_up) if transposed else (gate_up, hidden), group="experts")
        self.up_proj_bias = Parameter(count, gate_up, group="experts") if bias else None
        self.down_proj = Parameter(count, *(width, hidden) if transposed else (hidden, width), group="experts")
        self.down_proj_bias = Parameter(count, hidden, group="experts") if bias else None

    def _grouped(self, rows: Tensor, weight: Tensor, offsets: Tensor, bias: Tensor | None) -> Tensor:
        if not self.transposed:
            weight = ops.transpose(weight, 1, 2)
        for width in weight.shape[1:]:
            if width * weight.dtype.itemsize % ROW_BYTES:
                raise ConfigError(
                    f"the experts have rows of {width} numbers, but PyTorch's grouped matrix multiplication wants rows "
                    f"of a multiple of {ROW_BYTES} bytes; correct the experts' widths in config.json."
                )
        out = ops.grouped_mm(ops.to(rows, weight.dtype), weight, offsets)
        return out if bias is None else ops.add_(out, bias)

    def forward(self, hidden: Tensor, top_k_weights: Tensor, top_k_index: Tensor) -> Tensor:
        """Tokens [n, h], weights and indices of their experts [n, k], to [n, h]."""
        tape, (tokens, width) = hidden.tape, hidden.shape
        sample_weights = ops.reshape(top_k_weights, -1)
        expert_ids = ops.reshape(top_k_index, -1)
        expert_ids, order = ops.sort(expert_ids)
        rows = ops.index_select(hidden, ops.empty_like(order))
        others = tape.empty((rows.shape[0], 1), BOOL) if self.masks_rows else None
        row_weights = ops.index_select(sample_weights, order)
        histogram = ops.empty_like(expert_ids, INT32), tape.empty((self.count,), INT32)
        offsets = tape.empty((self.count,), INT32)
        bias = None if self.up_proj_bias is None else ops.index_select(self.up_proj_bias, expert_ids)
        rows = rows if others is None else ops.masked_fill_(rows, others)
        out = self._grouped(rows, self.up_proj, offsets, bias)
        out = out if others is None else ops.masked_fill(out, others)
        out = self.gate(out)
        bias = None if self.down_proj_bias is None else ops.index_select(self.down_proj_bias, expert_ids)
        out = self._grouped(out, self.down_proj, offsets, bias)
        out = out if others is None else ops.masked_fill(out, others)
        weighted = ops.mul(out, ops.unsqueeze(row_weights, -1))
        back = ops.empty_like(order)
        arranged = ops.empty_like(order)
        del arranged
        weighted = ops.index_select(weighted, back)
        summed = ops.sum(ops.view(weighted, tokens, self.per_token, width), 1)
        out = ops.to(summed, hidden.dtype)
        del histogram
        return out


class CountedTogether(Experts):
    """Experts that their model's code runs one after another (Step, MiniCPM); here they are counted together."""

    assumption = Assumption(
        "looped_experts_as_grouped_matmuls",
        "experts are counted as grouped matmuls over the rows routed to them; this family's code runs them one after "
        "another, each over its share of the tokens",
    )


class MixtureOfExperts(Module):
    """A router and experts.

    shared: an MLP that every token goes through; `shared_gate` multiplies what it gives.
    gate_first: the router is registered before the experts.
    returns_weights: return the routing weights too (gpt-oss).
    jitters: how often noise multiplies the input in training (1: as it is; 2: once more as a list of tokens).
    """

    scope = "experts"

    def __init__(
        self,
        gate: Module,
        experts: Module,
        shared: Module | None = None,
        shared_gate: Module | None = None,
        *,
        gate_first: bool = True,
        returns_weights: bool = False,
        jitters: int = 0,
    ) -> None:
        if gate_first:
            self.gate = gate
        self.experts = experts
        self.gate = gate
        self.shared_expert = shared
        self.shared_expert_gate = shared_gate
        self.returns_weights = returns_weights
        self.jitters = jitters

    def forward(self, hidden: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        """[b, s, h] to [b, s, h]."""
        jitters = self.jitters if run_context(hidden).training else 0
        if jitters > 0:
            hidden = jitter_(hidden)
        flat = ops.view(hidden, -1, hidden.shape[-1])
        if jitters > 1:
            flat = jitter_(flat, of_view=True)
        shared = None if self.shared_expert is None else self.shared_expert(flat)
        _logits, weights, indices = self.gate(flat)
        out = self.experts(flat, weights, indices)
        if shared is not None:
            if self.shared_expert_gate is not None:
                shared = ops.mul(ops.sigmoid(self.shared_expert_gate(flat)), shared)
            out = ops.add(out, shared)
        out = ops.reshape(out, *hidden.shape)
        return (out, weights) if self.returns_weights else out


class ExpertsAndMLP(Module):
    """A mixture of experts and an MLP on the same input, added (Granite 4)."""

    def __init__(self, mixture: Module, shared: Module) -> None:
        self.block_sparse_moe = mixture
        self.shared_mlp = shared

    def forward(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """[b, s, h] to [b, s, h], and what the experts gave, which the block holds."""
        routed = self.block_sparse_moe(hidden)
        return ops.add(routed, self.shared_mlp(hidden)), routed


class SharedAndRoutedExperts(Module):
    """A router, experts, and after them an MLP of shared experts that every token meets (DeepSeek).

    `around` are projections to and from a narrower width in which the experts work (Nemotron 3); `norm` is one of what
    comes out (A.X K1).
    """

    scope = "experts"

    def __init__(
        self,
        experts: Module,
        gate: Module,
        shared: Module,
        around: tuple[Module, Module] | None = None,
        norm: Module | None = None,
    ) -> None:
        self.experts = experts
        self.gate = gate
        self.shared_experts = shared
        self.fc1_latent_proj = None if around is None else around[0]
        self.fc2_latent_proj = None if around is None else around[1]
        self.post_mlp_layernorm = norm

    def forward(self, hidden: Tensor) -> Tensor:
        """[b, s, h] to [b, s, h]."""
        _logits, weights, indices = self.gate(hidden)
        flat = ops.view(hidden, -1, hidden.shape[-1])
        if self.fc1_latent_proj is not None:
            flat = self.fc1_latent_proj(flat)
        out = self.experts(flat, weights, indices)
        if self.fc2_latent_proj is not None:
            out = self.fc2_latent_proj(out)
        out = ops.view(out, *hidden.shape)
        out = ops.add(out, self.shared_experts(hidden))
        return out if self.post_mlp_layernorm is None else self.post_mlp_layernorm(out)
