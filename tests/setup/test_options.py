"""Setups are pydantic models: what they refuse, in which words, and that they are values."""

import copy
import json
import pickle
from collections.abc import Callable
from typing import Any

import pytest
from pydantic import BaseModel

from memcalc import InferenceSetup, MemcalcError, TrainingSetup
from memcalc.errors import UsageError
from memcalc.setup.adapter_conflicts import LORA_OPTIONS
from memcalc.setup.options import Panel

SETUPS = (TrainingSetup, InferenceSetup)


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"batch": 0}, "--batch must be at least 1, not 0."),
        ({"batch": 2**41}, f"--batch must be at most {2**40}, not {2**41}."),
        ({"batch": "4"}, "--batch needs a whole number, not '4'."),
        ({"batch": True}, "--batch needs a whole number, not 'True'."),
        ({"batch": 1.0}, "--batch needs a whole number, not '1.0'."),
        ({"batch": None}, "--batch needs a whole number, not 'None'."),
        ({"optimizer": 3}, "--optimizer needs text, not '3'."),
        ({"dora": "yes"}, "--dora needs true or false, not 'yes'."),
        ({"lora_dropout": 1}, "--lora-dropout must be less than 1, not 1."),
        ({"lora_dropout": float("nan")}, "--lora-dropout must be less than 1, not nan."),
        ({"lora_dropout": "0.1"}, "--lora-dropout needs a number, not '0.1'."),
        ({"allocator_reserve": 5.0}, "--allocator-reserve must be at most 4, not 5.0."),
        ({"attention": "flsh"}, "--attention cannot be 'flsh'; did you mean 'flash'?"),
        ({"attention": "x"}, "--attention cannot be 'x': choose from eager, sdpa, flash."),
        ({"attention": ["eager"]}, "--attention cannot be \"['eager']\""),
        ({"lora_dtype": "bf-16"}, "--lora-dtype cannot be 'bf-16'; did you mean 'bf16'?"),
        ({"frozen_dtype": "bf16", "lora_rank": 8}, "--frozen-dtype is for parts of a model"),
        ({"frozen_dtype": "bf16", "precision": "bf16"}, "--frozen-dtype needs autocast"),
        ({"bacth": 2}, "There is no option --bacth; did you mean 'batch'?"),
        ({"bacth": 2, "batch": 0}, "There is no option --bacth; did you mean 'batch'?"),
    ],
)
def test_what_is_said(wrong: dict[str, Any], says: str) -> None:
    ways: list[Callable[[], TrainingSetup]] = [
        lambda: TrainingSetup(**wrong),
        lambda: TrainingSetup.model_validate(wrong),
    ]
    for refused in ways:
        with pytest.raises(UsageError) as refusal:
            refused()
        assert str(refusal.value).startswith(says)
        assert isinstance(refusal.value, MemcalcError)
        assert refusal.value.__cause__ is None


def test_a_setup_is_made_from_names() -> None:
    with pytest.raises(UsageError, match="by name, such as batch=4"):
        TrainingSetup.model_validate([4])
    assert TrainingSetup.model_validate_json('{"batch": 4}') == TrainingSetup(batch=4)


def test_setups_are_values() -> None:
    made = TrainingSetup(batch=3)
    assert made == TrainingSetup(batch=3) == copy.copy(made) == pickle.loads(pickle.dumps(made))
    assert hash(made) == hash(TrainingSetup(batch=3))
    assert made != TrainingSetup(batch=4)
    assert made.model_fields_set == {"batch"}
    with pytest.raises(ValueError, match="frozen"):
        made.batch = 4  # type: ignore[misc]
    other = made.model_copy(update={"seq_len": 9})
    assert (other.batch, other.seq_len, other.model_fields_set) == (3, 9, {"batch", "seq_len"})
    for wrong in ({"batch": 0}, {"bacth": 2}, {"galore_rank": 4}):
        with pytest.raises(UsageError):
            made.model_copy(update=wrong)
    assert TrainingSetup(**made.model_dump(exclude_unset=True)) == made
    assert json.loads(made.model_dump_json())["batch"] == 3


@pytest.mark.parametrize("setup", SETUPS)
def test_every_field_is_described(setup: type[BaseModel]) -> None:
    schema = setup.model_json_schema()
    assert schema["additionalProperties"] is False
    for name, field in schema["properties"].items():
        assert field["description"].endswith((".", ")")), name
        assert field["panel"] in Panel.__args__, name  # type: ignore[attr-defined]
        assert field.get("default") is not None or field.get("unset") or name in ("freeze", *LORA_OPTIONS, "lora_rank")


@pytest.mark.parametrize("setup", SETUPS)
def test_a_panel_of_the_help_fits_a_screen(setup: type[BaseModel]) -> None:
    panels = [field["panel"] for field in setup.model_json_schema()["properties"].values()]
    assert max(map(panels.count, panels)) <= 12
