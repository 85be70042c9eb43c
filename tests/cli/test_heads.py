"""`--task` and `--num-labels`: the same encoder or decoder, trained for another task."""

import json
from pathlib import Path

import pytest
from support.cli_runs import refused, run

from memcalc.models.spec import HEADS

ENCODER = {
    "model_type": "bert",
    "architectures": ["BertForMaskedLM"],
    "hidden_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 512,
    "vocab_size": 1000,
    "max_position_embeddings": 512,
    "type_vocab_size": 2,
}
BODY = 1000 * 256 + 512 * 256 + 2 * 256 + 2 * 256 + 2 * (4 * (256 * 256 + 256) + 2 * 256 * 512 + 512 + 256 + 4 * 256)
POOLER = 256 * 256 + 256


@pytest.fixture
def config(tmp_path: Path) -> str:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(ENCODER))
    return str(path)


@pytest.mark.parametrize(
    ("head", "parameters"),
    [
        (("masked-lm",), BODY + 256 * 256 + 256 + 2 * 256 + 1000),
        (("sequence-classification", "--num-labels", "5"), BODY + POOLER + 5 * 257),
        (("token-classification", "--num-labels", "9"), BODY + 9 * 257),
        (("question-answering",), BODY + 2 * 257),
        (("embedding",), BODY + POOLER),
    ],
)
def test_the_head_of_a_task(head: tuple[str, ...], parameters: int, config: str) -> None:
    answer = run("from-file", config, "--json", "--task", *head).stdout
    assert json.loads(answer)["model"]["parameters"]["total"] == parameters


def test_every_task_is_in_the_help() -> None:
    said = " ".join(run("from-file", "--help").stdout.split()).replace("- ", "-")
    assert all(task in said for task in HEADS)


@pytest.mark.parametrize(
    ("code", "options", "says"),
    [
        (2, ("--task", "clasification"), "did you mean"),
        (2, ("--num-labels", "3"), "name one with --task"),
        (2, ("--task", "token-classification", "--num-labels", "0"), "at least 1"),
        (1, ("--task", "seq2seq-lm"), "ForConditionalGeneration"),
    ],
)
def test_what_cannot_be(code: int, options: tuple[str, ...], says: str, config: str) -> None:
    assert says in refused(code, "from-file", config, *options)
