"""What was measured is kept, shown, and used on the same machine alone."""

import json
from pathlib import Path
from typing import Any

import pytest
from support.cli_runs import answer, refused, run

from memcalc.tables.gpus import find_gpu
from memcalc.verification import calibration
from memcalc.verification.calibration import Calibration, calibration_of, kept, matching
from memcalc.verification.run import Measured

GIB = 2**30
MEASURED = Measured(
    gpu="NVIDIA H100 80GB HBM3",
    driver="580.1",
    torch="2.14.1",
    cuda="13.0",
    world_size=1,
    rank=0,
    phases={"forward": (10 * GIB, 11 * GIB), "step": (8 * GIB, 11 * GIB)},
    steps=3,
    process=12 * GIB,
    used=12 * GIB,
    reserved=11 * GIB,
    workspaces=(32 * 2**20,) * 2,
    snapshot=None,
)
FOUND = Calibration("H100-80GB", "580.1", "2.14.1", "13.0", 1, GIB, 32 * 2**20, 0.1)
JOB = ("estimate", "--params", "1B", "--gpu", "H100-80GB")


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine with driver 580.1 and torch 2.14.1, and the path of its calibrations."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    monkeypatch.setattr(calibration, "driver_here", lambda: "580.1")
    monkeypatch.setattr(calibration, "torch_here", lambda: "2.14.1")
    (tmp_path / "memcalc").mkdir()
    return tmp_path / "memcalc" / "calibration.json"


def test_what_a_run_says_of_its_machine() -> None:
    assert calibration_of(MEASURED) == FOUND
    without: dict[str, Any] = {**vars(MEASURED), "process": None}
    assert calibration_of(Measured(**without)) is None


def test_it_is_used_and_said_where_it_matches(here: Path) -> None:
    before = answer(*JOB)
    here.write_text(kept(FOUND))
    after = answer(*JOB)
    assert after["setup"]["cuda_context"] == GIB
    assert after["setup"]["allocator_reserve"] == 0.1
    (line,) = [line for line in after["assumptions"] if line["code"] == "calibration"]
    assert "driver 580.1" in line["text"]
    assert before["setup"]["cuda_context"] != GIB
    assert answer(*JOB[:-2])["setup"]["cuda_context"] != GIB
    given = answer(*JOB, "--cuda-context", "1MiB")
    assert given["setup"]["cuda_context"] == 2**20
    assert given["setup"]["allocator_reserve"] == 0.1


def test_it_is_not_used_elsewhere(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = find_gpu("H100-80GB")
    assert matching(gpu, 1, [FOUND]) == FOUND
    assert matching(gpu, 2, [FOUND]) is None
    assert matching(find_gpu("A100-80GB"), 1, [FOUND]) is None
    monkeypatch.setattr(calibration, "driver_here", lambda: "570.2")
    assert matching(gpu, 1, [FOUND]) is None
    monkeypatch.setattr(calibration, "driver_here", lambda: "580.1")
    monkeypatch.setattr(calibration, "torch_here", lambda: None)
    assert matching(gpu, 1, [FOUND]) is None


def test_a_later_measurement_takes_the_place_of_an_earlier_one(here: Path) -> None:
    here.write_text(kept(FOUND))
    here.write_text(kept(Calibration(**vars(FOUND) | {"context": 5})))
    here.write_text(kept(Calibration(**vars(FOUND) | {"gpu": "other"})))
    assert [(one.gpu, one.context) for one in calibration.calibrations()] == [("H100-80GB", 5), ("other", GIB)]


def test_the_command(here: Path) -> None:
    assert "nothing was measured" in run("calibration").stdout
    here.write_text(kept(FOUND))
    assert json.loads(run("calibration", "--json").stdout) == [vars(FOUND)]
    assert "1.0 GiB" in run("calibration").stdout
    run("calibration", "--clear")
    assert not here.exists()
    run("calibration", "--clear")


@pytest.mark.parametrize("text", ["{", "[1]", '[{"gpu": "x"}]', kept.__doc__ or ""])
def test_a_broken_file_is_one_sentence(here: Path, text: str) -> None:
    here.write_text(text)
    assert "--clear" in refused(1, "calibration")
    assert "--clear" in refused(1, *JOB)
