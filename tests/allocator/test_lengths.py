"""Runs of many lengths: what is drawn, and what PyTorch's allocator reserves step by step on the same lengths.

Every line of `data/allocator/lengths.jsonl` is a run of the real Transformers model (torch 2.14.1, transformers 5.24.0)
on a GPU whose kernels do nothing: `reserved` and `allocated` are the peaks of every step.
"""

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from support.measured_rows import training_setup
from support.paths import DATA
from support.reports import lines
from support.tape_events import DEVICES

from memcalc import ModelSpec, TrainingSetup, estimate
from memcalc.allocator.job import traced_micro_batch
from memcalc.allocator.run_of_lengths import run_events
from memcalc.allocator.simulation import simulate
from memcalc.cli.lengths_file import read_lengths
from memcalc.errors import UsageError
from memcalc.setup.lengths import drawn_lengths, of_length
from memcalc.training.traced_step import Step

ROWS = [json.loads(line) for line in (DATA / "allocator" / "lengths.jsonl").read_text().splitlines()]
MANY = {"model_type": "llama", "hidden_size": 256, "num_hidden_layers": 4, "num_attention_heads": 4, "vocab_size": 4000}


@pytest.mark.parametrize("row", ROWS, ids=[row["case"]["config"]["model_type"] for row in ROWS])
def test_a_run_gives_what_pytorch_gave_in_every_step(row: dict[str, Any]) -> None:
    case, measured = row["case"], row["measured"]
    setup = training_setup({**case, "seq": 8})
    spec = ModelSpec.from_config(case["config"])

    def of_tokens(length: int, accumulated: bool, every_block: bool) -> Step:
        one = setup.model_copy(update={"seq_len": length})
        return traced_micro_batch(spec, one, DEVICES["h100"], None, accumulated, every_block)

    found = simulate(run_events(of_tokens, [[length] for length in case["lengths"]], 32 * 2**20))
    assert [max(step.allocated.values()) for step in found.steps] == measured["allocated"]
    assert [max(step.reserved.values()) for step in found.steps] == pytest.approx(measured["reserved"], rel=0.01)
    assert found.reserved == measured["reserved"][-1]


def test_lengths_are_drawn_by_their_seed() -> None:
    setup = partial(TrainingSetup, batch=3, lengths="512..4096", max_steps=5)
    assert drawn_lengths(setup()) == ((2606,), (2901,), (3607,), (3830,), (3995,))
    assert drawn_lengths(setup(seed=1)) != drawn_lengths(setup())
    assert all(length % 64 == 0 for step in drawn_lengths(setup(pad_to_multiple_of=64)) for length in step)
    assert {length for step in drawn_lengths(setup(lengths="10x3,20", batch=1)) for length in step} <= {10, 20}
    assert [len(step) for step in drawn_lengths(setup(grad_accum=4))] == [4] * 5


def test_the_report_says_how_the_reserve_grows() -> None:
    setup = TrainingSetup(batch=2, lengths="100..900", max_steps=12, precision="bf16")
    report = estimate(ModelSpec.from_config(MANY), setup, "H100")
    found = report.mixed_lengths
    assert found is not None
    assert found.reserved_bytes[-1] == max(found.reserved_bytes) == report.peak.reserved_bytes
    assert found.reserved_bytes[0] < found.reserved_bytes[-1]
    assert found.longest == max(map(max, drawn_lengths(setup))) == report.setup["seq_len"]
    assert any("drawn evenly from 100 to 900 tokens, seed 0" in line for line in lines(report))
    fixed = estimate(ModelSpec.from_config(MANY), of_length(setup, found.longest), "H100")
    assert fixed.peak.allocated_bytes == pytest.approx(report.peak.allocated_bytes, rel=0.01)
    assert fixed.peak.reserved_bytes < report.peak.reserved_bytes


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"lengths": "512-4096"}, "neither a range"),
        ({"lengths": "9..3"}, r"backwards; write 3\.\.9"),
        ({"lengths": "nofile.txt"}, "no file that can be read"),
        ({"lengths": "0..3"}, "no sequence of 1 to"),
        ({"lengths": "5..9", "seq_len": 7}, "leave one out"),
        ({"lengths": "5..9", "packing": True}, "leave one out"),
        ({"lengths": "5..9", "allocator_reserve": 0.1}, "leave one out"),
        ({"max_steps": 7}, "belongs to --lengths"),
        ({"lengths": "5..9", "max_steps": 501}, "500 are simulated at most"),
        ({"lengths": "5..9000", "max_steps": 300}, "different lengths; 128"),
        ({"lengths": "5..9", "parallel": "ddp", "gpus": 2}, "on one GPU; give --seq-len with the longest"),
    ],
)
def test_what_is_not_simulated_is_refused(options: dict[str, Any], says: str) -> None:
    with pytest.raises(UsageError, match=says):
        estimate(ModelSpec.from_config(MANY), TrainingSetup(**options))


def test_absurd_depth_is_not_simulated() -> None:
    deep = ModelSpec.from_config(MANY | {"num_hidden_layers": 301})
    texts = [assumption.text for assumption in estimate(deep, TrainingSetup(), "H200").assumptions]
    assert any("not simulated for more than 300 blocks" in text for text in texts)


def test_a_file_has_one_length_a_line(tmp_path: Path) -> None:
    path = tmp_path / "lengths.txt"
    path.write_text("300\n700\r\n\n300\n")
    assert read_lengths(str(path)) == "300x2,700x1"
    assert read_lengths("512..4096") == "512..4096"
    path.write_text("300\nabc\n")
    with pytest.raises(UsageError, match=r"line 2 of --lengths .* 'abc', no whole number"):
        read_lengths(str(path))
    path.write_text("\n")
    with pytest.raises(UsageError, match="no line with a length"):
        read_lengths(str(path))


def test_a_run_that_its_gpu_has_no_room_for_is_said_to_be_without_its_limit() -> None:
    setup = TrainingSetup(batch=2, lengths="100..900", max_steps=3, precision="bf16")
    spec = ModelSpec.from_config(MANY)
    assert any("without the GPU's limit" in line for line in lines(estimate(spec, setup, "1GiB")))
    assert not any("without the GPU's limit" in line for line in lines(estimate(spec, setup, "H100")))
