"""The memory of one step over time: what the pictures draw, and the JSON of `memcalc timeline`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from pydantic import Field

from memcalc.autograd.tape import ROWS
from memcalc.peak.timeline import Sample, Stretch
from memcalc.report.contract import Contract
from memcalc.report.schema import Report


class SampleJson(Contract):
    """The fullest moment of one piece of the axis."""

    phase: str = Field(description="Phase of the step.")
    stack: str | None = Field(description="Stack of blocks of which one runs; null between blocks.")
    block: int | None = Field(description="Which of its blocks, counted from 1; null between blocks.")
    blocks: int | None = Field(description="How many blocks the stack has; null between blocks.")
    total_bytes: int = Field(description="Bytes of the whole process.")
    row_bytes: dict[str, int] = Field(description="Bytes of each row of the box; they sum to total_bytes.")


class PhaseJson(Contract):
    """One phase on the axis."""

    name: str = Field(description="Its name.")
    start: int = Field(description="Its first sample.")
    end: int = Field(description="The sample after its last.")


class PeakJson(Contract):
    """The largest sample: the peak of the report, with the rows of its box."""

    sample: int = Field(description="Its index.")
    phase: str = Field(description="Phase of the step.")
    moment: str = Field(description="The moment in words.")
    process_bytes: int = Field(description="Bytes of the whole process, as the report's peak.process_bytes.")


class TimelineJson(Contract):
    """The memory of one step over time, as `memcalc timeline --json` prints it. The axis counts allocations."""

    schema_version: Literal[1] = Field(
        default=1, description="Version of this contract; it rises when a key goes or changes its meaning."
    )
    model: str = Field(description="Name of the model.")
    rows: tuple[str, ...] = Field(description="Rows of the box, in its order.")
    peak: PeakJson = Field(description="The peak.")
    phases: tuple[PhaseJson, ...] = Field(description="The phases in order.")
    samples: tuple[SampleJson, ...] = Field(description="Equal pieces of the axis; together they are the whole step.")


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
        found = self.report.peak
        peak = PeakJson(sample=self.peak, phase=found.phase, moment=found.moment, process_bytes=found.process_bytes)
        phases = tuple(PhaseJson(name=one.name, start=round(one.start), end=round(one.end)) for one in self.phases)
        samples = tuple(
            SampleJson(
                phase=sample.phase,
                stack=sample.stack,
                block=None if sample.position is None else sample.position + 1,
                blocks=sample.depth,
                total_bytes=sample.total,
                row_bytes=dict(zip(ROWS, sample.rows, strict=True)),
            )
            for sample in self.samples
        )
        return TimelineJson(
            model=self.report.model.name, rows=ROWS, peak=peak, phases=phases, samples=samples
        ).model_dump(mode="json")
