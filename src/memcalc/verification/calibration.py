"""What `verify` measured on this machine, kept in the user's config directory, and used where it is the same machine.

A GPU, its driver and torch have to be those that it was measured with: a context of another driver is another one.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from memcalc.common.assumption import Assumption
from memcalc.errors import MemcalcError, UsageError
from memcalc.setup.setup import TrainingSetup
from memcalc.tables.gpus import Gpu, find_gpu
from memcalc.verification.config_file import calibration_path
from memcalc.verification.run import Measured

_LARGEST = 1 << 20


@dataclass(frozen=True)
class Calibration:
    """What a process took beside its tensors; bytes.

    gpu: memcalc's name of it, or torch's where memcalc has none.
    driver, torch, cuda: versions.
    context: outside the allocator; with `processes` above one NCCL's buffers are in it.
    workspace: one of cuBLAS's, None where none was told.
    reserve: what the allocator held beyond what was allocated, as a fraction of it.
    """

    gpu: str
    driver: str
    torch: str
    cuda: str
    processes: int
    context: int
    workspace: int | None
    reserve: float

    @property
    def key(self) -> tuple[str, str, str, int]:
        """What it was measured with: a later measurement with the same takes its place."""
        return self.gpu, self.driver, self.torch, self.processes


def config_file() -> Path:
    """Where calibrations are kept."""
    return Path(calibration_path())


def calibrations() -> list[Calibration]:
    """All that is kept. Raises MemcalcError where the file is not what memcalc wrote."""
    path = config_file()
    try:
        with path.open(encoding="utf-8") as file:
            rows = json.loads(file.read(_LARGEST))
    except FileNotFoundError:
        return []
    except (OSError, ValueError):
        raise _unreadable(path) from None
    try:
        return [_checked(row) for row in rows]
    except (TypeError, ValueError, KeyError):
        raise _unreadable(path) from None


def _checked(row: dict[str, Any]) -> Calibration:
    found = Calibration(**row)
    texts = (found.gpu, found.driver, found.torch, found.cuda)
    numbers = (found.processes, found.context, found.workspace or 0)
    good = all(isinstance(text, str) for text in texts) and all(type(number) is int for number in numbers)
    if not good or min(numbers) < 0 or not 0 <= float(found.reserve) < 10:
        raise ValueError
    return found


def _unreadable(path: Path) -> MemcalcError:
    return MemcalcError(
        f"the calibration file {path} is not as memcalc writes it; `memcalc calibration --clear` removes it."
    )


def calibration_of(measured: Measured) -> Calibration | None:
    """What a run says of its machine; None where the driver does not tell what the process takes."""
    if measured.outside is None or measured.driver is None:
        return None
    allocated, reserved = measured.allocated, measured.peak_reserved
    return Calibration(
        gpu=gpu_name(measured.gpu),
        driver=measured.driver,
        torch=measured.torch,
        cuda=measured.cuda,
        processes=measured.world_size,
        context=measured.outside,
        workspace=measured.workspaces[0] if measured.workspaces else None,
        reserve=round((reserved - allocated) / allocated, 4) if allocated else 0.0,
    )


def gpu_name(name: str) -> str:
    """memcalc's name of a GPU that torch calls `name`; that name itself where memcalc does not know it."""
    try:
        return find_gpu(name).name
    except UsageError:
        return name


def matching(gpu: Gpu, processes: int, known: Sequence[Calibration]) -> Calibration | None:
    """What was measured on this machine with this GPU and as many processes; None where nothing was."""
    candidates = [one for one in known if one.gpu == gpu.name and one.processes == processes]
    if not candidates:
        return None
    driver, torch = driver_here(), torch_here()
    return next((one for one in candidates if one.driver == driver and one.torch == torch), None)


def driver_here() -> str | None:
    """The version of this machine's NVIDIA driver."""
    try:
        with open("/proc/driver/nvidia/version", encoding="utf-8") as file:
            words = file.readline().split()
    except OSError:
        return None
    return next((word for word in words if word.count(".") >= 1 and word[0].isdigit()), None)


def torch_here() -> str | None:
    """The version of the torch that is installed beside memcalc; it is not imported."""
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("torch")
    except PackageNotFoundError:
        return None


def kept(calibration: Calibration) -> str:
    """The calibrations with this one among them, as the file has them."""
    others = [one for one in calibrations() if one.key != calibration.key]
    return json.dumps([asdict(one) for one in (*others, calibration)], indent=2) + "\n"


def options_of(found: Calibration, given: frozenset[str]) -> dict[str, Any]:
    """The options that a calibration answers, of those that nobody gave."""
    values: dict[str, Any] = {"cuda_context": str(found.context), "allocator_reserve": found.reserve}
    if found.workspace is not None:
        values["cublas_workspace"] = str(found.workspace)
    return {name: value for name, value in values.items() if name not in given}


def assumption_of(found: Calibration, used: dict[str, Any]) -> Assumption:
    """What is said of a calibration that was used."""
    parts = {
        "cuda_context": f"CUDA context {found.context:,} bytes",
        "cublas_workspace": f"cuBLAS workspaces of {found.workspace or 0:,} bytes",
        "allocator_reserve": f"allocator reserve {found.reserve:.1%}",
    }
    said = ", ".join(parts[name] for name in used)
    return Assumption(
        "calibration",
        f"{said}: measured by memcalc verify on this machine ({found.gpu}, driver {found.driver}, torch "
        f"{found.torch}; `memcalc calibration`)",
    )


def processes_of(setup: object) -> int:
    """How many processes a setup runs; those of other machines count too."""
    return (setup.gpus or 1) if isinstance(setup, TrainingSetup) else 1
