"""Real peaks beside the estimate, a line a phase."""

from __future__ import annotations

from pydantic import Field

from memcalc.report.contract import Contract
from memcalc.report.schema import Report
from memcalc.verification.run import Measured

WHOLE = "whole"


class VerifiedPhase(Contract):
    """The peak of a phase: what torch.cuda.max_memory_allocated() said, and the estimate."""

    phase: str = Field(description="The phase; 'whole' where no optimizer stepped.")
    measured_bytes: int = Field(description="Allocated at the peak of the phase, in the last step that was run.")
    measured_reserved_bytes: int = Field(description="Reserved then.")
    estimate_bytes: int | None = Field(description="Allocated as memcalc has it; null where it has no such phase.")


class Verification(Contract):
    """A real run beside the estimate."""

    model: str = Field(description="Name of the model.")
    gpu: str = Field(description="The GPU, as torch calls it.")
    driver: str | None = Field(description="Version of its driver; null where it is not known.")
    torch: str = Field(description="Version of the script's torch.")
    processes: int = Field(description="How many processes ran; the numbers are of the one with the highest peak.")
    steps: int = Field(description="Optimizer steps that were run.")
    phases: tuple[VerifiedPhase, ...] = Field(description="A line a phase.")
    reserved_bytes: int = Field(description="The most that the allocator reserved.")
    estimate_reserved_bytes: int = Field(description="The same in the estimate.")
    process_bytes: int | None = Field(description="What nvidia-smi shows for the process; null where it cannot tell.")
    estimate_process_bytes: int = Field(description="The same in the estimate.")


def verified(measured: Measured, report: Report) -> Verification:
    """What was measured beside the report of the same job."""
    tensors = {name: phase.peak_bytes for name, phase in report.phases}
    beside = report.peak.allocated_bytes - max(tensors.values())  # inputs and workspaces
    estimates = {name: nbytes + beside for name, nbytes in tensors.items()} | {WHOLE: report.peak.allocated_bytes}
    return Verification(
        model=report.model.name,
        gpu=measured.gpu,
        driver=measured.driver,
        torch=measured.torch,
        processes=measured.world_size,
        steps=measured.steps,
        phases=tuple(
            VerifiedPhase(
                phase=name,
                measured_bytes=allocated,
                measured_reserved_bytes=reserved,
                estimate_bytes=estimates.get(name),
            )
            for name, (allocated, reserved) in measured.phases.items()
        ),
        reserved_bytes=measured.peak_reserved,
        estimate_reserved_bytes=report.peak.reserved_bytes,
        process_bytes=measured.process,
        estimate_process_bytes=report.peak.process_bytes,
    )
