"""`memcalc verify`: a script is run with PyTorch's counters read. torch is a stand-in with counters that the script
sets (`data/fake_torch`); the injected code was tried with the real one on a GPU whose kernels do nothing.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
from support.cli_runs import answer, refused, run
from support.paths import DATA
from support.shapes import decoder

from memcalc.errors import MemcalcError
from memcalc.verification.run import run_script

GIB = 2**30
SCRIPT = """
import sys, torch
print("from the script")
optimizer = torch.optim.Optimizer()
for step in range({steps}):
    torch.cuda.use(3 * 2**30 + step)
    torch.autograd.backward(5 * 2**30 + step, inside=6 * 2**30)
    torch.cuda.use(7 * 2**30)
    optimizer.step(4 * 2**30 + step)
print("after the steps")
"""


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Writes a script that runs with the stand-in, and gives its command."""
    monkeypatch.setenv("PYTHONPATH", str(DATA / "fake_torch"))
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))

    def write(text: str) -> list[str]:
        path = tmp_path / "train.py"
        path.write_text(text)
        return [sys.executable, str(path)]

    return write


def test_the_peaks_of_each_phase_are_those_of_the_last_step(script: Any, tmp_path: Path, capfd: Any) -> None:
    found = run_script(script(SCRIPT.format(steps=9)), 3, str(tmp_path))
    assert found.steps == 3
    assert {name: allocated for name, (allocated, _) in found.phases.items()} == {
        "forward": 3 * GIB + 2,
        "backward": 7 * GIB,  # what comes between backward and the step is no phase of its own
        "step": 4 * GIB + 2,
    }
    assert found.gpu == "NVIDIA H100 80GB HBM3"
    assert found.workspaces == (32 * 2**20,) * 2
    assert found.process is None
    said = capfd.readouterr()
    assert said.out == ""
    assert "from the script" in said.err
    assert "after the steps" not in said.err


def test_a_script_that_ends_early_is_measured_too(script: Any, tmp_path: Path) -> None:
    assert run_script(script(SCRIPT.format(steps=1)), 3, str(tmp_path)).steps == 1
    other = tmp_path / "other"
    other.mkdir()
    found = run_script(script("import torch\ntorch.cuda.use(2**30)\n"), 3, str(other))
    assert {name: allocated for name, (allocated, _) in found.phases.items()} == {"whole": GIB}


def test_the_driver_tells_what_the_process_takes(script: Any, tmp_path: Path) -> None:
    tool = tmp_path / "bin" / "nvidia-smi"
    tool.parent.mkdir()
    tool.write_text('#!/bin/sh\necho "1, 5"\necho "$PPID, 9000"\n')
    tool.chmod(0o755)
    found = run_script(script(SCRIPT.format(steps=2)), 2, str(tmp_path))
    assert found.process == 9000 * 2**20
    assert found.outside == 9000 * 2**20 - found.reserved


def test_one_sentence_where_there_is_none(script: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(MemcalcError, match="never imported torch's optimizers"):
        run_script(script("raise SystemExit(3)"), 3, str(tmp_path))
    with pytest.raises(MemcalcError, match="cannot be run"):
        run_script([str(tmp_path / "none")], 3, str(tmp_path))
    monkeypatch.setenv("FAKE_TORCH_WITHOUT_GPU", "1")
    with pytest.raises(MemcalcError, match="verify needs a GPU"):
        run_script(script(SCRIPT.format(steps=2)), 3, str(tmp_path))


def test_the_sitecustomize_of_the_user_runs_as_well(
    script: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = tmp_path / "own"
    own.mkdir()
    (own / "sitecustomize.py").write_text("import os; os.environ['OWN'] = 'ran'")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(own), str(DATA / "fake_torch")]))
    text = "import os; assert os.environ['OWN'] == 'ran'\n" + SCRIPT.format(steps=2)
    assert run_script(script(text), 2, str(tmp_path)).steps == 2


def test_the_command(script: Any, tmp_path: Path) -> None:
    config = tmp_path / "config.json"
    config.write_text(json.dumps(decoder(64, 2, 4, 2, 128, 320)))
    job = (str(config), "--batch", "2", "--seq-len", "48")
    command = ("--", *script(SCRIPT.format(steps=5)))
    text = run("verify", *job, *command).stdout
    assert "small" not in text
    assert [line.split()[0] for line in text.splitlines()[2:6]] == ["forward,", "backward,", "step,", "reserved"]
    found = json.loads(run("verify", *job, "--json", "--steps", "2", *command).stdout)
    report = answer("from-file", *job)
    assert found["steps"] == 2
    assert found["phases"][1]["measured_bytes"] == 7 * GIB
    assert found["phases"][1]["estimate_bytes"] == report["peak"]["allocated_bytes"]
    assert not (tmp_path / "config").exists()  # without a driver there is nothing to keep
    assert "behind --" in refused(2, "verify", *job)
    assert "--steps" in refused(2, "verify", *job, "--steps", "0", *command)
    assert "--check" in refused(2, "verify", *job, "--gpu", "T4", "--check", *command)
