"""What a job asks of the allocator: requests and frees in order."""

from __future__ import annotations

WORKSPACE = 0
"""The code of a place where a thread multiplies for the first time, and cuBLAS asks for a workspace that stays."""


class Events:
    """Requests and frees of a stretch of a run, each an integer of `codes`.

    A positive one is a request of so many bytes, which gets the next number; a negative one frees a request, -1 the
    first. `WORKSPACE` is neither. What is not freed outlives the stretch. `phases` says where each phase begins.
    """

    def __init__(self) -> None:
        self.codes: list[int] = []
        self.phases: list[tuple[str, int]] = []
        self.count = 0
        """How many requests there were."""

    def begin(self, phase: str) -> None:
        """Let what follows belong to `phase`."""
        if not self.phases or self.phases[-1][0] != phase:
            self.phases.append((phase, len(self.codes)))

    def malloc(self, nbytes: int) -> int:
        """Ask for `nbytes` bytes, at least one; returns the number of the request."""
        self.codes.append(nbytes)
        self.count += 1
        return self.count - 1

    def free(self, number: int) -> None:
        """Give back what request `number` got."""
        self.codes.append(~number)
