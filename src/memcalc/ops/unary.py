"""Functions of one tensor, element by element: which keep their input, which their output.

Source: derivatives.yaml and FunctionsManual.cpp of PyTorch 2.14.
"""

from __future__ import annotations

from memcalc.autograd.graph import Backward, Grads, Node, record
from memcalc.autograd.tensor import Tensor, dense_stride, elementwise_stride
from memcalc.ops.elementwise import empty_like, fp32_under_autocast, new_gradient


def _unary(x: Tensor, backward: Backward, *, keep_input: bool = False, keep_output: bool = False) -> Tensor:
    """A function of one tensor that keeps its input, its output, or nothing."""
    out = empty_like(x)
    node = record(x.tape, out, backward, (x,))
    if node is not None:
        if keep_input:
            node.save(x)
        if keep_output:
            node.save(out)
    return out


def backward_temporaries(count: int) -> Backward:
    """A backward that makes `count` full-size tensors, of which the last is the gradient."""

    def backward(node: Node, grads: Grads) -> list[Tensor | None]:
        (grad,) = grads
        if grad is None:
            return [None]
        made = [empty_like(grad) for _ in range(count)]
        return [made.pop()]

    return backward


_two, _three, _five = backward_temporaries(2), backward_temporaries(3), backward_temporaries(5)


def silu(x: Tensor) -> Tensor:
    """SiLU keeps its input."""
    return _unary(x, new_gradient, keep_input=True)


def gelu(x: Tensor) -> Tensor:
    """The fused GELU (exact or tanh-approximated) keeps its input."""
    return _unary(x, new_gradient, keep_input=True)


def erf(x: Tensor) -> Tensor:
    """The error function keeps its input; backward makes x², its negative, exp, a multiple, and the gradient."""
    return _unary(x, _five, keep_input=True)


def glu(x: Tensor, dim: int) -> Tensor:
    """The first half of x along `dim` times the logistic function of the second: keeps x."""
    dim %= len(x.shape)
    shape = (*x.shape[:dim], x.shape[dim] // 2, *x.shape[dim + 1 :])
    out = x.tape.empty(shape, x.dtype, elementwise_stride(shape, ((shape, x.stride),)))
    node = record(x.tape, out, _glu_backward, (x,), (x.shape, x.stride))
    if node is not None:
        node.save(x)
    return out


def _glu_backward(node: Node, grads: Grads) -> list[Tensor | None]:
    (grad,) = grads
    shape, stride = node.context
    return [None if grad is None else node.tape.empty(shape, grad.dtype, dense_stride(shape, stride))]


def relu(x: Tensor) -> Tensor:
    """ReLU keeps its output."""
    return _unary(x, new_gradient, keep_output=True)


def tanh(x: Tensor) -> Tensor:
    """tanh keeps its output."""
    return _unary(x, new_gradient, keep_output=True)


def sigmoid(x: Tensor) -> Tensor:
    """The logistic function keeps its output."""
    return _unary(x, new_gradient, keep_output=True)


def softplus(x: Tensor) -> Tensor:
    """softplus keeps its input. Runs in fp32 under autocast."""
    return _unary(fp32_under_autocast(x), new_gradient, keep_input=True)


def exp(x: Tensor) -> Tensor:
    """exp keeps its output. Runs in fp32 under autocast."""
    return _unary(fp32_under_autocast(x), new_gradient, keep_output=True)


def log(x: Tensor) -> Tensor:
    """log keeps its input. Runs in fp32 under autocast."""
    return _unary(fp32_under_autocast(x), new_gradient, keep_input=True)


def sqrt(x: Tensor) -> Tensor:
    """sqrt keeps its output; backward makes 2·output, then the quotient."""
    return _unary(x, _two, keep_output=True)


def rsqrt(x: Tensor) -> Tensor:
    """1/sqrt keeps its output; backward makes three tensors. Runs in fp32 under autocast."""
    return _unary(fp32_under_autocast(x), _three, keep_output=True)


def cos(x: Tensor) -> Tensor:
    """cos keeps its input; backward makes -sin(x), and the product. Runs in the dtype of x."""
    return _unary(x, _three, keep_input=True)


def sin(x: Tensor) -> Tensor:
    """sin keeps its input; backward makes cos(x), and the product."""
    return _unary(x, _two, keep_input=True)
