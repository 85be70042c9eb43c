"""The law of extrapolation: an estimate with few traced blocks equals the one for which every block is traced."""

import json
from collections.abc import Hashable, Iterator, Sequence
from typing import Any
from unittest.mock import patch

from memcalc.errors import MemcalcError
from memcalc.inference.generate import generate
from memcalc.models.spec import ModelSpec
from memcalc.nn import stack
from memcalc.peak.sweep import Sweep
from memcalc.setup.setup import InferenceSetup, TrainingSetup
from memcalc.training import step as training_step
from memcalc.training.step import trace
from memcalc.training.traced_step import Step
from support.measured_rows import inference_setup, rows, standing, training_setup

Setup = TrainingSetup | InferenceSetup
Job = tuple[ModelSpec, Setup, ModelSpec | None]

TRAINING: tuple[dict[str, Any], ...] = (
    {},
    {"attention": "eager"},
    {"attention": "flash", "padding_mask": True},
    {"precision": "mixed-bf16"},
    {"precision": "fp32"},
    {"activation_checkpointing": "full"},
    {"activation_checkpointing": "full", "attention": "eager", "precision": "mixed-bf16"},
    {"activation_checkpointing": "full", "checkpoint_every_n_blocks": 2},
    {"activation_checkpointing": "full", "checkpoint_every_n_blocks": 3},
    {"activation_checkpointing": "full", "checkpoint_reentrant": True},
    {"activation_checkpointing": "full", "activation_offloading": True},
    {"activation_offloading": True},
    {"activation_offloading": True, "attention": "eager"},
    {"activation_checkpointing": "selective", "attention": "eager"},
    {"lora_rank": 8},
    {"lora_rank": 8, "activation_checkpointing": "full"},
    {"lora_rank": 8, "quantization": "nf4"},
    {"lora_rank": 4, "dora": True},
    {"train_only": "last-2"},
    {"train_only": "last-1", "activation_checkpointing": "full"},
    {"train_only": "head"},
    {"optimizer_in_backward": True},
    {"optimizer": "lomo"},
    {"kernels": "liger"},
    {"grad_accum": 4, "keep_logits": True},
)
INFERENCE: tuple[dict[str, Any], ...] = (
    {},
    {"attention": "eager"},
    {"attention": "flash", "padding_mask": True},
    {"num_beams": 3},
    {"prefill_logits": "all"},
    {"max_new_tokens": 50},
    {"prefill_chunk_size": 16},
    {"engine": "vllm"},
    {"engine": "transformers-static"},
    {"kv_dtype": "int4"},
    {"dtype": "fp32", "attention": "eager"},
)

_DEPTHS = [
    "num_hidden_layers",
    "num_layers",
    "num_decoder_layers",
    "encoder_layers",
    "decoder_layers",
    "n_layer",
    "n_layers",
    "depth",
]


def deepened(config: dict[str, Any], times: int) -> dict[str, Any]:
    """The config of a model with so many times as many blocks, whose kinds repeat in the same order."""
    depths = {value for key, value in config.items() if key in _DEPTHS and isinstance(value, int)}
    out: dict[str, Any] = {}
    for key, value in config.items():
        deep = key in _DEPTHS and isinstance(value, int)
        listed = isinstance(value, list) and len(value) in depths and key != "architectures"
        pattern = isinstance(value, str) and len(value) in depths and key.endswith("pattern")
        out[key] = deepened(value, times) if isinstance(value, dict) else value
        if deep or listed or pattern:
            out[key] = value * times
    return out


def measured_jobs() -> Iterator[tuple[str, Job]]:
    """Every measured case as it was run."""
    for name, row in rows():
        case = row["case"]
        spec = ModelSpec.from_config(case["config"])
        teacher = ModelSpec.from_config(case["teacher"]) if "teacher" in case else None
        setup = inference_setup(case) if case.get("mode") == "infer" else training_setup(case)
        yield name, (spec, setup, teacher)


def deep_jobs(every: int = 1) -> Iterator[tuple[str, Job]]:
    """Models as deep again as each measured one or three times so, with all options; of these one in `every`."""
    seen, number = set[str](), 0
    for name, row in rows():
        case = row["case"]
        key = json.dumps(case["config"], sort_keys=True)
        if key in seen:
            continue
        seen.add(key)
        given = case.get("options", {})
        common = {"batch": 2, "seq_len": case.get("seq", 64)}
        common |= {key: given[key] for key in ("images_per_sequence", "image_size") if key in given}
        for kind, table in ((TrainingSetup, TRAINING), (InferenceSetup, INFERENCE)):
            for options in table:
                number += 1
                if number % every == 0:
                    spec = ModelSpec.from_config(deepened(case["config"], 2 + number // every % 2))
                    try:
                        yield f"{name} {kind.__name__} {options}", (spec, kind(**common | options), None)
                    except MemcalcError:
                        continue


def differences(spec: ModelSpec, setup: Setup, teacher: ModelSpec | None = None) -> dict[str, tuple[int, int]] | None:
    """Numbers that differ, each as it is extrapolated and with every block traced; None where nothing is computed."""
    try:
        found, extrapolated = _answer(spec, setup, teacher)
    except MemcalcError:
        return None
    if not extrapolated:
        return {}
    with patch.object(stack, "_representatives", every_block):
        expected, _ = _answer(spec, setup, teacher)
    keys = sorted(found.keys() | expected.keys())
    pairs = {key: (found.get(key, 0), expected.get(key, 0)) for key in keys}
    return {key: (one, other) for key, (one, other) in pairs.items() if one != other}


def every_block(kinds: Sequence[Hashable], *_: int) -> list[tuple[int, list[int]]]:
    return [(position, [position]) for position in range(len(kinds))]


def _answer(spec: ModelSpec, setup: Setup, teacher: ModelSpec | None) -> tuple[dict[str, int], bool]:
    """All numbers of an estimate by name, and whether a block stands for others in it."""
    training_step._trace.cache_clear()
    step = trace(spec, setup, teacher=teacher) if isinstance(setup, TrainingSetup) else generate(spec, setup)
    training_step._trace.cache_clear()
    return dict(_numbers(step)), any(span.block is not None and span.block.copies > 1 for span in step.tape.spans)


def _numbers(step: Step) -> Iterator[tuple[str, int]]:
    sweep = Sweep(step.tape)
    peaks, maxima = sweep.peaks()
    for phase, (total, moment) in peaks.items():
        yield f"{phase}: total", total
        yield from ((f"{phase}: most of row {index}", most) for index, most in enumerate(maxima[phase]))
        yield from ((f"{phase}: {' / '.join(label)}", nbytes) for label, nbytes in sweep.live_at(moment).items())
    for phase in step.phases:
        yield f"{phase}: outside the tape", standing(step, phase)
    if step.training:
        yield "saved for backward", sweep.saved_for_backward(step.forward_end)
    yield "host", step.tape.host_bytes
    yield "KV cache", step.cache_bytes
