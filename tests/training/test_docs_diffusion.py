"""docs/diffusion.md says what memcalc computes now."""

import json
import re

import pytest
from support.cli_runs import run
from support.paths import ROOT

GPUS = ("RTX-4090", "RTX-A6000", "A100-80GB")
NUMBER = r" (-?[\d.]+) \|"
TEXT = (ROOT / "docs" / "diffusion.md").read_text()
TABLE = re.findall(rf"^\| `(.*?)` \|{NUMBER * 4}$", TEXT, re.M)


@pytest.mark.parametrize(("options", "process", "free"), [(row[0], row[1], row[2:]) for row in TABLE])
def test_row(options: str, process: str, free: tuple[str, ...]) -> None:
    folder = str(ROOT / "examples" / "flux.1-dev")
    asked = ["from-file", folder, "--lora-rank", "16", *options.split(), "--json"]
    found = [json.loads(run(*asked, "--gpu", gpu).stdout) for gpu in GPUS]
    assert f"{found[-1]['peak']['process_bytes'] / 2**30:.1f}" == process
    assert tuple(f"{report['gpu']['free_bytes'] / 2**30:.1f}" for report in found) == free


def test_what_is_said_of_the_published_lora() -> None:
    folder = str(ROOT / "examples" / "flux.1-dev")
    published = ("--lora-rank", "4", "--lora-targets", "to_q,to_k,to_v,to_out.0", "--height", "512", "--width", "768")
    options = (*published, "--activation-checkpointing", "full", "--optimizer", "adamw-8bit")
    asked = ("from-file", folder, *options, "--max-sequence-length", "77", "--gpu", "RTX-4090", "--json")
    found = [
        json.loads(run(*asked, *more).stdout)["peak"]["process_bytes"] / 1e9
        for more in ((), ("--quantization", "nf4-double"))
    ]
    assert "memcalc says {:.1f} GB and {:.1f} GB of the process".format(*found) in " ".join(TEXT.split())


def test_the_table_is_read() -> None:
    assert len(TABLE) == 6
