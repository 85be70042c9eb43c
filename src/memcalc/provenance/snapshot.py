"""The step as PyTorch's own memory snapshot: what `torch.cuda.memory._snapshot()` gives, for PyTorch's memory viewer.

Addresses and segments are those that PyTorch's allocator would give out on a device without a limit. The format is that
of torch/cuda/memory.py of PyTorch 2.14; time counts events, one microsecond each. Frames are the operation with the
line of its recipe, the module, and the phase.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from memcalc.allocator.blocks import Block
from memcalc.allocator.caching import CachingAllocator
from memcalc.autograd.tape import GRADIENTS, Allocation
from memcalc.breakdown.process_memory import ProcessMemory
from memcalc.errors import UsageError
from memcalc.estimation.job import Setup
from memcalc.models.spec import ModelSpec
from memcalc.provenance.explain import process_memory, sizes_of
from memcalc.provenance.formulas import Sizes
from memcalc.provenance.moments import Lives
from memcalc.provenance.origins import Recording, RecordingTape
from memcalc.provenance.record import record_step
from memcalc.provenance.standing import Standing, process_parts, standing_tensors
from memcalc.tables import overheads
from memcalc.tables.gpus import Gpu
from memcalc.training.traced_step import Step

_BASE = 0x7F00_0000_0000
"""Where device addresses begin."""

OUTSIDE = (overheads.CUDA_CONTEXT_PART, overheads.NCCL_PART, overheads.ALLOCATOR_RESERVE_PART)
"""Parts of the process that no allocation of PyTorch holds."""

_POOL = (0, 0)


def snapshot(spec: ModelSpec, setup: Setup, gpu: Gpu | None = None, teacher: ModelSpec | None = None) -> dict[str, Any]:
    """The snapshot of a job's step, of plain containers alone. Raises UsageError for a job on several GPUs."""
    step = record_step(spec, setup, Recording(), teacher, gpu)
    if step.engine is not None:
        raise UsageError("a memory snapshot is written for a job on one GPU; leave out the options of several.")
    sizes = sizes_of(spec, step)
    trace = _Trace()
    _run(trace, step, process_memory(step, setup, gpu), sizes)
    return {
        "segments": trace.segments(),
        "device_traces": [trace.events],
        "allocator_settings": {"PYTORCH_CUDA_ALLOC_CONF": "", "expandable_segments": False, "max_split_size": -1},
        "external_annotations": trace.annotations,
        "host_segments": [],
        "host_traces": [],
    }


class _Trace:
    """The events of a device, with PyTorch's allocator behind them."""

    def __init__(self) -> None:
        self.events: list[dict[str, Any]] = []
        self.annotations: list[dict[str, Any]] = []
        self._allocator = CachingAllocator()
        self._frames: dict[int, list[dict[str, Any]]] = {}
        self._busy: dict[int, Block] = {}
        self._known: dict[object, dict[str, Any]] = {}

    def frame(self, name: str, filename: str, line: int = 0) -> dict[str, Any]:
        """A frame; equal ones are one object, as in PyTorch's snapshots."""
        return self._known.setdefault((name, filename, line), {"name": name, "filename": filename, "line": line})

    def allocate(self, nbytes: int, frames: list[dict[str, Any]], row: str) -> Block:
        """Serve a request; a segment that is new for it has an event of its own."""
        before = self._allocator.reserved
        block = self._allocator.malloc(nbytes)
        grown = self._allocator.reserved - before
        if grown:
            self._note("segment_alloc", _start(block), grown, frames, row)
        self._frames[block.address] = frames
        self._busy[block.address] = block
        self._note("alloc", block.address, nbytes, frames, row)
        return block

    def free(self, block: Block, row: str) -> None:
        """Give a block back."""
        address, frames = block.address, self._frames.pop(block.address)
        del self._busy[address]
        for action in ("free_requested", "free_completed"):
            self._note(action, address, block.requested, frames, row)
        self._allocator.free(block)

    def mark(self, stage: str, name: str) -> None:
        """The start or the end of something that the viewer shows."""
        self.annotations.append({"stage": stage, "name": name, "device": 0, "time_us": len(self.events)})

    def _note(self, action: str, address: int, nbytes: int, frames: list[dict[str, Any]], row: str) -> None:
        self.events.append(
            {
                "action": action,
                "addr": _BASE + address,
                "size": nbytes,
                "stream": 0,
                "time_us": len(self.events),
                "compile_context": "N/A",
                "user_metadata": row,
                "pool_id": _POOL,
                "frames": frames,
            }
        )

    def segments(self) -> list[dict[str, Any]]:
        """The segments as they are at the end, each with its blocks in order."""
        cached = [*self._allocator.small.free_blocks(), *self._allocator.large.free_blocks()]
        first = {_start(block): _first(block) for block in (*self._busy.values(), *cached)}
        return [self._segment(list(_chain(block))) for _, block in sorted(first.items())]

    def _segment(self, blocks: list[Block]) -> dict[str, Any]:
        busy = [block for block in blocks if block.busy]
        allocated = sum(block.size for block in busy)
        return {
            "device": 0,
            "address": _BASE + blocks[0].address,
            "total_size": sum(block.size for block in blocks),
            "allocated_size": allocated,
            "active_size": allocated,
            "requested_size": sum(block.requested for block in busy),
            "stream": 0,
            "segment_type": "small" if blocks[0].pool.small else "large",
            "segment_pool_id": _POOL,
            "is_expandable": False,
            "frames": [],
            "blocks": [
                {
                    "address": _BASE + block.address,
                    "size": block.size,
                    "requested_size": block.requested if block.busy else 0,
                    "state": "active_allocated" if block.busy else "inactive",
                    "frames": self._frames.get(block.address, []) if block.busy else [],
                }
                for block in blocks
            ],
        }


def _first(block: Block) -> Block:
    while block.prev is not None:
        block = block.prev
    return block


def _start(block: Block) -> int:
    return _first(block).address


def _chain(block: Block | None) -> Iterator[Block]:
    while block is not None:
        yield block
        block = block.next


def _run(trace: _Trace, step: Step, memory: ProcessMemory, sizes: Sizes) -> None:
    """What stands, then the tape, allocation by allocation; what stands changes with the phase."""
    tape = step.tape
    assert isinstance(tape, RecordingTape)
    outside = [part for part in process_parts(step, memory, sizes) if part.part not in OUTSIDE]
    stands = _Standing(trace, outside)
    dying: dict[int, list[Allocation]] = {}
    for allocation in tape.allocations:
        dying.setdefault(allocation.dies, []).append(allocation)
    alive: dict[int, tuple[Allocation, Block]] = {}
    life, phase = Lives(tape), ""

    def die(tick: int) -> None:
        for allocation in dying.get(tick, ()):
            if id(allocation) in alive:
                trace.free(alive.pop(id(allocation))[1], allocation.row)

    for tick, allocation in enumerate(tape.allocations):
        die(tick)
        now = life.phase(tick)
        if now != phase and now in step.phases:
            phase = _change(trace, phase, now)
            stands.become(list(standing_tensors(step, phase, sizes)))
        if allocation.nbytes > 0:
            alive[id(allocation)] = (
                allocation,
                trace.allocate(_asked(allocation), _frames(trace, life, allocation), allocation.row),
            )
    die(tape.clock)
    if "step" in step.phases:
        _step(trace, step, stands, list(alive.values()), _change(trace, phase, "step"), sizes)
        phase = "step"
    trace.mark("END", phase)


def _asked(allocation: Allocation) -> int:
    """Bytes that the tensor asks for."""
    return min(max(allocation.raw_nbytes, 1), allocation.nbytes)


def _change(trace: _Trace, before: str, now: str) -> str:
    if before:
        trace.mark("END", before)
    trace.mark("START", now)
    return now


def _step(
    trace: _Trace, step: Step, stands: _Standing, left: list[tuple[Allocation, Block]], phase: str, sizes: Sizes
) -> None:
    """The optimizer's step: gradients stand until it is over, whatever else is left goes before."""
    parts = list(standing_tensors(step, phase, sizes))
    gradients = [pair for pair in left if pair[0].row == GRADIENTS]
    same = sum(allocation.nbytes for allocation, _ in gradients) == sum(
        part.nbytes for part in parts if part.row == GRADIENTS
    )
    kept = gradients if same else []
    for allocation, block in left:
        if not any(block is other for _, other in kept):
            trace.free(block, allocation.row)
    stands.become([part for part in parts if part.row != GRADIENTS or not kept])
    for allocation, block in kept:
        trace.free(block, allocation.row)


class _Standing:
    """What stands around the tape: what a phase does not have goes, what it has in addition comes."""

    def __init__(self, trace: _Trace, always: list[Standing]) -> None:
        self._trace = trace
        self._blocks: dict[object, tuple[list[Block], str]] = {}
        self._always = always

    def become(self, parts: list[Standing]) -> None:
        """Have these parts stand, and those that always do."""
        wanted = {_key(part): part for part in (*self._always, *parts)}
        for key in [key for key in self._blocks if key not in wanted]:
            blocks, row = self._blocks.pop(key)
            for block in blocks:
                self._trace.free(block, row)
        for key, part in wanted.items():
            if key not in self._blocks:
                self._blocks[key] = self._made(part), part.row

    def _made(self, part: Standing) -> list[Block]:
        file, _, line = part.source.partition(":")
        frame = self._trace.frame
        frames = [frame(part.what, f"memcalc/{file}", int(line or 0))]
        frames += [frame(str(part.module), "module")] if part.module.template else []
        frames.append(frame(part.row, "before the step"))
        each = part.nbytes // part.count
        return [self._trace.allocate(each, frames, part.row) for _ in range(part.count) if each]


def _key(part: Standing) -> object:
    return part.row, part.part, str(part.module), part.what, part.nbytes, part.count


def _frames(trace: _Trace, life: Lives, allocation: Allocation) -> list[dict[str, Any]]:
    origin = life.birth(allocation).origin
    file, _, line = origin.source.partition(":")
    frames = [trace.frame(life.operation(allocation), f"memcalc/{file}", int(line or 0))]
    if origin.module.template:
        frames.append(trace.frame(str(origin.module), "module"))
    frames.append(trace.frame(life.phase(allocation.born), "step"))
    return frames
