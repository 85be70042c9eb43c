"""Bytes of parameters and gradients, summed in one place for every row of the box and for the host."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from memcalc.autograd.graph import AccumulateGrad
from memcalc.common.sizes import rounded
from memcalc.nn.module import QUANTIZATION_CONSTANTS, Buffer, Parameter
from memcalc.tables.dtypes import short


def nbytes(tensor: Parameter) -> int:
    """Bytes that the allocator takes for a weight or buffer and for all of its kind."""
    return rounded(tensor.numel * tensor.dtype.itemsize) * tensor.copies


def total(tensors: Iterable[Parameter]) -> int:
    """Bytes of all of them on a GPU."""
    return sum(map(nbytes, tensors))


def in_files(tensors: Iterable[Parameter]) -> int:
    """Bytes of their elements alone, as a checkpoint or host memory holds them."""
    return sum(tensor.numel * tensor.copies * tensor.dtype.itemsize for tensor in tensors)


def label(tensor: Parameter, dtype_name: str | None = None) -> str:
    """What a weight or buffer is shown as in the box."""
    if isinstance(tensor, Buffer):
        return QUANTIZATION_CONSTANTS if tensor.group == QUANTIZATION_CONSTANTS else "buffers"
    return f"{dtype_name or short(tensor.dtype)} {tensor.group}"


def by_label(tensors: Iterable[Parameter]) -> dict[str, int]:
    """Bytes on a GPU by what the weights and buffers are."""
    sizes: dict[str, int] = {}
    for tensor in tensors:
        name = label(tensor)
        sizes[name] = sizes.get(name, 0) + nbytes(tensor)
    return sizes


def gradients(parameters: Iterable[Parameter]) -> Iterator[int]:
    """Bytes of each gradient; those that are views of one larger tensor (of a class token) keep it, once."""
    seen: set[int] = set()
    for parameter in parameters:
        if not parameter.reached:
            continue
        allocation = parameter.node.allocation if isinstance(parameter.node, AccumulateGrad) else None
        if allocation is None:
            yield nbytes(parameter)
        elif id(allocation) not in seen:
            seen.add(id(allocation))
            yield allocation.nbytes * parameter.copies
