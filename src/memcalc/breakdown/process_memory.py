"""What the process takes besides the tensors of the step: each with a name, an option, and a line under Assumptions."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

from memcalc.common.assumption import Assumption
from memcalc.common.sizes import MIB
from memcalc.setup.setup import InferenceSetup, TrainingSetup
from memcalc.tables import overheads
from memcalc.tables.cuda_contexts import context_of
from memcalc.tables.nccl import NCCL, PUBLISHED_SPREAD
from memcalc.units import counted, format_bytes, format_mib, parse_size

if TYPE_CHECKING:
    from memcalc.tables.gpus import Gpu

SEGMENT = 2 * MIB
"""The allocator reserves memory in segments of a multiple of this (kSmallBuffer, kRoundLarge)."""


class AllocatorCounters(NamedTuple):
    """What a simulation of PyTorch's allocator says.

    allocated, reserved: the most of each, in bytes. ran: what was simulated, such as "3 equal steps". lower: what would
    reserve less, each with the bytes that it would reserve. by_step: the most reserved in each step of a run of many
    lengths. beyond: whether the GPU has less than that, so that the run was simulated without its limit.
    """

    allocated: int
    reserved: int
    ran: str
    lower: tuple[tuple[str, int], ...] = ()
    by_step: tuple[int, ...] = ()
    beyond: bool = False


@dataclass(frozen=True)
class ProcessMemory:
    """Bytes outside the traced tensors, and the three counters that follow from them."""

    tensors: int
    inputs: int
    workspaces: tuple[str, int, int]
    """Name, bytes of one, how many."""
    reserve_fraction: float
    context: int
    nccl: int
    """Bytes of the communicators' buffers."""
    explicit_options: frozenset[str]
    """Fields of the setup that the user set."""
    cudnn: int = 0
    """Bytes of workspaces of convolutions."""
    context_source: str = ""
    """Where the size of the CUDA context comes from."""
    counters: AllocatorCounters | None = None
    """What the allocator was simulated to say; None where it was not."""
    not_simulated: str = ""
    """Why it was not."""

    @classmethod
    def for_job(
        cls, inputs: int, setup: TrainingSetup | InferenceSetup, gpu: Gpu | None, tensors: int, communicators: int = 0
    ) -> ProcessMemory:
        """For `inputs` bytes of a batch and tensors that peak at `tensors`. UsageError for a size that is none.

        The allocator is not simulated (`with_counters`).
        """
        given = setup.nccl_buffers
        workspace = overheads.workspace_of(gpu)
        training = isinstance(setup, TrainingSetup)
        buffers = isinstance(setup, InferenceSetup) and setup.engine == "llama.cpp"  # it has no caching allocator
        measured = overheads.CUDA_CONTEXT_TRAINING if training else overheads.CUDA_CONTEXT_INFERENCE
        context, source = context_of(gpu) or (measured.nbytes, "measured on one RTX A6000")
        return cls(
            tensors,
            inputs,
            (
                workspace.name,
                workspace.nbytes if setup.cublas_workspace is None else parse_size(setup.cublas_workspace),
                overheads.WORKSPACES_TRAINING if training else 0 if buffers else overheads.WORKSPACES_INFERENCE,
            ),
            (0.0 if buffers else overheads.ALLOCATOR_RESERVE)
            if setup.allocator_reserve is None
            else setup.allocator_reserve,
            context if setup.cuda_context is None else parse_size(setup.cuda_context),
            communicators * NCCL.communicator if given is None else parse_size(given),
            frozenset(setup.model_fields_set),
            0 if setup.cudnn_workspace is None else parse_size(setup.cudnn_workspace),
            source,
        )

    def with_counters(self, counters: AllocatorCounters | None, not_simulated: str = "") -> ProcessMemory:
        """The same with what a simulation of the allocator says, or why there is none."""
        return replace(self, counters=counters, not_simulated=not_simulated)

    @property
    def counted(self) -> int:
        """Bytes of the tensors and workspaces that are counted."""
        return self.tensors + self.inputs + self.workspaces[1] * self.workspaces[2] + self.cudnn

    @property
    def unsplit(self) -> int:
        """What the allocator hands out beyond those."""
        return 0 if self.counters is None else max(self.counters.allocated - self.counted, 0)

    @property
    def allocated(self) -> int:
        """torch.cuda.max_memory_allocated()."""
        return self.counted + self.unsplit

    @property
    def reserve(self) -> int:
        """Held by the allocator beyond what is allocated: as simulated, or a fraction of it, in whole segments."""
        if self.counters is not None:
            return max(self.counters.reserved - self.allocated, 0)
        return -(-int(self.allocated * self.reserve_fraction) // SEGMENT) * SEGMENT

    @property
    def reserved(self) -> int:
        """torch.cuda.max_memory_reserved()."""
        return self.allocated + self.reserve

    @property
    def process(self) -> int:
        """What nvidia-smi shows for the process."""
        return self.reserved + self.context + self.nccl

    def parts(self) -> Iterator[tuple[str, int]]:
        """The parts of OTHER OVERHEAD."""
        name, nbytes, count = self.workspaces
        yield overheads.CUDA_CONTEXT_PART, self.context
        yield overheads.NCCL_PART, self.nccl
        yield f"{name}s" if count > 1 else name, nbytes * count
        yield "cuDNN workspaces", self.cudnn
        yield overheads.UNSPLIT_PART, self.unsplit
        yield overheads.ALLOCATOR_RESERVE_PART, self.reserve
        yield "input batch", self.inputs

    def _growth(self) -> str:
        """How what is reserved grows with lengths that differ."""
        assert self.counters is not None
        steps = self.counters.by_step
        if not steps:
            return "batches of many lengths reserve more (--lengths in training)"
        first, last = format_bytes(steps[0]), format_bytes(max(steps))
        since = steps.index(max(steps)) + 1
        return f"{first} are reserved in the first, {last} from step {since} on"

    def _limit(self) -> str:
        """That the run is one without the GPU's limit, where it has no room within it."""
        assert self.counters is not None
        if not self.counters.beyond:
            return ""
        return "; simulated without the GPU's limit, within which the job runs out of memory"

    def resolved(self) -> dict[str, object]:
        """The values used for the options of this module."""
        return {
            "cuda_context": self.context,
            "cublas_workspace": self.workspaces[1],
            "cudnn_workspace": self.cudnn,
            "allocator_reserve": self.reserve_fraction if self.counters is None else None,
        }

    def assumptions(self) -> Iterator[Assumption]:
        """A line for everything that the user did not say."""
        name, nbytes, count = self.workspaces
        if "cuda_context" not in self.explicit_options:
            text = f"CUDA context {format_mib(self.context)}, {self.context_source} (--cuda-context)"
            yield Assumption("cuda_context", text)
        if "cublas_workspace" not in self.explicit_options:
            text = f"{counted(count, name)} of {format_mib(nbytes)} (--cublas-workspace)"
            yield Assumption("cublas_workspace", text)
        if self.nccl and "nccl_buffers" not in self.explicit_options:
            yield Assumption(
                "nccl_buffers",
                f"NCCL buffers: {NCCL.channels} channels of {format_mib(NCCL.channel)} for each communicator; "
                f"published jobs have {PUBLISHED_SPREAD} (--nccl-buffers)",
            )
        if self.counters is not None:
            code = "mixed_lengths" if self.counters.by_step else "allocator_simulated"
            yield Assumption(code, f"allocator simulated for {self.counters.ran}: {self._growth()}{self._limit()}")
            if self.counters.lower:
                ways = " or ".join(f"{format_bytes(size)} with {how}" for how, size in self.counters.lower)
                yield Assumption(
                    "reserve_can_be_lower",
                    f"{format_bytes(self.reserve)} are reserved beyond what is allocated; {ways} would be reserved",
                )
        elif "allocator_reserve" not in self.explicit_options:
            why = f" ({self.not_simulated})" if self.not_simulated else ""
            yield Assumption(
                "allocator_reserve",
                f"allocator reserve {self.reserve_fraction:.0%}{why}, more where memory fragments "
                "(--allocator-reserve)",
            )
