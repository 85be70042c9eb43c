"""Runs the user's script for a few steps with PyTorch's counters read, and gives what they said."""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from memcalc.common.escaping import quoted
from memcalc.errors import MemcalcError
from memcalc.tables.overheads import WORKSPACES

INJECTED = Path(__file__).parent / "injected"
"""The folder that is put on the script's PYTHONPATH."""

_STDERR = 2
"""The script's answer is not memcalc's: what it prints goes where messages go."""

_LARGEST_RECORD = 1 << 24


@dataclass(frozen=True)
class Measured:
    """What one process of the script measured; bytes.

    phases: (allocated, reserved) at the peak of each phase of the last step; "whole" where no optimizer stepped.
    process: of this process as nvidia-smi shows it; None where it cannot (in a container).
    used: of the whole GPU.
    workspaces: those of cuBLAS that the allocator held.
    snapshot: the file of the memory snapshot of the last step, None where there is none.
    """

    gpu: str
    driver: str | None
    torch: str
    cuda: str
    world_size: int
    rank: int
    phases: dict[str, tuple[int, int]]
    steps: int
    process: int | None
    used: int
    reserved: int
    workspaces: tuple[int, ...]
    snapshot: str | None

    @property
    def outside(self) -> int | None:
        """What the process has outside the allocator: the context, and NCCL's buffers where there are several."""
        return None if self.process is None else max(self.process - self.reserved, 0)

    @property
    def allocated(self) -> int:
        """The most that was allocated."""
        return max(allocated for allocated, _ in self.phases.values())

    @property
    def peak_reserved(self) -> int:
        """The most that was reserved."""
        return max(reserved for _, reserved in self.phases.values())


def run_script(
    command: Sequence[str], steps: int, folder: str, environment: Mapping[str, str] | None = None
) -> Measured:
    """Run a command for `steps` optimizer steps; the process of which most is allocated. Its output goes to stderr.

    `folder` takes what the processes write. `environment` is the one to run in, None for this process's.

    Raises MemcalcError where it cannot be started, has no torch, no GPU, or takes no memory on it.
    """
    given = os.environ if environment is None else environment
    environment = {
        **given,
        "MEMCALC_VERIFY_OUT": os.path.join(folder, "measured"),
        "MEMCALC_VERIFY_SNAPSHOT": os.path.join(folder, "snapshot"),
        "MEMCALC_VERIFY_STEPS": str(steps),
        "MEMCALC_VERIFY_WORKSPACES": ",".join(str(row.nbytes) for row in WORKSPACES),
        "PYTHONPATH": os.pathsep.join(filter(None, [str(INJECTED), given.get("PYTHONPATH")])),
    }
    try:
        done = subprocess.run(list(command), env=environment, stdout=_STDERR, check=False)
    except (OSError, ValueError) as problem:
        reason = getattr(problem, "strerror", None) or str(problem)
        raise MemcalcError(f"{quoted(command[0])} cannot be run ({reason}); give the command behind --.") from None
    records = [_record(path) for path in sorted(Path(folder).glob("measured.*"))]
    on_gpu = [record for record in records if record.get("gpu") and record.get("steps")]
    if on_gpu:
        return max((_measured(record, folder) for record in on_gpu), key=lambda found: found.allocated)
    code = f" (it ended with code {done.returncode})" if done.returncode else ""
    if records:
        raise MemcalcError(f"verify needs a GPU, and torch of the script found none or used none{code}.")
    raise MemcalcError(
        f"the script never imported torch's optimizers{code}: verify needs a script that trains with PyTorch, in an "
        "environment that has it (pip install 'gpu-memcalc[verify]')."
    )


def measured_in_a_folder(
    command: Sequence[str], steps: int, environment: Mapping[str, str] | None = None
) -> tuple[Measured, tempfile.TemporaryDirectory[str]]:
    """What a script measured, and the temporary folder that holds its snapshot."""
    folder = tempfile.TemporaryDirectory(prefix="memcalc-verify-")
    try:
        return run_script(command, steps, folder.name, environment), folder
    except BaseException:
        folder.cleanup()
        raise


def _record(path: Path) -> dict[str, Any]:
    """A process's record; {} for one that was cut short."""
    try:
        with path.open(encoding="utf-8") as file:
            found = json.loads(file.read(_LARGEST_RECORD))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _measured(record: dict[str, Any], folder: str) -> Measured:
    snapshot = os.path.join(folder, f"snapshot.{record['pid']}")
    return Measured(
        gpu=record["gpu"],
        driver=record["driver"],
        torch=record["torch"],
        cuda=record["cuda"],
        world_size=record["world_size"],
        rank=record["rank"],
        phases={name: (pair[0], pair[1]) for name, pair in record["steps"][-1].items()},
        steps=len(record["steps"]),
        process=record["process_bytes"],
        used=record["used_bytes"],
        reserved=record["reserved_bytes"],
        workspaces=tuple(record["workspaces"]),
        snapshot=snapshot if os.path.exists(snapshot) else None,
    )
