"""What a job asks of the allocator: requests and frees in order."""

from __future__ import annotations

from dataclasses import dataclass

WORKSPACE = 0
"""The code of a place where a thread multiplies for the first time, and cuBLAS asks for a workspace that stays."""

STREAM_SHIFT = 50
"""A request is its bytes, and above them the number of its stream (0: the default one)."""
NBYTES = (1 << STREAM_SHIFT) - 1


class Events:
    """Requests and frees of a stretch of a run, each an integer of `codes`.

    A positive one is a request of so many bytes, which gets the next number; a negative one frees a request, -1 the
    first. `WORKSPACE` is neither. What is not freed outlives the stretch. `phases` says where each phase begins. Other
    streams than the default one stand above the bytes of their requests (`STREAM_SHIFT`).
    """

    def __init__(self) -> None:
        self.codes: list[int] = []
        self.phases: list[tuple[str, int]] = []
        self.count = 0
        """How many requests there were."""

    def begin(self, phase: str) -> bool:
        """Let what follows belong to `phase`; whether it begins here."""
        begins = not self.phases or self.phases[-1][0] != phase
        if begins:
            self.phases.append((phase, len(self.codes)))
        return begins

    def malloc(self, nbytes: int, stream: int = 0) -> int:
        """Ask for `nbytes` bytes, at least one; returns the number of the request."""
        self.codes.append(nbytes | stream << STREAM_SHIFT)
        self.count += 1
        return self.count - 1

    def append(self, others: Events) -> int:
        """Let others follow, with their phases; returns the number of their first request."""
        offset, start = self.count, len(self.codes)
        self.codes += [code if code >= 0 else code - offset for code in others.codes]
        self.count += others.count
        self.phases += [(phase, start + at) for phase, at in others.phases]
        return offset

    def free(self, number: int) -> None:
        """Give back what request `number` got."""
        self.codes.append(~number)


@dataclass(frozen=True)
class JobEvents:
    """A job on one GPU: its model comes, then its batch, then its first step, then others that are all alike.

    workspace: bytes of what cuBLAS asks for in each thread that multiplies.
    streams: whether other streams than the default one ask for memory.
    """

    loading: Events
    batch: Events
    first: Events
    later: Events
    workspace: int
    streams: bool = False


@dataclass(frozen=True)
class RunEvents:
    """A job on one GPU: its model comes, then one step after another, each with inputs of its own.

    workspace: bytes of what cuBLAS asks for in each thread that multiplies.
    """

    loading: Events
    steps: tuple[tuple[Events, Events], ...]
    workspace: int
