"""Every phase of every measured rank, to the byte; what differs is named with its bytes."""

import json

import pytest
from support.distributed_rows import answer
from support.paths import DATA

FOLDER = DATA / "measured" / "distributed"
ROWS = {
    f"{path.stem}:{number}": json.loads(line)
    for path in sorted(FOLDER.glob("*.jsonl"))
    for number, line in enumerate(path.read_text().splitlines())
}

_LOSS_PARALLEL = {"forward": -12812800, "backward": -6396928}
"""loss_parallel asks for shapes on fake tensors of the whole vocabulary, [tokens, V] in fp32, which the instrument
counts: two of them beside the logits, and two beside the log-probabilities. On a GPU they take nothing."""

KNOWN: dict[str, dict[str, int]] = {
    "tp:4": _LOSS_PARALLEL,
    "tp:5": _LOSS_PARALLEL,
    "fsdp2:85": _LOSS_PARALLEL,
    "fsdp2:86": _LOSS_PARALLEL,
    # With frozen weights DeepSpeed's engine has two scalars more than this; not found yet which.
    "zero:22": {"forward": -1024, "backward": -1024, "step": -1024},
    "zero:23": {"forward": -1024, "backward": -1024, "step": -1024},
    # The same two scalars, counted by a tracker that saw the model being made.
    "fsdp1:7": {"forward": -1024, "backward": -1024, "step": -1024},
}
"""Bytes that an answer has more than its row, by phase."""


@pytest.mark.parametrize("name", ROWS)
def test_a_rank_peaks_where_it_was_measured(name: str) -> None:
    row = ROWS[name]
    expected = {
        phase: nbytes + KNOWN.get(name, {}).get(phase, 0) for phase, nbytes in row["measured"]["phase_peak"].items()
    }
    assert answer(row["case"]) == expected
