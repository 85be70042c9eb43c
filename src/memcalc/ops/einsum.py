"""Einstein summation of two tensors, as PyTorch does it: permuted and copied into one bmm.

Source: `einsum` and `sumproduct_pair` in aten/src/ATen/native/Linear.cpp of PyTorch 2.14.
"""

from __future__ import annotations

from math import prod

from memcalc.autograd.tensor import Tensor
from memcalc.ops.elementwise import mul
from memcalc.ops.matmul import bmm, cached_cast
from memcalc.ops.reduction import sum
from memcalc.ops.views import permute, reshape, unsqueeze, view


def einsum(equation: str, a: Tensor, b: Tensor) -> Tensor:
    """a and b with their dimensions named, such as "bclhn,bcshn->bclsh"; no letter twice in one operand."""
    if a.tape.autocast is not None:
        a, b = cached_cast(a), cached_cast(b)
    operands, _, out = equation.partition("->")
    first, second = operands.split(",")
    labels = out + "".join(sorted(set(first + second) - set(out)))
    a, b = _aligned(a, first, labels), _aligned(b, second, labels)
    summed = [dim for dim in range(len(out), len(labels)) if a.shape[dim] != 1 or b.shape[dim] != 1]
    result = _sum_of_products(a, b, summed)
    return view(result, *result.shape[: len(out)]) if len(labels) > len(out) else result


def _aligned(x: Tensor, own: str, labels: str) -> Tensor:
    """x with a dimension for every label, those that it lacks of size one."""
    order = own
    for label in labels:
        if label not in own:
            x = unsqueeze(x, len(x.shape))
            order += label
    return permute(x, *(order.index(label) for label in labels))


def _sum_of_products(a: Tensor, b: Tensor, summed: list[int]) -> Tensor:
    """The product of a and b, summed over some dimensions, which stay with size one."""
    if not summed:
        return mul(a, b)
    both, left, right, inner = [], [], [], 1
    for dim in range(len(a.shape)):
        in_a, in_b = a.shape[dim] != 1, b.shape[dim] != 1
        if dim in summed:
            if in_a and in_b:
                inner *= a.shape[dim]
            elif in_a:
                a = sum(a, dim, keepdim=True)
            else:
                b = sum(b, dim, keepdim=True)
        elif in_a and in_b:
            both.append(dim)
        elif in_a:
            left.append(dim)
        else:
            right.append(dim)
    batch, rows = prod(a.shape[d] for d in both), prod(a.shape[d] for d in left)
    columns = prod(b.shape[d] for d in right)
    sizes = (*(a.shape[d] for d in (*both, *left)), *(1 for _ in summed), *(b.shape[d] for d in right))
    order = [*both, *left, *summed, *right]
    a = reshape(permute(a, *order), batch, rows, inner)
    b = reshape(permute(b, *both, *summed, *right, *left), batch, inner, columns)
    return permute(view(bmm(a, b), *sizes), *(order.index(dim) for dim in range(len(order))))
