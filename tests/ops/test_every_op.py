"""Each operation allocates, keeps and frees what PyTorch does, forward and backward, in its order.

Rows: the operation in PyTorch 2.14 with its CUDA allocator on an A100 (`torch.cuda.memory._record_memory_history`):
bytes of each allocation; `f2` where the third of them is freed, `F2` where backward frees the third of forward's.
Inputs are [shape, kind]: w asks for a gradient, f does not, i are integers, b booleans.
"""

import json
from collections import defaultdict
from collections.abc import Callable, Collection
from typing import Any

import pytest
from support.paths import DATA
from support.tape_events import DEVICES, in_one_order

from memcalc import ops
from memcalc.autograd.engine import backward_from
from memcalc.autograd.graph import AccumulateGrad, Grads, Node
from memcalc.autograd.tape import ACTIVATIONS, NEVER, Tape
from memcalc.autograd.tensor import Tensor
from memcalc.tables.dtypes import ALIASES, BF16, BOOL, FP32, INT64

ROWS = [json.loads(line) for line in (DATA / "ops.jsonl").read_text().splitlines()]

OPS: dict[str, Callable[..., Tensor]] = {
    "add": ops.add,
    "add, broadcast": ops.add,
    "sub": ops.sub,
    "sub, broadcast": ops.sub,
    "mul": ops.mul,
    "mul, broadcast": ops.mul,
    "mul, by a constant tensor": ops.mul,
    "div": ops.div,
    "div, broadcast": ops.div,
    "mul_scalar": ops.mul_scalar,
    "add_scalar": ops.add_scalar,
    "neg": ops.neg,
    "pow": ops.pow,
    "pow, cubed": lambda a: ops.pow(a, 3),
    "to": lambda a: ops.to(a, FP32 if a.dtype is BF16 else ALIASES["fp64"]),
    "dropout": lambda a: ops.dropout(a, 0.1),
    "masked_fill": ops.masked_fill,
    "masked_fill, broadcast": ops.masked_fill,
    "masked_fill_": lambda a, b: ops.masked_fill_(ops.mul_scalar(a), b),
    "where": lambda a, b, c: ops.where(c, a, b),
    "compare": ops.compare,
    "silu": ops.silu,
    "gelu": ops.gelu,
    "erf": ops.erf,
    "glu": lambda a: ops.glu(a, -1),
    "relu": ops.relu,
    "tanh": ops.tanh,
    "sigmoid": ops.sigmoid,
    "softplus": ops.softplus,
    "exp": ops.exp,
    "log": ops.log,
    "sqrt": ops.sqrt,
    "rsqrt": ops.rsqrt,
    "cos": ops.cos,
    "sin": ops.sin,
    "log_sigmoid": ops.log_sigmoid,
    "expm1": ops.expm1,
    "clamp": ops.clamp,
    "clamp, one bound": lambda a: ops.clamp(a, 1),
    "maximum": ops.maximum,
    "minimum": ops.minimum,
    "group_norm": lambda a, b, c: ops.group_norm(a, b, c, 4),
    "layer_norm": ops.layer_norm,
    "layer_norm, without weights": lambda a: ops.layer_norm(a, None, None),
    "rms_norm": ops.rms_norm,
    "linear": ops.linear,
    "linear, without bias": ops.linear,
    "linear, frozen weight": ops.linear,
    "linear, frozen input": ops.linear,
    "mm": ops.matmul,
    "addmm": ops.addmm,
    "matmul": ops.matmul,
    "matmul, with a transposed view": lambda a, b: ops.matmul(a, ops.transpose(b, -1, -2)),
    "bmm": ops.bmm,
    "baddbmm": ops.baddbmm,
    "mean": ops.mean,
    "std": ops.std,
    "sum": ops.sum,
    "sum, over the first dimension": lambda a: ops.sum(a, 0),
    "logsumexp": ops.logsumexp,
    "vector_norm": ops.vector_norm,
    "softmax": ops.softmax,
    "softmax, in fp32": lambda a: ops.softmax(a, FP32),
    "log_softmax": ops.log_softmax,
    "embedding": ops.embedding,
    "cross_entropy": ops.cross_entropy,
    "nll_loss": ops.nll_loss,
    "mse_loss": ops.mse_loss,
    "binary_cross_entropy_with_logits": ops.binary_cross_entropy_with_logits,
    "index_select": ops.index_select,
    "gather": ops.gather,
    "topk": lambda a: ops.topk(a, 8)[0],
    "max": lambda a: ops.max(a)[0],
    "cat": lambda a, b: ops.cat((a, b), -1),
    "stack": lambda a, b: ops.stack((a, b), 0),
    "split": lambda a: ops.cat(ops.split(a, [20, 50], -1)[::-1], -1),
    "split, one piece": lambda a: ops.split(a, [20, 50], -1)[0],
    "unbind": lambda a: ops.stack(ops.unbind(a, 0)[:2], 0),
    "view": lambda a: ops.view(a, 300, 70),
    "reshape, of a transposed view": lambda a: ops.reshape(ops.transpose(a, 1, 2), 6, -1),
    "clone": ops.clone,
    "contiguous": lambda a: ops.contiguous(ops.transpose(a, 1, 2)),
    "transpose": lambda a: ops.transpose(a, 1, 2),
    "permute": lambda a: ops.permute(a, 2, 0, 1),
    "unsqueeze": lambda a: ops.unsqueeze(a, 1),
    "expand": lambda a: ops.expand(a, 6, 50, 70),
    "narrow": lambda a: ops.narrow(a, 1, 20),
    "select": lambda a: ops.select(a, 1),
    "slice": lambda a: ops.slice(a, 1, 2),
    "repeat": lambda a: ops.repeat(a, 1, 2, 1),
    "pad": lambda a: ops.pad(a, 1, 14),
    "roll": ops.roll,
    "cumsum": ops.cumsum,
    "convolution": lambda a, b, c: ops.convolution(a, b, c, padding=1),
    "convolution, of patches": lambda a, b, c: ops.convolution(a, b, c, stride=5),
    "avg_pool2d": lambda a: ops.avg_pool2d(a, 2),
    "max_pool2d": lambda a: ops.max_pool2d(a, 3, 2, 1),
    "upsample_nearest": lambda a: ops.upsample_nearest(a, (60, 60)),
    "mul_scalar_": lambda a: ops.mul_scalar_(ops.mul_scalar(a)),
    "add_": lambda a, b: ops.add_(ops.mul_scalar(a), b),
    "div_": lambda a, b: ops.div_(ops.mul_scalar(a), b),
}
"""The operations as memcalc writes what a row's `torch` says."""


def _input(tape: Tape, shape: list[int], kind: str, dtype: str, kept: list[Any]) -> Tensor:
    kinds = {"i": INT64, "b": BOOL}

    def take(node: Node, grads: Grads) -> list[Tensor | None]:
        kept.append(grads)
        return []

    made = tape.external_tensor(tuple(shape), kinds.get(kind, ALIASES[dtype]), ACTIVATIONS, "input").detach()
    if kind == "w":
        made.node = AccumulateGrad(tape, "input", None)
        made.node.backward = take
    return made


def _events(tape: Tape, start: int, gone: Collection[int] = ()) -> list[str]:
    """What was allocated from tick `start` on, and freed, up to now; `gone` were freed before."""
    freed: dict[int, list[str]] = defaultdict(list)
    for index, allocation in enumerate(tape.allocations):
        if id(allocation) not in gone:
            freed[allocation.dies].append(f"fF{index}" if index < start else f"f{index - start}")
    found: list[str] = []
    for tick in range(start, tape.clock + 1):
        found += freed[tick]
        if tick < tape.clock:
            found.append(str(tape.allocations[tick].raw_nbytes))
    return found


KNOWN = ("index_select",)
"""Its backward sorts the indices: some lists of them, and what CUB sorts in, are left out."""


@pytest.mark.parametrize("row", ROWS, ids=[f"{row['op']} ({row['dtype']})" for row in ROWS])
def test_an_operation_allocates_what_pytorch_does(row: dict[str, Any]) -> None:
    tape, kept = Tape(), list[Any]()
    tape.device = DEVICES["a100"]
    inputs = [_input(tape, shape, kind, row["dtype"], kept) for shape, kind in row["inputs"]]
    out = OPS[row["op"]](*inputs)
    assert in_one_order(_events(tape, 0)) == in_one_order(row["forward"].split())
    if "backward" not in row:
        assert out.node is None
        return
    start, gone = tape.clock, {id(allocation) for allocation in tape.allocations if allocation.dies != NEVER}
    given = tape.external_tensor(out.shape, out.dtype, ACTIVATIONS, "gradient")
    outputs = [(out, Tensor(out.shape, out.stride, out.dtype, given.storage))]
    tape.grad_enabled = False
    backward_from(tape, outputs)
    if row["op"] in KNOWN:
        assert _events(tape, start, gone) == row["backward"].split()[:1]
        return
    recorded = row["backward"].replace("F", "fF").split()
    assert in_one_order(_events(tape, start, gone)) == in_one_order(recorded)
    assert len(kept) == sum(kind == "w" for _, kind in row["inputs"])
