"""Checked fields: what they refuse, and that pydantic would accept and refuse the same of well-typed values."""

import copy
import pickle
from typing import Annotated, Literal

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pydantic import BaseModel, ConfigDict, ValidationError
from pydantic import Field as PydanticField

from memcalc.common.validation import Checked, Field
from memcalc.errors import UsageError


class Ours(Checked):
    count: Annotated[int, Field(ge=1, le=8)] = Field(1, description="How many.")
    maybe: Annotated[int, Field(ge=1)] | None = Field(None, description="Perhaps.")
    share: float = Field(0.5, ge=0, lt=1)
    word: Literal["a", "b"] = Field("a")
    name: str = "x"
    flag: bool = False


class Theirs(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    count: Annotated[int, PydanticField(ge=1, le=8)] = 1
    maybe: Annotated[int, PydanticField(ge=1)] | None = None
    share: float = PydanticField(0.5, ge=0, lt=1)
    word: Literal["a", "b"] = "a"
    name: str = "x"
    flag: bool = False


values = st.one_of(
    st.integers(-3, 12), st.floats(), st.booleans(), st.none(), st.sampled_from(["a", "b", "c", "", "1"]), st.just([1])
)


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.dictionaries(st.sampled_from([*Theirs.model_fields, "other"]), values, max_size=3))
def test_the_same_as_pydantic(given_values: dict[str, object]) -> None:
    try:
        theirs = Theirs(**given_values)  # type: ignore[arg-type]
    except ValidationError:
        with pytest.raises(UsageError):
            Ours(**given_values)
        return
    ours = Ours(**given_values)
    assert ours.model_dump() == theirs.model_dump()
    assert ours.model_fields_set == theirs.model_fields_set


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"count": 0}, "--count must be at least 1, not 0."),
        ({"count": 9}, "--count must be at most 8, not 9."),
        ({"count": "4"}, "--count needs a whole number, not '4'."),
        ({"count": True}, "--count needs a whole number, not 'True'."),
        ({"share": 1.0}, "--share must be less than 1, not 1.0."),
        ({"share": float("nan")}, "--share must be at least 0, not nan."),
        ({"word": "A"}, "--word cannot be 'A'; did you mean 'a'?"),
        ({"cuont": 2}, "There is no option --cuont; did you mean 'count'?"),
    ],
)
def test_what_is_said(wrong: dict[str, object], says: str) -> None:
    with pytest.raises(UsageError) as refusal:
        Ours(**wrong)
    assert str(refusal.value) == says


def test_objects_are_values() -> None:
    made = Ours(count=3)
    assert made == Ours(count=3) == copy.copy(made) == pickle.loads(pickle.dumps(made))
    assert hash(made) == hash(Ours(count=3))
    assert made != Ours(count=4)
    assert repr(Ours(count=3)).startswith("Ours(count=3, maybe=None, ")
    with pytest.raises(AttributeError, match="frozen"):
        made.count = 4  # type: ignore[misc]
    other = made.model_copy(update={"name": "y"})
    assert (other.count, other.name, other.model_fields_set) == (3, "y", {"count", "name"})
    with pytest.raises(UsageError):
        made.model_copy(update={"count": 0})
