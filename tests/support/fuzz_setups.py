"""Jobs by chance: every option with its values, for every family, on any GPU, answered in one way or another."""

import json
from functools import cache
from pathlib import Path
from random import Random
from typing import Any, Literal, get_args, get_origin

from memcalc import InferenceSetup, ModelSpec, TrainingSetup, estimate, find_gpu
from memcalc.cli.options import Declared, declared
from memcalc.errors import MemcalcError
from memcalc.setup.setup import InferenceSetup as Inference
from memcalc.tables.gpus import GPUS
from memcalc.tables.optimizers import OPTIMIZERS
from support.fuzz_answers import held_together
from support.mutations import ODD
from support.paths import DATA

_NUMBERS = [1, 1, 2, 2, 3, 4, 8, 16, 60]
_TEXTS: dict[str, list[str]] = {
    "optimizer": list(OPTIMIZERS),
    "train_only": ["all", "head", "last-2", "norms", "biases", "embedding"],
    "freeze": ["embedding", "vision", "head", "first-1"],
    "lora_targets": ["all-linear", "q_proj,v_proj", "q_proj", ".*proj", "lm_head"],
    "lora_exclude_modules": ["lm_head", "q_proj"],
    "lora_layers_to_transform": ["0", "0,1"],
    "lora_rank_pattern": ["q_proj=2", "v_proj=4"],
    "lora_target_parameters": ["mlp.experts.gate_up_proj"],
    "modules_to_save": ["lm_head", "embed_tokens"],
    "peft_type": ["lora", "ia3", "adalora", "vera", "prompt-tuning"],
    "cpu_offload": ["optimizer", "parameters", "optimizer,parameters"],
    "alloc_conf": ["expandable_segments:True", "max_split_size_mb:32", "roundup_power2_divisions:4"],
    "engine_version": ["0.11.0", "0.8.5"],
    "components_to_quantize": ["transformer", "text_encoder"],
}
_SIZES = ["0", "500MiB", "1GiB"]
_FIRST = ("parallel", "lora_rank", "objective", "engine", "activation_checkpointing", "precision", "quantization")
"""Options that many others wait for."""


@cache
def _configs() -> list[dict[str, Any]]:
    found = []
    for path in sorted((DATA / "measured").glob("*.jsonl")):
        with path.open() as lines:
            config = json.loads(next(lines))["case"].get("config")
        if isinstance(config, dict) and config.get("model_type"):
            found.append(config)
    return found


def _value(random: Random, option: Declared) -> Any:
    if get_origin(option.kind) is Literal:
        return random.choice(get_args(option.kind))
    if option.kind is bool:
        return random.random() < 0.5
    if option.kind is int:
        return random.choice([*_NUMBERS, 64, 100]) if option.name == "seq_len" else random.choice(_NUMBERS)
    if option.kind is float:
        return random.choice([0.0, 0.1, 0.5, 0.9, 1.0])
    return random.choice(_TEXTS.get(option.name, _SIZES))


def _options(random: Random, mode: str) -> dict[str, Any]:
    known = [option for option in declared().values() if mode in option.modes]
    first = [option for option in known if option.name in _FIRST]
    chosen = random.sample(first, random.randint(0, min(3, len(first)))) + random.sample(known, random.randint(0, 3))
    options = {option.name: _value(random, option) for option in chosen}
    options.setdefault("seq_len", random.choice([None, 16, 64]))
    if options.get("parallel") not in (None, "none") and random.random() < 0.8:
        options["gpus"] = random.choice([2, 4, 8])
    return options


def setups(random: Random, folder: Path) -> str:
    """A job of a family's small model under a handful of options."""
    mode = random.choice(["training", "training", "inference"])
    setup_class = TrainingSetup if mode == "training" else InferenceSetup
    gpu = random.choice([None, "24GB", random.choice(GPUS).name])
    options, config = _options(random, mode), random.choice(_configs())
    (folder / "job.txt").write_text(f"{mode} {options} {gpu} {config}")
    try:
        setup = setup_class(**options)
        report = estimate(ModelSpec.from_config(config), setup, gpu)
        held_together(report.model_dump())
        if random.random() < 0.2:
            _shown(random, report)
    except MemcalcError as problem:
        return str(problem)
    return ""


def _shown(random: Random, report: Any) -> None:
    text = report.render(width=random.choice([60, 80, 120]), unicode=random.random() < 0.5)
    assert all(len(line) <= 200 for line in text.splitlines()), text
    report.to_markdown()
    report.to_json()


def wrong_types(random: Random, _: Path) -> str:
    """The library, given what does not belong there."""
    odd = random.choice([*ODD, object(), b"bytes", 3 + 4j, estimate, {1, 2}, Path("config.json"), range(3)])
    spec = ModelSpec.from_config(random.choice(_configs()))
    setup: Any = random.choice([TrainingSetup(seq_len=16), InferenceSetup(seq_len=16)])
    what = random.randrange(8)
    try:
        if what == 0:
            estimate(odd, setup)
        elif what == 1:
            estimate(spec, odd)
        elif what == 2:
            estimate(spec, setup, odd)
        elif what == 3:
            ModelSpec.from_config(odd)
        elif what == 4:
            find_gpu(odd)
        elif what == 5:
            estimate(spec, setup, assumptions=odd)
        elif what == 6:
            estimate(spec, setup, teacher=odd)
        else:
            name = random.choice(list(type(setup).model_fields))
            of_inference = isinstance(setup, Inference)
            changed = InferenceSetup(**{name: odd}) if of_inference else TrainingSetup(**{name: odd})
            estimate(spec, changed)
    except MemcalcError as problem:
        return str(problem)
    except Exception as problem:
        raise AssertionError(f"{what} {odd!r:.200}: {type(problem).__name__} {problem}") from problem
    return ""
