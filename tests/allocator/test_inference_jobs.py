"""Generation through the simulated allocator, against PyTorch's own on the same models.

Every line of `data/allocator/inference.jsonl` is one run of two prompts, each with one token after it or as many as
`tokens` says, of the real Transformers model (torch 2.14.1, transformers 5.24.0) in bf16, built on a GPU whose kernels
do nothing: the peaks of the second prompt by phase, and the most that was reserved.
"""

import json
from typing import Any

import pytest
from support.paths import DATA
from support.tape_events import DEVICES

from memcalc.allocator.inference_events import decoded_tokens, inference_events
from memcalc.allocator.loading import built, loaded_on_gpu
from memcalc.allocator.simulation import simulate
from memcalc.inference.generate import generate
from memcalc.models.spec import ModelSpec
from memcalc.setup.setup import InferenceSetup
from memcalc.tables.dtypes import BF16
from memcalc.training.traced_step import Step, Tracing

ROWS = [json.loads(line) for line in (DATA / "allocator" / "inference.jsonl").read_text().splitlines()]
WORKSPACE = 32 * 2**20


def traced(case: dict[str, Any], every_block: bool) -> Step:
    assert not every_block
    options = InferenceSetup(
        batch=case["batch"], seq_len=case["seq"], dtype="bf16", max_new_tokens=case.get("tokens", 1)
    )
    decoded = decoded_tokens(options.max_new_tokens)
    spec = ModelSpec.from_config(case["config"])
    return generate(spec, options, tracing=Tracing(DEVICES["h100"], decoded=decoded))


@pytest.mark.parametrize("row", ROWS, ids=[row["case"]["config"]["model_type"] for row in ROWS])
def test_a_generation_gives_what_pytorch_gave(row: dict[str, Any]) -> None:
    case, measured = row["case"], row["measured"]
    job = inference_events(lambda every: traced(case, every), WORKSPACE, lambda model: built(model, BF16))
    found = simulate(job)
    assert found.reserved == measured["reserved"]
    if "phases" in measured:
        assert dict(found.steps[1].allocated) == measured["phases"]
        assert found.loaded == measured["loaded"]
    else:
        assert found.allocated == measured["allocated"]


def test_few_tokens_stand_for_many() -> None:
    assert decoded_tokens(1) == ()
    assert decoded_tokens(4) == (1, 2, 3)
    assert decoded_tokens(200) == (1, 25, 50, 75, 100, 125, 150, 175)


LOADED = {
    "model_type": "llama",
    "vocab_size": 5008,
    "hidden_size": 1024,
    "intermediate_size": 2816,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
}


def test_weights_that_are_loaded_on_the_gpu_come_out_of_one_segment() -> None:
    """What `from_pretrained(path, device_map="cuda")` of transformers 5.24 left on a GPU whose kernels do nothing."""
    step = traced({"config": LOADED, "batch": 1, "seq": 8}, every_block=False)
    events = loaded_on_gpu(step.network)
    found = simulate(inference_events(lambda _: step, WORKSPACE, lambda _: events))
    assert found.loaded == 94_371_840
