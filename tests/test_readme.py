"""What README and examples show is what the program does: commands run, boxes are literal, commands are documented."""

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from support.paths import ROOT
from support.readme import BLOCKS, README
from typer.testing import CliRunner

from memcalc.cli import app

LINES = [line for _, block in BLOCKS for line in block.splitlines()]
RUNNABLE = [line for line in LINES if line.startswith(("memcalc estimate", "memcalc from-config", "memcalc explain"))]


def memcalc(line: str) -> str:
    result = CliRunner().invoke(app, shlex.split(line)[1:], env={"COLUMNS": "80", "NO_COLOR": "1"})
    assert result.exit_code == 0, result.output
    return result.stdout


def test_first_box_is_what_the_first_command_prints() -> None:
    command = BLOCKS[0][1].splitlines()[0].split(" && ")[-1]
    assert command == "memcalc estimate --params 4B --batch 16"
    assert memcalc(command + " --width 80").rstrip().splitlines() == BLOCKS[1][1].rstrip().splitlines()


def test_the_timeline_is_what_its_command_prints() -> None:
    index = next(index for index, (_, text) in enumerate(BLOCKS) if text.startswith("memcalc timeline"))
    assert memcalc(BLOCKS[index][1].strip()).splitlines() == BLOCKS[index + 1][1].splitlines()


@pytest.mark.parametrize("line", RUNNABLE)
def test_every_estimate_in_the_readme_runs(line: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    if "--check" in line:
        assert CliRunner().invoke(app, shlex.split(line)[1:]).exit_code == 3
    else:
        memcalc(line)


def test_every_command_is_documented() -> None:
    listing = memcalc("memcalc --help").split("─ Commands ─")[1]
    commands = re.findall(r"^│ (\S+)", listing, re.MULTILINE)
    assert len(commands) >= 8
    for command in commands:
        assert f"`memcalc {command}`" in README, command


def test_python_in_the_readme_runs() -> None:
    code = next(block for language, block in BLOCKS if language == "python")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    first, *box, last = done.stdout.splitlines()
    assert re.fullmatch(r"\d+ .+ (True|False) \d+", first)
    assert box[0].startswith("┌─ TENSORS")
    assert re.fullmatch(r"\d+ \d+", last)


@pytest.mark.parametrize("path", sorted((ROOT / "examples").glob("*.py")), ids=lambda path: path.name)
def test_examples_run(path: Path) -> None:
    assert subprocess.run([sys.executable, str(path)], capture_output=True, text=True, check=True).stdout
