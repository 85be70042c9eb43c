"""A bare parameter count, and the released models whose shapes it takes."""

from typing import Any

import pytest

from memcalc import canonical_spec
from memcalc.errors import UsageError
from memcalc.models.build import build
from memcalc.models.released_shapes import SHAPES, TODAY, Shape
from memcalc.models.spec import ModelSpec


def _count(spec: ModelSpec) -> int:
    return sum(parameter.count * parameter.copies for _, parameter in build(spec).parameters())


@pytest.mark.parametrize("shape", [shape for shapes in SHAPES.values() for shape in shapes], ids=lambda s: s.name)
def test_counts_are_those_published(shape: Shape) -> None:
    assert shape.counted() == shape.parameters


@pytest.mark.parametrize(
    ("count", "like", "name"),
    [
        (8_000_000_000, None, "Llama-3.1-8B"),
        (70_000_000_000, None, "Llama-3.1-70B"),
        (12_000_000_000, None, "Mistral-Nemo-12B"),
        (135_000_000, None, "SmolLM2-135M"),
        (8_000_000_000, "qwen3", "Qwen3-8B"),
        (1_000_000_000, "gemma-3", "Gemma-3-1B"),
        (124_000_000, "gpt-2", "GPT-2"),
    ],
)
def test_a_count_near_to_a_released_model_is_that_model(count: int, like: str | None, name: str) -> None:
    spec, (line,) = canonical_spec(count, like=like)
    shape = next(shape for shapes in SHAPES.values() for shape in shapes if shape.name == name)
    assert spec.name == f"{name}-like"
    assert _count(spec) == shape.parameters
    assert f"{shape.parameters:,} parameters" in line.text


@pytest.mark.parametrize("count", [65 * 10**6, 10**9, 5 * 10**9, 33 * 10**9, 180 * 10**9, 10**12])
def test_other_counts_change_the_depth(count: int) -> None:
    spec, (line,) = canonical_spec(count)
    found = _count(spec)
    assert abs(found / count - 1) < 0.05
    assert f"{found:,} parameters" in line.text
    assert "(it has" in line.text


def test_todays_models_group_their_heads() -> None:
    assert all(shape.num_key_value_heads < shape.num_attention_heads for shape in TODAY)
    assert [shape.parameters for shape in TODAY] == sorted(shape.parameters for shape in TODAY)


def test_the_documentations_example_stays() -> None:
    spec, _ = canonical_spec(4 * 10**9)
    assert _count(spec) == 4_047_191_040


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"parameters": 8 * 10**9, "like": "qwen"}, "did you mean 'qwen3' or 'qwen2.5'"),
        ({"parameters": 8 * 10**9, "like": "zzz"}, "choose from llama-2, llama-3"),
        ({"parameters": 8 * 10**9, "like": "qwen3", "num_layers": 4}, "leave out --like, or --num-layers"),
        ({"parameters": None, "like": "qwen3"}, "give --params too"),
        ({"parameters": 10**8, "like": "llama-3"}, "its smallest has 323,491,840"),
        ({"parameters": 10**15, "like": "llama-3"}, "blocks as wide as Llama-3.1-405B's"),
    ],
)
def test_refused(arguments: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        canonical_spec(**arguments)
