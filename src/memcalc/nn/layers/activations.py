"""Activation functions: what each keeps for backward depends on how Transformers writes it (its ACT2FN)."""

from __future__ import annotations

from collections.abc import Callable

from memcalc import ops
from memcalc.autograd.tensor import Tensor
from memcalc.errors import ConfigError, close_matches
from memcalc.nn.module import Buffer, Module, Parameter

Activation = Callable[[Tensor], Tensor]


def gelu_new(x: Tensor) -> Tensor:
    """GPT-2's tanh approximation of GELU, written out in eager PyTorch: 0.5·x·(1 + tanh(c·(x + a·x³)))."""
    return ops.mul(
        ops.mul_scalar(x), ops.add_scalar(ops.tanh(ops.mul_scalar(ops.add(x, ops.mul_scalar(ops.pow(x, 3.0))))))
    )


def gelu_fast(x: Tensor) -> Tensor:
    """The same, as 0.5·x·(1 + tanh(c·x·(1 + a·x·x)))."""
    return ops.mul(
        ops.mul_scalar(x),
        ops.add_scalar(ops.tanh(ops.mul(ops.mul_scalar(x), ops.add_scalar(ops.mul(ops.mul_scalar(x), x))))),
    )


def gelu_of_erf(x: Tensor) -> Tensor:
    """The exact GELU, written out in eager PyTorch: 0.5·x·(1 + erf(x/√2))."""
    return ops.mul(ops.mul_scalar(x), ops.add_scalar(ops.erf(ops.mul_scalar(x))))


def gelu_10(x: Tensor) -> Tensor:
    """GELU kept between -10 and 10."""
    return ops.clamp(ops.gelu(x))


def laplace(x: Tensor) -> Tensor:
    """0.5·(1 + erf((x - mu)/(sigma·√2)))."""
    scaled = ops.mul_scalar(ops.add_scalar(x))
    return ops.mul_scalar(ops.add_scalar(ops.erf(scaled)))


def sqrt_softplus(x: Tensor) -> Tensor:
    """The root of softplus."""
    return ops.sqrt(ops.softplus(x))


def quick_gelu(x: Tensor) -> Tensor:
    """x·sigmoid(c·x)."""
    return ops.mul(x, ops.sigmoid(ops.mul_scalar(x)))


def squared_relu(x: Tensor) -> Tensor:
    """relu(x) squared: keeps relu(x) for both."""
    positive = ops.relu(x)
    return ops.pow(positive)


def linear(x: Tensor) -> Tensor:
    """x itself."""
    return x


class XIELU(Module):
    """xIELU, written out in eager PyTorch, with two trained scalars of its own and two constants."""

    def __init__(self) -> None:
        self.alpha_p = Parameter(1, group="MLP")
        self.alpha_n = Parameter(1, group="MLP")
        self.beta = Buffer(dtype=None)
        self.eps = Buffer(dtype=None)

    def forward(self, x: Tensor) -> Tensor:
        """[..., width] to [..., width]."""
        alpha_p = ops.softplus(self.alpha_p)
        alpha_n = ops.add(self.beta, ops.softplus(self.alpha_n))
        return ops.where(
            ops.compare(x),
            ops.add(ops.mul(ops.mul(alpha_p, x), x), ops.mul(self.beta, x)),
            ops.add(ops.mul(ops.sub(ops.expm1(ops.minimum(x, self.eps)), x), alpha_n), ops.mul(self.beta, x)),
        )


ACTIVATIONS: dict[str, Activation] = {
    "silu": ops.silu,
    "swish": ops.silu,
    "gelu": ops.gelu,
    "gelu_10": gelu_10,
    "gelu_new": gelu_new,
    "gelu_accurate": gelu_new,
    "gelu_fast": gelu_fast,
    "gelu_pytorch_tanh": ops.gelu,
    "gelu_python": gelu_of_erf,
    "gelu_python_tanh": gelu_new,
    "quick_gelu": quick_gelu,
    "laplace": laplace,
    "mish": ops.silu,
    "leaky_relu": ops.silu,
    "hardswish": ops.silu,
    "relu": ops.relu,
    "relu2": squared_relu,
    "relu6": ops.silu,
    "linear": linear,
    "tanh": ops.tanh,
    "sigmoid": ops.sigmoid,
    "sqrtsoftplus": sqrt_softplus,
}
"""By name in a config. Those that keep their input and make one tensor of its size backward are all alike to memory."""

_WITH_WEIGHTS = {"xielu": XIELU}


def find(name: str) -> Activation:
    """The activation function of this name in a config."""
    if name in _WITH_WEIGHTS:
        return _WITH_WEIGHTS[name]()
    try:
        return ACTIVATIONS[name]
    except KeyError:
        known = sorted((*ACTIVATIONS, *_WITH_WEIGHTS))
        near = close_matches(name, known) or ";"
        raise ConfigError(f"activation function {name!r} is not known{near} known are {', '.join(known)}.") from None
