"""A real memory snapshot of PyTorch: what was alive at the peak of each phase of its last whole step.

A phase is told by what the snapshot says: `Optimizer.step` is marked in it, backward runs on a thread without Python
frames, and everything else between two steps is forward.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

from memcalc.common.sizes import rounded
from memcalc.errors import ConfigError

WHOLE = "whole"
"""The one phase of a snapshot that does not tell phases apart."""

_STEP = "Optimizer.step"
_PHASES = ("forward", "backward", "step", "prefill", "decode")
"""What a snapshot that memcalc wrote marks."""


@dataclass
class RealPhase:
    """The peak of one phase: bytes alive, how many of each size (rounded to 512), and the frame that made one."""

    peak_bytes: int
    sizes: Counter[int] = field(default_factory=Counter)
    makers: dict[int, str] = field(default_factory=dict)


@dataclass(frozen=True)
class _Event:
    """A request to PyTorch's allocator, or a release."""

    address: int
    nbytes: int
    allocates: bool
    phase: str
    maker: str
    time: int


def real_phases(found: Any) -> dict[str, RealPhase]:
    """The phases of the last whole step of a snapshot; `WHOLE` alone where it does not tell them.

    Raises ConfigError where it is no snapshot, or has no events.
    """
    try:
        segments = [block for segment in found["segments"] for block in segment["blocks"]]
        traces = [trace for trace in found["device_traces"] if trace]
        spans = list(_spans(found.get("external_annotations", [])))
        events = list(_events(max(traces, key=len, default=[]), spans))
        start = _at_start(segments, events)
    except (KeyError, TypeError, AttributeError, ValueError):
        raise ConfigError(
            "the file is a pickle, but no memory snapshot of PyTorch; make one with torch.cuda.memory._dump_snapshot."
        ) from None
    if not events:
        raise ConfigError(
            "the snapshot has no events: call torch.cuda.memory._record_memory_history() before the steps that count."
        )
    first, last = _last_step(events)
    told = len({event.phase for event in events}) > 1
    return _peaks(events[:last], first, start, told)


def _spans(marks: Sequence[Any]) -> Iterator[tuple[int, int, str]]:
    """Start, end and phase of what is marked: the optimizer's step, and the phases of a snapshot that memcalc wrote."""
    opened: dict[str, int] = {}
    for mark in marks:
        name, time = str(mark["name"]), int(mark["time_us"])
        if not (name.startswith(_STEP) or name in _PHASES):
            continue
        if mark["stage"] == "START":
            opened[name] = time
        elif name in opened:
            yield opened.pop(name), time, name if name in _PHASES else "step"


def _events(trace: Sequence[Any], spans: Sequence[tuple[int, int, str]]) -> Iterator[_Event]:
    """The events that change what is allocated, each with its phase."""
    for event in trace:
        action = event["action"]
        if action not in ("alloc", "free_requested"):
            continue
        frames, time = event.get("frames") or [], int(event["time_us"])
        marked = next((phase for start, end, phase in reversed(spans) if start <= time <= end), None)
        phase = marked or _phase(frames)
        yield _Event(int(event["addr"]), rounded(int(event["size"])), action == "alloc", phase, _maker(frames), time)


def _phase(frames: Sequence[Any]) -> str:
    if not frames:
        return "backward"
    if any("torch/optim/" in frame["filename"] for frame in frames):
        return "step"
    if any("backward" in frame["name"] or "autograd::Engine" in frame["name"] for frame in frames):
        return "backward"
    return "forward"


def _maker(frames: Sequence[Any]) -> str:
    """The innermost frame of a model's code, else the innermost one."""
    own = [frame for frame in frames if "/torch/" not in frame["filename"] and "<frozen" not in frame["filename"]]
    for frame in (*own, *frames):
        return f"{frame['name']} ({str(frame['filename']).rpartition('/')[2]}:{frame['line']})"
    return ""


def _at_start(blocks: Sequence[Any], events: Sequence[_Event]) -> dict[int, tuple[int, str]]:
    """What was allocated before the first event: what is at the end, with all events taken back."""
    alive = {
        int(block["address"]): (rounded(int(block["requested_size"])), _maker(block.get("frames") or []))
        for block in blocks
        if block["state"] == "active_allocated"
    }
    for event in reversed(events):
        if event.allocates:
            alive.pop(event.address, None)
        else:
            alive[event.address] = event.nbytes, event.maker
    return alive


def _last_step(events: Sequence[_Event]) -> tuple[int, int]:
    """The range of events of the last step that ended, from the end of the one before; all where there is none."""
    stepping = [event.phase == "step" for event in events]
    ends = [
        index + 1
        for index, inside in enumerate(stepping)
        if inside and not (stepping[index + 1 : index + 2] or [False])[0]
    ]
    if not ends:
        return 0, len(events)
    return (ends[-2] if len(ends) > 1 else 0), ends[-1]


def _peaks(events: Sequence[_Event], first: int, start: dict[int, tuple[int, str]], told: bool) -> dict[str, RealPhase]:
    """The peak of each phase, from event `first` on, with what was alive then."""
    changes = [event.nbytes if event.allocates else -event.nbytes for event in events]
    live = list(accumulate(changes, initial=sum(nbytes for nbytes, _ in start.values())))[1:]
    highest: dict[str, int] = {}
    for index in range(first, len(events)):
        phase = events[index].phase if told else WHOLE
        if phase not in highest or live[index] > live[highest[phase]]:
            highest[phase] = index
    wanted = {index: phase for phase, index in highest.items()}
    found: dict[str, RealPhase] = {}
    alive = dict(start)
    for index, event in enumerate(events):
        if event.allocates:
            alive[event.address] = event.nbytes, event.maker
        else:
            alive.pop(event.address, None)
        if index in wanted:
            makers = dict(alive.values())
            found[wanted[index]] = RealPhase(live[index], Counter(nbytes for nbytes, _ in alive.values()), makers)
    return {phase: found[phase] for phase in highest}
