"""Feed-forward sublayers."""

from __future__ import annotations

from collections.abc import Callable

from memcalc.errors import ConfigError, close_matches
from memcalc.model import ops
from memcalc.model.module import Module
from memcalc.model.sublayers.linear import Linear
from memcalc.model.tensor import Tensor

Activation = Callable[[Tensor], Tensor]


def gelu_new(x: Tensor) -> Tensor:
    """GPT-2's tanh approximation of GELU, written out in eager PyTorch: 0.5·x·(1 + tanh(c·(x + a·x³)))."""
    return ops.multiply(ops.scale(x), ops.shift(ops.tanh(ops.scale(ops.add(x, ops.scale(ops.power(x, 3.0)))))))


def squared_relu(x: Tensor) -> Tensor:
    """relu(x) squared: keeps relu(x) for both."""
    positive = ops.relu(x)
    return ops.power(positive)


ACTIVATIONS: dict[str, Activation] = {
    "silu": ops.silu,
    "swish": ops.silu,
    "gelu": ops.gelu,
    "gelu_new": gelu_new,
    "gelu_pytorch_tanh": ops.gelu,
    "relu": ops.relu,
    "relu2": squared_relu,
    "tanh": ops.tanh,
    "sigmoid": ops.sigmoid,
}
"""Transformers' ACT2FN: what each activation function keeps depends on how it is written."""


def activation(name: str) -> Activation:
    """The activation function of this name in a config."""
    try:
        return ACTIVATIONS[name]
    except KeyError:
        raise ConfigError(
            f"activation function {name!r} is not known{close_matches(name, ACTIVATIONS)}; "
            f"known are {', '.join(sorted(ACTIVATIONS))}."
        ) from None


class GatedMLP(Module):
    """SwiGLU and its kin: down(act(gate(x)) * up(x)), with dropout behind it where there is some."""

    scope = "MLP"

    def __init__(self, hidden: int, width: int, act: str, *, bias: bool = False, dropout: float = 0.0) -> None:
        self.gate_proj = Linear(hidden, width, bias=bias, group="MLP")
        self.up_proj = Linear(hidden, width, bias=bias, group="MLP")
        self.down_proj = Linear(width, hidden, bias=bias, group="MLP")
        self.act = activation(act)
        self.dropout = dropout

    def forward(self, x: Tensor) -> Tensor:
        """[b, s, h] to [b, s, h]."""
        out = self.down_proj(ops.multiply(self.act(self.gate_proj(x)), self.up_proj(x)))
        return ops.dropout(out, self.dropout)


class FusedGatedMLP(Module):
    """SwiGLU with gate and up in one projection (Phi-3, GLM)."""

    scope = "MLP"

    def __init__(self, hidden: int, width: int, act: str) -> None:
        self.gate_up_proj = Linear(hidden, 2 * width, group="MLP")
        self.down_proj = Linear(width, hidden, group="MLP")
        self.act = activation(act)

    def forward(self, x: Tensor) -> Tensor:
        """[b, s, h] to [b, s, h]."""
        up = self.gate_up_proj(x)
        gate, up = ops.chunk(up, 2, -1)
        up = ops.multiply(up, self.act(gate))
        return self.down_proj(up)  # type: ignore[no-any-return]


class PlainMLP(Module):
    """down(act(up(x))), the two projections named as in the checkpoint, with dropout behind it where there is some."""

    scope = "MLP"

    def __init__(
        self, hidden: int, width: int, act: str | Module, *,
        names: tuple[str, str] = ("up_proj", "down_proj"), bias: bool = False, dropout: float = 0.0,
    ) -> None:  # fmt: skip
        self.names = names
        setattr(self, names[0], Linear(hidden, width, bias=bias, group="MLP"))
        setattr(self, names[1], Linear(width, hidden, bias=bias, group="MLP"))
        self.act = activation(act) if isinstance(act, str) else act
        self.dropout = dropout

    def forward(self, x: Tensor) -> Tensor:
        """[b, s, h] to [b, s, h]."""
        up, down = (vars(self)[name] for name in self.names)
        out = down(self.act(up(x)))
        return ops.dropout(out, self.dropout)
