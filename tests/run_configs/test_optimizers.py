"""Every spelling of an optimizer has an answer: one of memcalc's, or the nearest one with a sentence."""

import pytest

from memcalc.run_configs import training
from memcalc.run_configs.mapping import Given, Mapping
from memcalc.run_configs.optimizer_names import NAMES, is_known


@pytest.mark.parametrize("name", NAMES)
def test_every_spelling(name: str) -> None:
    out = Mapping()
    training.optimizer(out, Given("optim", name, name))
    row = NAMES[name]
    known = is_known("adamw" if row.name == "adamw-cpu" else row.name)
    assert bool(out.lacks) == (not known)
    if row.near:
        assert is_known(row.near)
        assert is_known(out.setup["optimizer"])


@pytest.mark.parametrize(
    ("name", "ours", "implementation"),
    [
        ("adamw_torch", "adamw", "foreach"),
        ("ADAMW_TORCH_FUSED", "adamw", "fused"),
        ("adamw_bnb_8bit", "adamw-8bit", None),
        ("bitsandbytes.optim.PagedAdamW8bit", "paged-adamw-8bit", None),
        ("adafactor", "adafactor-hf", None),
        ("lion_8bit", "lion-8bit", None),
    ],
)
def test_some_by_hand(name: str, ours: str, implementation: str | None) -> None:
    out = Mapping()
    training.optimizer(out, Given("optim", name, name))
    assert out.setup["optimizer"] == ours
    assert out.setup.get("optimizer_impl") == implementation
