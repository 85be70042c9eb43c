"""Griffin's recurrent block: a gated linear recurrence over a short convolution (2402.19427), in plain PyTorch."""

from __future__ import annotations

from memcalc import ops
from memcalc.autograd.tensor import Tensor
from memcalc.common.assumption import Assumption
from memcalc.errors import TooShortError
from memcalc.nn.layers.linear import Linear
from memcalc.nn.layers.masks import RECURRENT
from memcalc.nn.layers.mlp import activation
from memcalc.nn.layers.recurrent.token_loop import token_steps
from memcalc.nn.module import Module, Parameter
from memcalc.nn.retained_graphs import RetainingModule
from memcalc.nn.run_context import run_context
from memcalc.tables.dtypes import FP32

STATE, CONVOLVED = "recurrent states", "convolution states"


def _bounded_root(x: Tensor) -> Tensor:
    """A square root whose gradient is clipped."""
    return ops.autograd_function(x, ops.sqrt, _bounded_root_backward)


def _bounded_root_backward(grad: Tensor, x: Tensor) -> Tensor:
    clipped = ops.clamp(ops.mul_scalar(x), 1)
    return ops.div(grad, ops.sqrt(clipped))


class RgLru(RetainingModule):
    """The real-gated linear recurrent unit: gates in blocks, one for each of `heads`, and a scan token by token.

    Transformers leaves the last state on the module, also in training: it stays until the next forward, with what
    backward has not run of its graph.
    """

    assumption = Assumption(
        "rg_lru_recurrence",
        "the recurrence runs token by token in plain PyTorch; Transformers leaves its last states in the modules, and "
        "with activation checkpointing the graphs behind them",
    )

    def __init__(self, width: int, heads: int) -> None:
        block = width // heads
        self.recurrent_param = Parameter(width, group="recurrence")
        self.input_gate_weight = Parameter(heads, block, block, group="recurrence")
        self.input_gate_bias = Parameter(heads, block, group="recurrence")
        self.recurrent_gate_weight = Parameter(heads, block, block, group="recurrence")
        self.recurrent_gate_bias = Parameter(heads, block, group="recurrence")
        self.heads = heads

    def forward(self, x: Tensor, position_ids: Tensor) -> Tensor:
        """[b, s, width] to [b, s, width]."""
        batch, length, width = x.shape
        reset = ops.compare(ops.unsqueeze(position_ids, -1))
        split = ops.permute(ops.reshape(x, batch * length, self.heads, -1), 1, 0, 2)
        res = ops.baddbmm(ops.unsqueeze(self.input_gate_bias, 1), split, self.input_gate_weight)
        input_gate = ops.sigmoid(ops.reshape(ops.transpose(res, 0, 1), batch, length, width))
        res = ops.baddbmm(ops.unsqueeze(self.recurrent_gate_bias, 1), split, self.recurrent_gate_weight)
        recurrent_gate = ops.sigmoid(ops.reshape(ops.transpose(res, 0, 1), batch, length, width))
        log_gate = ops.mul(ops.mul_scalar(recurrent_gate), ops.softplus(self.recurrent_param))
        recurrent_gate = ops.exp(log_gate)
        a_square = ops.exp(ops.mul_scalar(log_gate))
        gated = ops.mul(x, input_gate)
        multiplier = _bounded_root(ops.add_scalar(a_square))
        multiplier = ops.add(reset, ops.mul(ops.empty_like(reset), multiplier))
        normalised = ops.mul(gated, ops.to(multiplier, x.dtype))
        cache = run_context(x).cache
        out, last = _scan(normalised, recurrent_gate, reset, None if cache is None else cache.get_state(self, STATE))
        if cache is None:
            self.state = last
        else:
            cache.set_state(self, STATE, last)
        return out


def _scan(x: Tensor, gate: Tensor, reset: Tensor, state: Tensor | None) -> tuple[Tensor, Tensor]:
    """The recurrence over x and gate [b, s, width] from a state [b, width] in fp32, if there is one; and the last."""
    gate = ops.mul(gate, ops.empty_like(reset))
    if x.shape[1] == 1:
        if state is None:
            return x, ops.to(ops.select(x, 1), FP32)
        moved = ops.mul(ops.to(gate, FP32), ops.unsqueeze(state, 1))
        moved = ops.add_(moved, ops.to(x, FP32))
        return ops.to(moved, x.dtype), ops.select(moved, 1)
    if state is None:
        state = x.tape.empty((x.shape[0], x.shape[2]), FP32)
    out = ops.empty_like(x.detach())
    for _ in token_steps(x.tape, x.shape[1]):
        state = ops.mul(ops.to(ops.select(gate, 1), FP32), state)
        state = ops.add(state, ops.to(ops.select(x, 1), FP32))
        out = ops.copy_slice_(out, ops.to(state, x.dtype))
    return out, state


class RecurrentBlock(Module):
    """Two branches, one of them convolved and through the recurrence, multiplied and projected back."""

    scope = "recurrence"
    window = RECURRENT

    def __init__(self, hidden: int, width: int, heads: int, kernel: int, act: str) -> None:
        self.linear_y = Linear(hidden, width, bias=True, group="recurrence")
        self.linear_x = Linear(hidden, width, bias=True, group="recurrence")
        self.linear_out = Linear(width, hidden, bias=True, group="recurrence")
        self.conv_1d = Convolution(width, kernel)
        self.rg_lru = RgLru(width, heads)
        self.act = activation(act)
        self.hidden = hidden

    def forward(self, hidden: Tensor, position_ids: Tensor, mask: Tensor | None) -> tuple[Tensor, None]:
        """[b, s, h] to [b, s, h], as an attention answers."""
        y = self.linear_y(hidden)
        y = self.act(y)
        x = self.linear_x(hidden)
        x = ops.transpose(x, 1, 2)
        if run_context(hidden).cache is None:
            self.rg_lru.clear()
            x = ops.narrow(self.conv_1d(x), -1, hidden.shape[1])
        else:
            x = self._convolved(x)
        x = self.rg_lru(ops.transpose(x, 1, 2), position_ids)
        hidden = ops.mul(x, y)
        return self.linear_out(hidden), None

    def _convolved(self, x: Tensor) -> Tensor:
        """The convolution of generation, which keeps its last inputs: of the prompt, or of one token and a state."""
        cache, kernel = run_context(x).cache, self.conv_1d.weight.shape[-1]
        assert cache is not None
        batch, width, length = x.shape
        made = width if cache.absorbs_latent else self.hidden  # Transformers makes it as wide as the model
        cache.state(self, (batch, made, kernel - 1), x.dtype, x, CONVOLVED)
        cache.state(self.rg_lru, (batch, width), FP32, x, STATE)
        if length > 1:
            cache.set_state(self, CONVOLVED, ops.pad(x, -1, kernel - length - 1))
            return ops.narrow(self.conv_1d(x), -1, length)
        before = cache.get_state(self, CONVOLVED)
        if before.shape[1] != width:
            raise TooShortError(
                f"Transformers cannot begin with one token where 'lru_width' {width} is not 'hidden_size' "
                f"{before.shape[1]}; give --seq-len 2 or more."
            )
        seen = ops.cat((before, x), -1)
        x = ops.add(ops.sum(ops.mul(seen, ops.select(self.conv_1d.weight, 1))), self.conv_1d.bias)
        x = ops.unsqueeze(x, -1)
        cache.set_state(self, CONVOLVED, ops.narrow(seen, -1, kernel - 1))
        return x


class Convolution(Module):
    """A depthwise convolution of `kernel` steps over [b, channels, s], padded on both sides (torch.nn.Conv1d)."""

    def __init__(self, channels: int, kernel: int) -> None:
        self.weight = Parameter(channels, 1, kernel, group="recurrence")
        self.bias = Parameter(channels, group="recurrence")

    def forward(self, x: Tensor) -> Tensor:
        """[b, channels, s] to [b, channels, s + kernel - 1]."""
        return ops.conv1d(x, self.weight, self.bias, self.weight.shape[-1] - 1)
