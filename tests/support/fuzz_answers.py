"""What is asked about a mutated input, and what must hold of an answer."""

import gc
import json
from collections.abc import Mapping
from pathlib import Path
from random import Random
from typing import Any

from memcalc import InferenceSetup, TrainingSetup, estimate, sources
from memcalc.errors import MemcalcError
from memcalc.sources.inspection import inspect_model
from memcalc.sources.model_spec import describe
from memcalc.tables.gpus import find_gpu


def asked(random: Random, path: Path) -> str:
    """Load, describe and estimate, or inspect; the refusal, or ""."""
    try:
        model = sources.load(str(path), kind="file")
        if model.components:
            inspect_model(model, "fuzz")
            return ""
        if random.random() < 0.1:
            json.dumps(inspect_model(model, "fuzz", generic=random.random() < 0.5).to_dict())
            return ""
        chosen = describe(model, "fuzz", _setup(random), generic=random.random() < 0.1)
        gpu = find_gpu("A100-80GB") if random.random() < 0.5 else None
        held_together(estimate(chosen.spec, chosen.setup, gpu, assumptions=chosen.assumptions).model_dump())
    except MemcalcError as problem:
        return str(problem)
    finally:
        gc.collect(0)
    return ""


def _setup(random: Random) -> TrainingSetup | InferenceSetup:
    what = random.random()
    if what < 0.4:
        engine: Any = random.choice(["transformers", "vllm", "llama.cpp"])
        return InferenceSetup(seq_len=random.choice([None, 64]), engine=engine)
    if what < 0.6:
        return TrainingSetup(lora_rank=8, quantization=random.choice(["none", "nf4"]))
    return TrainingSetup(seq_len=random.choice([None, 64]))


def held_together(report: Mapping[str, Any]) -> None:
    """Rows sum to the peak, and everything is a whole number that somebody could mean."""
    json.dumps(report)
    rows = report["components"].values()
    assert all(type(row["peak_bytes"]) is int and row["peak_bytes"] >= 0 for row in rows), rows
    assert all(row["max_bytes"] >= row["peak_bytes"] for row in rows), rows
    assert 0 < report["peak"]["allocated_bytes"] < 10**22
    assert report["model"]["parameters"]["total"] > 0
