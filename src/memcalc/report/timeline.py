"""The memory of one step over time: what the pictures draw, and the JSON of `memcalc timeline`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from memcalc.autograd.tape import ROWS
from memcalc.peak.timeline import Sample, Stretch
from memcalc.report.schema import Report

SCHEMA_VERSION = 1


@dataclass(frozen=True)
class Timeline:
    """The step in equal pieces of its axis, which counts allocations: of each piece the fullest moment.

    samples: bytes of the whole process by row; the largest total is the peak of `report`, with the rows of its box.
    phases: the phases in order; stacks: where the blocks of each stack run, in each phase.
    """

    report: Report
    samples: tuple[Sample, ...]
    phases: tuple[Stretch, ...]
    stacks: tuple[Stretch, ...]

    @property
    def peak(self) -> int:
        """Index of the fullest sample of the phase of the peak."""
        phase = self.report.peak.phase
        return max(
            range(len(self.samples)),
            key=lambda index: (self.samples[index].total, self.samples[index].phase == phase, -index),
        )

    def moment(self, index: int) -> str:
        """The moment of a sample in words."""
        sample = self.samples[index]
        if index == self.peak:
            return self.report.peak.moment
        if sample.stack is not None and sample.position is not None:
            return f"{sample.phase} of {sample.stack} {sample.position + 1} of {sample.depth}"
        return "optimizer step" if sample.phase == "step" else sample.phase

    def to_dict(self) -> dict[str, Any]:
        """The contract: sizes are bytes, positions of blocks count from 1."""
        return {
            "schema_version": SCHEMA_VERSION,
            "model": self.report.model.name,
            "rows": list(ROWS),
            "peak": {
                "sample": self.peak,
                "phase": self.report.peak.phase,
                "moment": self.report.peak.moment,
                "process_bytes": self.report.peak.process_bytes,
            },
            "phases": [
                {"name": phase.name, "start": round(phase.start), "end": round(phase.end)} for phase in self.phases
            ],
            "samples": [
                {
                    "phase": sample.phase,
                    "stack": sample.stack,
                    "block": None if sample.position is None else sample.position + 1,
                    "blocks": sample.depth,
                    "total_bytes": sample.total,
                    "row_bytes": dict(zip(ROWS, sample.rows, strict=True)),
                }
                for sample in self.samples
            ],
        }
