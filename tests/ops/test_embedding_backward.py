"""Scratch of the gradient of an embedding, against what PyTorch 2.14 asked of its allocator."""

import json
from typing import Any

import pytest
from support.paths import DATA
from support.tape_events import DEVICES

from memcalc.autograd.tape import Tape
from memcalc.autograd.tensor import Tensor
from memcalc.common.sizes import rounded
from memcalc.ops.embedding_backward import sorted_embedding_gradient
from memcalc.tables.dtypes import BF16, FP16, FP32

DTYPES = {"bfloat16": BF16, "float16": FP16, "float32": FP32}
ROWS = [json.loads(line) for line in (DATA / "allocator" / "embeddings.jsonl").read_text().splitlines()]
"""`events`: bytes of each request, and how many requests it outlived, itself included."""


@pytest.mark.parametrize("row", ROWS, ids=[f"{r['device']} {r['ids']} of {r['rows']} x {r['width']}" for r in ROWS])
def test_scratch_is_what_pytorch_asks_for(row: dict[str, Any]) -> None:
    tape = Tape()
    grad = tape.empty((row["ids"], row["width"]), DTYPES[row["dtype"]])
    if not row["contiguous"]:
        grad = Tensor(grad.shape, (1, row["ids"]), grad.dtype, grad.storage)
    start = tape.clock
    shape = (row["rows"], row["width"])
    made = sorted_embedding_gradient(tape, DEVICES[row["device"]], row["ids"], grad, shape)
    found = [
        [rounded(a.raw_nbytes), None if a is made.storage.allocation else a.dies - a.born]
        for a in tape.allocations[start:]
    ]
    assert found == [[rounded(nbytes), life] for nbytes, life in row["events"]]
