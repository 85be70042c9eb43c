"""Expert parallel: whole experts on each rank, and tokens that travel to the ranks of their experts and back.

Source: `AllToAllEP` of transformers/distributed/expert_parallel.py, Transformers 5.24: dropless, no capacity.
"""

from __future__ import annotations

from typing import Any

from memcalc import ops
from memcalc.autograd.graph import Grads, Node, record
from memcalc.autograd.tensor import Tensor, contiguous_stride
from memcalc.errors import UsageError
from memcalc.nn.layers.mixture_of_experts import Experts
from memcalc.nn.model import Network
from memcalc.parallel import traffic
from memcalc.parallel.setup import ParallelSetup
from memcalc.tables.dtypes import INT64

ALL_TO_ALL = "all-to-all"


def divide_experts(network: Network, layout: ParallelSetup) -> None:
    """Leave each rank its part of the experts of every layer, unbound.

    Raises UsageError where there are none, they do not divide, or the ranks do not hold them evenly.
    """
    ranks = layout.expert
    found = [module for _, module in network.modules() if isinstance(module, Experts)]
    if not found:
        raise UsageError(
            "--expert-parallel-size spreads experts over GPUs, which this model has none of; leave it out."
        )
    if layout.data * layout.tensor % ranks:
        raise UsageError(
            f"--expert-parallel-size {ranks} does not divide the {layout.data * layout.tensor} GPUs that share a "
            "replica's data and tensors; take a size that does."
        )
    for module in found:
        if module.count % ranks:
            raise UsageError(
                f"--expert-parallel-size {ranks} does not divide the {module.count} experts of a layer; take a size "
                "that does."
            )
        module.count //= ranks
        for _, parameter in module.direct_tensors():
            parameter.shape = (parameter.shape[0] // ranks, *parameter.shape[1:])
            parameter.stride = contiguous_stride(parameter.shape)
        module.masks_rows = True
        module.collective = Dispatch(layout)


class Dispatch:
    """What runs in place of a layer's experts: dispatch, the rank's own experts, and the way back."""

    def __init__(self, layout: ParallelSetup) -> None:
        self.layout = layout

    def __call__(self, module: Any, hidden: Tensor, weights: Tensor, indices: Tensor) -> Tensor:
        """Tokens [n, h], weights and indices of their experts [n, k], to [n, h]."""
        tensor, dtype = self.layout.tensor, hidden.dtype
        if tensor > 1:  # the ranks of a tensor-parallel group share one batch, and each sends a part of it
            hidden, weights, indices = (_part(x, tensor) for x in (hidden, weights, indices))
        tape = hidden.tape
        expert_ids = ops.reshape(indices, -1)
        values, order = ops.sort(expert_ids)
        del values
        sent = ops.index_select(hidden, ops.empty_like(order))
        ones = ops.empty_like(expert_ids)
        counts = [tape.empty((module.count * self.layout.expert,), INT64) for _ in range(2)]
        del ones
        received = _all_to_all(sent, self.layout.expert, self._imbalance)
        local_ids = tape.empty((received.shape[0],), INT64)
        unit_weights = tape.empty((received.shape[0], 1), received.dtype)
        out = self._own_experts(module, received, unit_weights, ops.unsqueeze(local_ids, -1))
        returned = _all_to_all(out, self.layout.expert, 1 / self._imbalance)
        restored = _put_back(returned, order)
        product = ops.mul(ops.view(restored, *weights.shape, restored.shape[-1]), ops.unsqueeze(weights, -1))
        summed = ops.sum(product, 1)
        del counts
        return ops.to(summed if tensor == 1 else _whole(summed, tensor), dtype)

    @property
    def _imbalance(self) -> float:
        """How many times an even share of the rows this rank receives."""
        return self.layout.expert_imbalance

    @staticmethod
    def _own_experts(module: Any, rows: Tensor, weights: Tensor, indices: Tensor) -> Tensor:
        before, module.per_token = module.per_token, 1
        try:
            out: Tensor = module.run(rows, weights, indices)
            return out
        finally:
            module.per_token = before


def _all_to_all(x: Tensor, ranks: int, factor: float) -> Tensor:
    """Rows of x for other ranks, exchanged for theirs: `factor` times as many come as go."""
    out = x.tape.empty((round(x.shape[0] * factor), *x.shape[1:]), x.dtype)
    x.tape.send(ALL_TO_ALL, x.numel * x.dtype.itemsize * (ranks - 1) // ranks)
    record(x.tape, out, _exchange_gradient, (x,), (x.shape, ranks))
    return out


def _exchange_gradient(node: Node, grads: Grads) -> list[Tensor | None]:
    (grad,) = grads
    if grad is None:
        return [None]
    shape, ranks = node.context
    node.tape.send(ALL_TO_ALL, grad.numel * grad.dtype.itemsize * (ranks - 1) // ranks)
    return [node.tape.empty(shape, grad.dtype)]


def _put_back(x: Tensor, order: Tensor) -> Tensor:
    """Rows of x in the order that they were sorted from (an empty tensor that is indexed and filled)."""
    out = x.tape.empty(x.shape, x.dtype)
    node = record(x.tape, out, _like_gradient, (x,))
    if node is not None:
        node.save(order)
    return out


def _like_gradient(node: Node, grads: Grads) -> list[Tensor | None]:
    (grad,) = grads
    return [None if grad is None else node.tape.empty(grad.shape, grad.dtype)]


def _part(x: Tensor, ranks: int) -> Tensor:
    """A copy of this rank's rows of x; the gradients of all ranks' rows are gathered."""
    rows = -(-x.shape[0] // ranks)
    out = x.tape.empty((rows, *x.shape[1:]), x.dtype)
    record(x.tape, out, _gather_rows, (x,), (x.shape, ranks))
    return out


def _gather_rows(node: Node, grads: Grads) -> list[Tensor | None]:
    (grad,) = grads
    if grad is None:
        return [None]
    shape, ranks = node.context
    out = node.tape.empty(shape, grad.dtype)
    traffic.gather(node.tape, out.numel * out.dtype.itemsize, ranks)
    return [out]


def _whole(x: Tensor, ranks: int) -> Tensor:
    """The rows of all ranks of a tensor-parallel group; the gradient is cut to this rank's."""
    out = x.tape.empty((x.shape[0] * ranks, *x.shape[1:]), x.dtype)
    traffic.gather(x.tape, out.numel * out.dtype.itemsize, ranks)
    record(x.tape, out, _cut_rows, (x,), x.shape)
    return out


def _cut_rows(node: Node, grads: Grads) -> list[Tensor | None]:
    (grad,) = grads
    if grad is None:
        return [None]
    return [Tensor(node.context, contiguous_stride(node.context), grad.dtype, grad.storage, is_view=True)]
