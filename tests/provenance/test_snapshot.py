"""Memory snapshots: what memcalc writes has PyTorch's structure, and a real one is laid beside the estimate.

`data/snapshots/llama_two_blocks.pickle` is what `torch.cuda.memory._snapshot()` of torch 2.14.1 gave for the second
step of a Llama of two blocks (transformers 5.24.0, AdamW, a loop without Trainer) and PyTorch's allocator on a GPU
whose kernels do nothing, an H100 by its properties; paths are cut, and the innermost six frames of events are kept.
"""

import json
import pickle
import pickletools
from pathlib import Path
from typing import Any

import pytest
from support.cli_runs import answer, refused, run
from support.paths import DATA
from support.shapes import decoder

from memcalc.common.sizes import rounded
from memcalc.errors import ConfigError, UsageError
from memcalc.estimation.estimate import estimate
from memcalc.models.spec import ModelSpec
from memcalc.provenance.comparison import compare_snapshot
from memcalc.provenance.snapshot import snapshot
from memcalc.setup.setup import InferenceSetup, TrainingSetup
from memcalc.sources.plain_pickle import loads
from memcalc.tables.gpus import find_gpu
from memcalc.tables.overheads import UNSPLIT_PART

REAL = DATA / "snapshots" / "llama_two_blocks.pickle"
SMALL = ModelSpec.from_config(decoder(64, 2, 4, 2, 128, 320), "small")
AS_RUN = TrainingSetup(batch=2, seq_len=48, precision="bf16", padding_mask=True)


def replayed(found: dict[str, Any]) -> tuple[int, dict[int, int]]:
    """The most that was allocated while the events run, and what is left, by address."""
    live, highest, left = 0, 0, dict[int, int]()
    for event in found["device_traces"][0]:
        if event["action"] == "alloc":
            assert event["addr"] not in left
            left[event["addr"]] = rounded(event["size"])
            live += left[event["addr"]]
            highest = max(highest, live)
        elif event["action"] == "free_completed":
            live -= left.pop(event["addr"])
    return highest, left


@pytest.mark.parametrize(
    "setup",
    [
        TrainingSetup(batch=2, seq_len=48),
        TrainingSetup(batch=2, seq_len=48, precision="bf16", grad_accum=2, optimizer_impl="fused"),
        TrainingSetup(batch=2, seq_len=48, activation_checkpointing="full", lora_rank=4),
        InferenceSetup(batch=2, seq_len=48),
    ],
    ids=range(4),
)
def test_its_peak_is_that_of_the_estimate(setup: TrainingSetup | InferenceSetup) -> None:
    found = snapshot(SMALL, setup)
    highest, left = replayed(found)
    assert highest == estimate(SMALL, setup).peak.allocated_bytes
    blocks = [block for segment in found["segments"] for block in segment["blocks"]]
    busy = {block["address"]: rounded(block["requested_size"]) for block in blocks if block["requested_size"]}
    assert busy == left


def test_its_structure_is_that_of_a_real_one() -> None:
    """The same keys with values of the same types, and segments that are covered by their blocks."""
    mine, real = snapshot(SMALL, AS_RUN), loads(REAL.read_bytes())
    assert mine.keys() == real.keys()
    for there, here in (
        (real["segments"][0], mine["segments"][0]),
        (real["segments"][0]["blocks"][0], mine["segments"][0]["blocks"][0]),
        (real["device_traces"][0][5], mine["device_traces"][0][5]),
        (real["device_traces"][0][5]["frames"][0], mine["device_traces"][0][5]["frames"][0]),
        (real["external_annotations"][0], mine["external_annotations"][0]),
    ):
        assert there.keys() <= here.keys()
        assert {key: type(value) for key, value in there.items()} == {key: type(here[key]) for key in there}
    for segment in mine["segments"]:
        at = segment["address"]
        for block in segment["blocks"]:
            assert block["address"] == at
            at += block["size"]
        assert at == segment["address"] + segment["total_size"]
    times = [event["time_us"] for event in mine["device_traces"][0]]
    assert times == sorted(times)
    made = {frame["name"] for event in mine["device_traces"][0] for frame in event["frames"]}
    assert {"linear", "backward of linear", "model.layers.1.mlp.down_proj", "forward", "parameter"} <= made


def test_a_real_snapshot_is_the_estimate_but_for_what_the_run_did_not_have() -> None:
    """Every tensor of forward, backward and step is met. The run kept no batch of ids and mask, but the loss."""
    found = compare_snapshot(SMALL, AS_RUN, loads(REAL.read_bytes()), find_gpu("H100-80GB"))
    assert [phase.phase for phase in found.phases] == ["forward", "backward", "step"]
    for phase in found.phases:
        assert abs(phase.estimate_bytes - phase.snapshot_bytes) <= 1536
        assert max(one.bytes for one in phase.differences) <= 2048
    other = compare_snapshot(SMALL, AS_RUN.model_copy(update={"batch": 3}), loads(REAL.read_bytes()))
    assert max(one.bytes for one in other.phases[0].differences) > 2048


def test_what_memcalc_writes_it_reads_back_without_a_difference() -> None:
    """Its phases are not told by frames of torch, so it is one."""
    found = compare_snapshot(SMALL, AS_RUN, loads(pickle.dumps(snapshot(SMALL, AS_RUN))))
    (phase,) = [phase for phase in found.phases if phase.phase in ("whole", "forward")]
    assert phase.snapshot_bytes == phase.estimate_bytes
    assert phase.differences == ()


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_plain_containers_are_read_as_pickle_reads_them(protocol: int) -> None:
    shared = [1, {"a": None}]
    value = {
        "numbers": [0, -1, 255, 65536, -(2**31), 2**63, 2**200, 1.5, True, False],
        "text": ["", "é", "x" * 300],
        "bytes": b"ab" * 200 if protocol > 2 else 0,
        (1, 2): ((), (1,), (1, 2), (1, 2, 3), (1, 2, 3, 4)),
        "shared": [shared, shared],
    }
    assert loads(pickle.dumps(value, protocol=protocol)) == value
    twice = loads(pickle.dumps([shared, shared], protocol=protocol))
    assert twice[0] is twice[1]


class Hostile:
    def __reduce__(self) -> Any:
        return print, ("run",)


@pytest.mark.parametrize("value", [Hostile(), {1, 2}, 1j, bytearray(b"x"), Path("x")], ids=range(5))
@pytest.mark.parametrize("protocol", [0, 2, 4])
def test_anything_else_is_refused(value: Any, protocol: int, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ConfigError, match="more than plain containers"):
        loads(pickle.dumps([value], protocol=protocol))
    assert capsys.readouterr().out == ""


def test_no_opcode_of_objects_is_known() -> None:
    from memcalc.sources import plain_pickle

    for opcode in pickletools.opcodes:
        makes = opcode.name in ("GLOBAL", "STACK_GLOBAL", "REDUCE", "BUILD", "INST", "OBJ", "NEWOBJ", "NEWOBJ_EX") or (
            "EXT" in opcode.name or "PERSID" in opcode.name
        )
        assert not (makes and ord(opcode.code) in plain_pickle._OPERATIONS), opcode.name


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\x80\x04",
        b"\x80\x04]",
        b"\x80\x04e.",
        b"\x80\x04h\x05.",
        b"\x80\x04X\xff\xff\xff\xff.",
        b"\x80\x04\x85.",
        b".",
    ],
    ids=range(8),
)
def test_broken_ones_are_refused(data: bytes) -> None:
    with pytest.raises(ConfigError, match="the snapshot"):
        loads(data)


def test_every_cut_of_a_real_one_is_refused() -> None:
    whole = REAL.read_bytes()
    for end in range(0, len(whole), 1013):
        with pytest.raises(ConfigError):
            loads(whole[:end])


@pytest.mark.parametrize("value", [[], {}, {"segments": 1}, {"segments": [], "device_traces": [[]]}, "text"], ids=str)
def test_pickles_that_are_no_snapshot(value: Any) -> None:
    with pytest.raises(ConfigError, match="snapshot"):
        compare_snapshot(SMALL, AS_RUN, loads(pickle.dumps(value)))


def test_several_gpus_are_refused() -> None:
    with pytest.raises(UsageError, match="one GPU"):
        snapshot(SMALL, TrainingSetup(batch=2, seq_len=48, gpus=2, parallel="fsdp2"))


def test_the_commands(tmp_path: Path) -> None:
    config, out = tmp_path / "config.json", tmp_path / "step.pickle"
    config.write_text(json.dumps(decoder(64, 2, 4, 2, 128, 320)))
    job = (str(config), "--batch", "2", "--seq-len", "48", "--precision", "bf16", "--padding-mask")
    box = run("from-file", *job, "--snapshot", str(out)).stdout
    assert box == run("from-file", *job).stdout
    found = answer("from-file", *job)
    parts = {part["name"]: part["bytes"] for part in found["components"]["other_overhead"]["parts"]}
    unsplit = parts.get(UNSPLIT_PART, 0)  # a snapshot holds the tensors alone
    assert replayed(loads(out.read_bytes()))[0] == found["peak"]["allocated_bytes"] - unsplit
    found = answer("compare", *job, "--gpu", "H100-80GB", "--snapshot", str(REAL))
    assert [phase["phase"] for phase in found["phases"]] == ["forward", "backward", "step"]
    text = run("compare", *job, "--snapshot", str(REAL)).stdout
    assert "32.0 MiB (33,554,432 bytes): 2 in the snapshot" in text
    assert "one model" in refused(2, "compare", str(config), "8B", "--snapshot", str(REAL))
    assert "--snapshot" in refused(2, "sweep", "1B", "--batch", "1,2", "--snapshot", "x")
    assert "cannot be read" in refused(1, "compare", str(config), "--snapshot", str(tmp_path / "none"))
    config.write_bytes(pickle.dumps(Hostile()))
    assert "plain containers" in refused(1, "compare", "1B", "--snapshot", str(config))
