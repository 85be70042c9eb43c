"""Feed-forward sublayers."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from memcalc import ops
from memcalc.autograd.tensor import Tensor
from memcalc.nn.layers.activations import Activation, find
from memcalc.nn.layers.linear import Linear
from memcalc.nn.module import Module


def activation(name: str) -> Activation:
    """The activation function of this name in a config."""
    return find(name)


class GatedMLP(Module):
    """SwiGLU and the like: down(act(gate(x)) * up(x)).

    bias: all three projections have biases.
    dropout: probability of dropout after `down`.
    inner_norm, inner_dropout: a norm and a dropout before `down`.
    outputs: width of what comes out, where it is not that of what goes in.
    """

    scope = "MLP"
    fused = False
    """Whether Liger's kernel multiplies."""

    def __init__(
        self,
        hidden: int,
        width: int,
        act: str,
        *,
        bias: bool = False,
        dropout: float = 0.0,
        inner_norm: Module | None = None,
        inner_dropout: float = 0.0,
        outputs: int | None = None,
    ) -> None:
        self.gate_proj = Linear(hidden, width, bias=bias, group="MLP")
        self.up_proj = Linear(hidden, width, bias=bias, group="MLP")
        self.down_proj = Linear(width, outputs or hidden, bias=bias, group="MLP")
        self.act = activation(act)
        self.ffn_sub_norm = inner_norm
        self.dropout, self.inner_dropout = dropout, inner_dropout

    def forward(self, x: Tensor) -> Tensor:
        """[b, s, h] to [b, s, h]."""
        if self.fused:
            return ops.dropout(self.down_proj(ops.liger_glu(self.gate_proj(x), self.up_proj(x))), self.dropout)
        if self.ffn_sub_norm is not None:
            out = self.down_proj(self.ffn_sub_norm(ops.mul(self.act(self.gate_proj(x)), self.up_proj(x))))
        else:
            inner = self.inner_dropout
            out = self.down_proj(ops.dropout(ops.mul(self.act(self.gate_proj(x)), self.up_proj(x)), inner))
        return ops.dropout(out, self.dropout)


class FusedGatedMLP(Module):
    """SwiGLU with gate and up in one projection (Phi-3, GLM, Granite); the two are named as in the checkpoint."""

    scope = "MLP"
    fused = False
    """Whether Liger's kernel multiplies."""

    def __init__(
        self, hidden: int, width: int, act: str, names: tuple[str, str] = ("gate_up_proj", "down_proj")
    ) -> None:
        self.names = names
        setattr(self, names[0], Linear(hidden, 2 * width, group="MLP"))
        setattr(self, names[1], Linear(width, hidden, group="MLP"))
        self.act = activation(act)

    def forward(self, x: Tensor) -> Tensor:
        """[b, s, h] to [b, s, h]."""
        both, down = (vars(self)[name] for name in self.names)
        up = both(x)
        gate, up = ops.chunk(up, 2, -1)
        if self.fused:
            return down(ops.liger_glu(gate, up))  # type: ignore[no-any-return]
        up = ops.mul(up, self.act(gate))
        return down(up)  # type: ignore[no-any-return]


class PlainMLP(Module):
    """down(act(up(x))).

    names: attribute names of the two projections, as in the checkpoint.
    bias: both projections have biases.
    dropout: probability of dropout after the second.
    linear: makes a projection of (in, out); None: Linear.
    """

    scope = "MLP"

    def __init__(
        self,
        hidden: int,
        width: int,
        act: str | Module,
        *,
        names: tuple[str, str] = ("up_proj", "down_proj"),
        bias: bool = False,
        dropout: float = 0.0,
        linear: Callable[[int, int], Module] | None = None,
    ) -> None:
        make = linear or partial(Linear, bias=bias, group="MLP")
        self.names = names
        setattr(self, names[0], make(hidden, width))
        setattr(self, names[1], make(width, hidden))
        self.act = activation(act) if isinstance(act, str) else act
        self.dropout = dropout

    def forward(self, x: Tensor) -> Tensor:
        """[b, s, h] to [b, s, h]."""
        up, down = (vars(self)[name] for name in self.names)
        out = down(self.act(up(x)))
        return ops.dropout(out, self.dropout)
