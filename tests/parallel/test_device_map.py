"""Models that one process spreads over several GPUs: where modules go, and what each GPU then holds.

`device_maps.jsonl` has what Transformers 5.24 decided for models on meta tensors (bytes on each device),
`device_map_runs.jsonl` what PyTorch 2.14's allocator counted on each GPU while Accelerate 1.15 ran such a map: two
cuBLAS workspaces in training and one in inference are in it.
"""

import json
from typing import Any

import pytest
from support.paths import DATA

from memcalc import InferenceSetup, ModelSpec, TrainingSetup, estimate
from memcalc.errors import UsageError
from memcalc.inference.generate import generate
from memcalc.models.build import build
from memcalc.parallel.device_map import mapped_modules, model_parts, weight_sizes
from memcalc.parallel.setup import DeviceMap
from memcalc.peak.ranks import cards_of, phase_totals
from memcalc.tables.dtypes import ALIASES
from memcalc.training.step import trace
from memcalc.training.traced_step import Step

PLENTY = 10**15
MODELS = [json.loads(line) for line in (DATA / "device_maps.jsonl").read_text().splitlines()]
RUNS = [json.loads(line) for line in (DATA / "device_map_runs.jsonl").read_text().splitlines()]
LLAMA = {
    "model_type": "llama",
    "hidden_size": 256,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "intermediate_size": 512,
    "vocab_size": 4000,
}
SPEC = ModelSpec.from_config(LLAMA)


@pytest.mark.parametrize("row", MODELS, ids=lambda row: row["name"])
def test_where_modules_go(row: dict[str, Any]) -> None:
    network = build(ModelSpec.from_config(row["config"]))
    for dtype in ("bf16", "fp32"):
        sizes = weight_sizes(network, ALIASES[dtype])
        parts = model_parts(network, sizes)
        if parts.root.nbytes == row["total"]:
            break
    assert parts.root.nbytes == row["total"]
    for asked in row["maps"]:
        room: Any = (*enumerate(asked["max_memory"]), ("cpu", PLENTY))
        mapped = mapped_modules(network, DeviceMap(asked["word"], room, asked=True), sizes, quantizes=False)
        found: dict[str, int] = {}
        for part in parts.root.below():
            for name, nbytes in part.tensors:
                device = str(mapped.devices[name])
                found[device] = found.get(device, 0) + nbytes
        assert {device: n for device, n in found.items() if n} == asked["bytes"], asked["word"]


def _options(case: dict[str, Any]) -> dict[str, Any]:
    memory = ",".join(f"{device}={nbytes}B" for device, nbytes in case["max_memory"].items())
    return {"device_map": case["how"], "max_memory": memory, "batch": case["batch"], "seq_len": case["seq"]}


def _run(case: dict[str, Any]) -> tuple[Step, int]:
    """The step of a case, and bytes of the workspaces that it has on each GPU."""
    spec, options = ModelSpec.from_config(case["config"]), _options(case)
    if "precision" not in case:
        return generate(spec, InferenceSetup(**options, dtype="bf16", attention=case.get("attn", "sdpa"))), 2**25
    options |= {"activation_checkpointing": "full"} if case.get("ckpt") else {}
    if lora := case.get("lora"):
        options |= {"lora_rank": lora["r"], "lora_targets": lora["targets"]}
    return trace(spec, TrainingSetup(**options, precision=case["precision"], optimizer_impl="foreach")), 2 * 8_519_680


@pytest.mark.parametrize("row", RUNS, ids=lambda row: f"{row['case']['config']['model_type']}-{row['case']['how']}")
def test_what_each_gpu_holds(row: dict[str, Any]) -> None:
    """Counters of what was requested have no rounding of scalars, those of what was allocated unsplit blocks."""
    step, workspaces = _run(row["case"])
    ids = 8 * row["case"]["batch"] * row["case"]["seq"]
    for card, own in cards_of(step).items():
        for phase, total in phase_totals(own).items():
            requested = row["measured"][f"{phase}_requested"][card]
            assert total + workspaces == pytest.approx(requested, abs=max(4 * ids, requested // 4000)), (card, phase)


def test_gpus_together_hold_the_model_once() -> None:
    alone = estimate(SPEC, TrainingSetup(precision="bf16"))
    spread = estimate(SPEC, TrainingSetup(precision="bf16", device_map="balanced", gpus=3))
    held = sum(rank.model_weights_bytes for rank in spread.ranks)
    assert held == alone.components.model_weights.peak_bytes
    assert sum(rank.optimizer_states_bytes for rank in spread.ranks) == alone.components.optimizer_states.peak_bytes
    assert spread.model.parameters == alone.model.parameters
    assert spread.cluster is not None
    assert (spread.cluster.gpus, spread.cluster.parallel) == (3, "device_map balanced")


@pytest.mark.parametrize("setup", [TrainingSetup, InferenceSetup])
def test_one_gpu_with_room_is_the_single_gpu(setup: Any) -> None:
    alone = estimate(SPEC, setup())
    assert estimate(SPEC, setup(device_map="auto", gpus=1)).peak == alone.peak


def test_what_does_not_fit_waits_in_host_memory() -> None:
    report = estimate(SPEC, InferenceSetup(device_map="auto", max_memory="0=8MiB,cpu=1GiB", dtype="bf16"))
    assert report.cluster is not None
    parts = {part.name: part.bytes for part in report.components.model_weights.parts}
    kept = report.components.model_weights.peak_bytes - parts.get("weights from host memory", 0)
    whole = estimate(SPEC, InferenceSetup(dtype="bf16")).components.model_weights.peak_bytes
    assert 0 < report.cluster.host_bytes == pytest.approx(whole - kept, abs=512)


@pytest.mark.parametrize("quantization", ["nf4", "int8"])
def test_quantized_weights_are_spread(quantization: Any) -> None:
    options = {"quantization": quantization, "dtype": "bf16"}
    whole = estimate(SPEC, InferenceSetup(**options)).components.model_weights.peak_bytes
    spread = estimate(SPEC, InferenceSetup(**options, device_map="balanced", gpus=2))
    assert sum(rank.model_weights_bytes for rank in spread.ranks) == whole


@pytest.mark.parametrize(
    ("setup", "options", "sentence"),
    [
        (InferenceSetup, {"max_memory": "1GiB"}, "what --device-map may fill"),
        (InferenceSetup, {"device_map": "auto"}, "say how many with --gpus"),
        (InferenceSetup, {"device_map": "auto", "max_memory": "1GiB"}, "there is no --gpus"),
        (InferenceSetup, {"device_map": "auto", "max_memory": "tpu=1GiB"}, "GPUs by their index"),
        (InferenceSetup, {"device_map": "auto", "max_memory": "cpu=1GiB"}, "names no GPU"),
        (InferenceSetup, {"device_map": "auto", "max_memory": "0=1GiB,0=2GiB"}, "says twice"),
        (InferenceSetup, {"device_map": "auto", "gpus": 2, "max_memory": "2=1GiB"}, "names GPU 2"),
        (InferenceSetup, {"device_map": "auto", "gpus": 2, "engine": "vllm"}, "Transformers' way"),
        (InferenceSetup, {"device_map": "auto", "gpus": 2, "tensor_parallel_size": 2}, "use one of them"),
        (InferenceSetup, {"device_map": "auto", "gpus": 2, "load_on": "cpu"}, "no effect"),
        (InferenceSetup, {"gpus": 2}, "say how the model is spread"),
        (TrainingSetup, {"device_map": "auto", "gpus": 2, "parallel": "ddp"}, "several processes"),
        (TrainingSetup, {"device_map": "auto", "gpus": 2, "objective": "dpo"}, "sft in a plain loop"),
        (TrainingSetup, {"device_map": "auto", "max_memory": "0=1MiB,cpu=1GiB"}, "cannot be trained"),
    ],
)
def test_refused(setup: Any, options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(UsageError, match=sentence):
        estimate(SPEC, setup(**options))
