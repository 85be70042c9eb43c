"""What is told of a run while it is traced, to say where allocations come from (`memcalc.explain`)."""

from __future__ import annotations

from typing import Protocol

from memcalc.autograd.tape import Tape
from memcalc.nn.module import Module


class Recorder(Protocol):
    """Makes the tape of a run that notes more than sizes and lives. Without one, a run pays nothing."""

    def new_tape(self, phase: str, sum_out_of_place: bool = False) -> Tape:
        """The tape of a run that begins."""

    def watch(self, network: Module) -> None:
        """Learn the names of a bound model's modules before they run."""
