"""What a program may hand to the library: wrong types are refused by the argument's name."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from memcalc import InferenceSetup, MemcalcError, ModelSpec, TrainingSetup, canonical_spec, estimate, find_gpu

SPEC = ModelSpec.from_config(
    {"model_type": "llama", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 100}
)
WRONG: list[Any] = [1, 1.5, True, "text", b"bytes", [], {}, object()]

CALLS: dict[str, Callable[[Any], object]] = {
    "spec": lambda value: estimate(value, TrainingSetup()),
    "setup": lambda value: estimate(SPEC, value),
    "gpu": lambda value: estimate(SPEC, TrainingSetup(), value),
    "teacher": lambda value: estimate(SPEC, TrainingSetup(), teacher=value),
    "config": ModelSpec.from_config,
    "params": canonical_spec,
    "task": SPEC.with_head,
    "--gpu": find_gpu,
}


@pytest.mark.parametrize("value", WRONG, ids=[type(value).__name__ for value in WRONG])
@pytest.mark.parametrize("name", CALLS)
def test_wrong_types(name: str, value: Any) -> None:
    with pytest.raises(MemcalcError) as caught:
        CALLS[name](value)
    assert str(caught.value).endswith((".", "?"))


@pytest.mark.parametrize("call", ["spec", "setup", "config", "--gpu"])
def test_none_is_refused_by_name(call: str) -> None:
    with pytest.raises(MemcalcError, match=f"{call} needs .* not null"):
        CALLS[call](None)


def refusal(setup: Any, name: str, value: object) -> str:
    try:
        setup(**{name: value})
    except MemcalcError as problem:
        return str(problem)
    return ""


@pytest.mark.parametrize("setup", [TrainingSetup, InferenceSetup])
def test_every_option_of_a_setup(setup: Any) -> None:
    for name in setup.model_fields:
        for value in WRONG:
            said = refusal(setup, name, value)
            assert not said or name.replace("_", "-") in said


def test_a_gpu_as_text_is_looked_up() -> None:
    found = estimate(SPEC, TrainingSetup(), "RTX 4090")
    assert found == estimate(SPEC, TrainingSetup(), find_gpu("rtx-4090"))
    with pytest.raises(MemcalcError, match="No GPU is called"):
        estimate(SPEC, TrainingSetup(), "no such GPU")


@pytest.mark.parametrize("path", ["config.json", Path("config.json")])
def test_a_path_where_a_config_belongs(path: Any) -> None:
    with pytest.raises(MemcalcError, match="not its path"):
        ModelSpec.from_config(path)
