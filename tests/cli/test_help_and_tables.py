"""`memcalc help` is half a screen and true; tables are JSON too; names are completed."""

import json
import re
import shlex

import pytest
from support.cli_runs import refused, run

from memcalc.cli.help_topics import TOPICS
from memcalc.cli.options import declared
from memcalc.models.registry import families
from memcalc.tables.gpus import GPUS
from memcalc.tables.optimizers import OPTIMIZERS


@pytest.mark.parametrize("topic", TOPICS)
def test_a_topic_is_half_a_screen(topic: str) -> None:
    text = run("help", topic).stdout
    assert len(text.splitlines()) <= 20
    assert max(map(len, text.splitlines())) <= 120


@pytest.mark.parametrize("line", re.findall(r"^  (memcalc estimate .*)$", "\n".join(TOPICS.values()), re.MULTILINE))
def test_commands_in_topics_run(line: str) -> None:
    run(*shlex.split(line)[1:])


def test_options_in_topics_exist() -> None:
    commands = ("estimate", "from-config", "sweep")
    helps = "".join(run(command, "--help", env={"COLUMNS": "200"}).stdout for command in commands)
    named = set(re.findall(r"--[a-z][a-z-]+", "\n".join(TOPICS.values())))
    assert {option for option in named if option not in helps} == set()


def test_topics_are_listed_and_close_ones_named() -> None:
    assert "precision" in run("help").stdout
    assert "did you mean 'lora'" in refused(2, "help", "loras")


def test_tables_as_json() -> None:
    gpus = json.loads(run("gpus", "--json").stdout)
    assert [row["name"] for row in gpus] == [gpu.name for gpu in GPUS]
    assert gpus[0]["usable_bytes"] == GPUS[0].usable_bytes
    optimizers = {row["name"]: row for row in json.loads(run("optimizers", "--json").stdout)}
    assert optimizers.keys() == OPTIMIZERS.keys()
    assert optimizers["adamw"]["bytes_per_parameter"] == 8
    assert optimizers["adamw"]["states"] == ["momentum", "variance"]
    rows = {row["model_type"]: row for row in json.loads(run("families", "--json").stdout)}
    assert list(rows) == list(families())
    assert "MemTracker" in rows["gemma4_text"]["instrument"]
    assert rows["baichuan"]["instrument"] is None
    assert "MemTracker" in rows["llama"]["instrument"]
    assert "allocator" in rows["llama"]["instrument"]
    assert "MemTracker" not in rows["WanTransformer3DModel"]["instrument"]
    assert rows["llama"]["kind"] == "decoders"


def test_optimizers_are_completed() -> None:
    parameter = declared()["optimizer"].parameter()
    (info,) = parameter.annotation.__metadata__
    assert info.autocompletion("paged-l") == ["paged-lion", "paged-lion-8bit"]
