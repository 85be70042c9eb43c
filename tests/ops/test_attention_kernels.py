"""`scaled_dot_product_attention` allocates on each GPU what PyTorch 2.14 allocated there, forward and backward."""

import json
from typing import Any

import pytest
from support.paths import DATA
from support.tape_events import DEVICES, events, in_one_order

from memcalc import ops
from memcalc.autograd.engine import backward_from
from memcalc.autograd.graph import AccumulateGrad, Grads, Node
from memcalc.autograd.tape import ACTIVATIONS, Tape
from memcalc.autograd.tensor import Tensor
from memcalc.common.sizes import Shape
from memcalc.tables.dtypes import BF16, BOOL, FP16, FP32, DType

ROWS = [json.loads(line) for line in (DATA / "allocator" / "attention.jsonl").read_text().splitlines()]
"""Each with the GPU, the call, and its events: bytes of allocations, and which of them are freed."""

DTYPES = {"bf16": BF16, "fp16": FP16, "fp32": FP32}


def leaf(tape: Tape, shape: Shape, dtype: DType, kept: list[Any]) -> Tensor:
    """A tensor that asks for a gradient, which is taken as it comes."""

    def take(node: Node, grads: Grads) -> list[Tensor | None]:
        kept.append(grads)
        return []

    made = tape.external_tensor(shape, dtype, ACTIVATIONS, "input").detach()
    made.node = AccumulateGrad(tape, "input", None)
    made.node.backward = take
    return made


def by_heads(tape: Tape, batch: int, length: int, heads: int, dim: int, dtype: DType, kept: list[Any]) -> Tensor:
    """[b, h, s, d], stored position by position as projections leave it."""
    stored = leaf(tape, (batch, length, heads, dim), dtype, kept)
    shape, stride = stored.shape, stored.stride
    turned = ((shape[0], shape[2], shape[1], shape[3]), (stride[0], stride[2], stride[1], stride[3]))
    return Tensor(*turned, dtype, stored.storage, stored.node)


@pytest.mark.parametrize("row", ROWS, ids=[f"{i}-{row['device']}" for i, row in enumerate(ROWS)])
def test_attention_allocates_what_pytorch_does(row: dict[str, Any]) -> None:
    c, tape = row["case"], Tape()
    kept: list[Any] = []
    tape.device = DEVICES[row["device"]]
    dtype = DTYPES[c["dt"]]
    query = by_heads(tape, c["b"], c["s"], c["h"], c["d"], dtype, kept)
    key = by_heads(tape, c["b"], c["t"], c["kv"], c["d"], dtype, kept)
    value = by_heads(tape, c["b"], c["t"], c["kv"], c["dv"], dtype, kept)
    mask = None
    if c.get("maskgrad"):
        mask = leaf(tape, (1, c["h"], c["s"], c["t"]), dtype, kept)
    elif "mask" in c:
        kind = BOOL if c["mask"] == "bool" else dtype
        mask = tape.external_tensor((c["b"], 1, c["s"], c["t"]), kind, ACTIVATIONS, "mask")
    is_causal = c["causal"] and mask is None
    out = ops.scaled_dot_product_attention(query, key, value, mask, c.get("dropout", 0.0), is_causal=is_causal)
    forward_end = tape.clock
    assert in_one_order(events(tape, 0, forward_end)) == in_one_order(row["forward"].split())
    incoming = tape.external_tensor(out.shape, out.dtype, ACTIVATIONS, "gradient")
    outputs = [(out, Tensor(out.shape, out.stride, out.dtype, incoming.storage))]
    del query, key, value, mask, out, incoming
    tape.grad_enabled = False
    backward_from(tape, outputs)
    assert in_one_order(events(tape, forward_end, tape.clock)) == in_one_order(row["backward"].split())
