"""The composite action and the pre-commit hook of `examples/` refuse a config that cannot fit, and let others pass."""

import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from support.paths import ROOT

EXAMPLES = ROOT / "examples"


@pytest.fixture
def configs(tmp_path: Path) -> Path:
    """A config that fits 24 GB (QLoRA of 8B) and one that does not (all weights trained)."""
    fits = (EXAMPLES / "axolotl_qlora.yaml").read_text(encoding="utf-8")
    (tmp_path / "fits.yaml").write_text(fits, encoding="utf-8")
    kept = [line for line in fits.splitlines() if not line.startswith(("adapter", "load_in", "lora_"))]
    (tmp_path / "large.yaml").write_text("\n".join(kept), encoding="utf-8")
    return tmp_path


def status(command: list[str], folder: Path, **environment: str) -> int:
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(command, cwd=folder, env={**os.environ, "PATH": path, **environment}, capture_output=True)
    return done.returncode


@pytest.mark.parametrize(("files", "code"), [("fits.yaml", 0), ("large.yaml", 3), ("fits.yaml large.yaml", 3)])
def test_the_action(configs: Path, files: str, code: int) -> None:
    action = yaml.safe_load((EXAMPLES / "github_action/action.yml").read_text(encoding="utf-8"))
    step = action["runs"]["steps"][1]
    assert set(step["env"]) == {"FILES", "GPU", "OPTIONS"}
    assert status(["bash", "-c", step["run"]], configs, FILES=files, GPU="24GB", OPTIONS="--model 8B") == code


@pytest.mark.parametrize(("files", "code"), [(["fits.yaml"], 0), (["fits.yaml", "large.yaml"], 3)])
def test_the_hook(configs: Path, files: list[str], code: int) -> None:
    hooks = yaml.safe_load((EXAMPLES / "pre_commit/.pre-commit-config.yaml").read_text(encoding="utf-8"))
    (hook,) = hooks["repos"][0]["hooks"]
    assert status([*shlex.split(hook["entry"]), *files], configs) == code
