"""What a process takes beside its tensors: CUDA context, library workspaces, allocator reserve. One row a fact.

Each is a named part of OTHER OVERHEAD with an option that replaces it; none is a correction factor.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

from memcalc.common.sizes import MIB

if TYPE_CHECKING:
    from memcalc.tables.gpus import Gpu

CUDA_CONTEXT_PART = "CUDA context"
"""Part of OTHER OVERHEAD that lies outside PyTorch's allocator."""

NCCL_PART = "NCCL buffers"
"""Part of OTHER OVERHEAD that communicators take outside PyTorch's allocator (`tables/nccl.py`)."""

OUTSIDE_THE_ALLOCATOR = (CUDA_CONTEXT_PART, NCCL_PART)

ALLOCATOR_RESERVE_PART = "allocator reserve"
"""Part of OTHER OVERHEAD that the allocator holds without having handed it out."""


UNSPLIT_PART = "unsplit blocks, kernel scratch"
"""Part of OTHER OVERHEAD that the allocator hands out beyond the tensors that are counted: what is left of a block and
is too little to be split off, and what kernels ask for while they run."""


class ContextSize(NamedTuple):
    """The CUDA context of one PyTorch process, in bytes: driver, kernels and libraries, outside the allocator."""

    name: str
    nbytes: int
    source: str


class Workspace(NamedTuple):
    """One workspace of the matrix-multiplication library, in bytes, as PyTorch allocates it for a handle and stream."""

    name: str
    nbytes: int
    applies: Callable[[Gpu], bool]
    source: str


CUDA_CONTEXT_TRAINING = ContextSize(
    "CUDA context",
    744_685_568,
    "measured outside the allocator on an RTX A6000 with torch 2.14.1+cu130, the same in all seven training runs",
)
CUDA_CONTEXT_INFERENCE = ContextSize(
    "CUDA context",
    736_296_960,
    "measured outside the allocator on an RTX A6000 with torch 2.14.1+cu130, the same in all three inference runs",
)

_CUBLAS = "PyTorch, aten/src/ATen/cuda/CublasHandlePool.cpp, parseChosenWorkspaceSize()"

WORKSPACES: tuple[Workspace, ...] = (
    Workspace("hipBLAS workspace", 128 * MIB, lambda gpu: gpu.architecture in ("gfx942", "gfx950"), _CUBLAS),
    Workspace("hipBLAS workspace", 32 * MIB, lambda gpu: gpu.architecture.startswith("gfx"), _CUBLAS),
    Workspace(
        "cuBLAS workspace",
        32 * MIB,
        lambda gpu: (gpu.compute_capability or (0, 0))[0] >= 9,
        _CUBLAS + ": 32 MiB from Hopper on (Hopper alone up to torch 2.11)",
    ),
    Workspace(
        "cuBLAS workspace",
        8_519_680,
        lambda gpu: True,
        _CUBLAS + ": :4096:2:16:8 before Hopper; two of them measured inside the totals on an RTX A6000",
    ),
)
"""The first row that applies holds. A GPU that is not named gets the last one."""

WORKSPACES_TRAINING = 2
"""Each thread that multiplies has its own handle: forward runs on the caller's, backward on autograd's."""

WORKSPACES_INFERENCE = 1

ALLOCATOR_RESERVE = 0.02
"""Memory that the allocator holds beyond what is allocated, as a fraction of what is allocated.

It depends on the order of allocations, so no number is right for all. Megatron-LM prints both counters; four such lines
in public logs say 0.7 %, 0.8 %, 0.9 % and 7.7 %. 2 % lies among them: most jobs need less, and a fragmented one says so
with `--allocator-reserve`.
"""


def workspace_of(gpu: Gpu | None) -> Workspace:
    """The workspace that PyTorch allocates on `gpu`; without one, as on GPUs before Hopper."""
    return WORKSPACES[-1] if gpu is None else next(row for row in WORKSPACES if row.applies(gpu))
