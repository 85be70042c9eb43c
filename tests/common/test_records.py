"""Frozen records behave as the frozen dataclasses of the standard library do."""

from dataclasses import FrozenInstanceError, asdict, dataclass, field, replace

import pytest

from memcalc.common.records import frozen


@frozen
class Point:
    """Two numbers and a list."""

    x: int
    y: int = 2
    names: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Standard:
    """The same, made by the standard library alone."""

    x: int
    y: int = 2
    names: list[str] = field(default_factory=list)


@frozen(kw_only=True)
class Named:
    """A field that is only given by name, and a check."""

    x: int

    def __post_init__(self) -> None:
        if self.x < 0:
            raise ValueError("negative")


@frozen(eq=False)
class Identity:
    """Equal to itself alone."""

    x: int


def test_it_is_what_the_standard_library_makes() -> None:
    assert asdict(Point(1)) == asdict(Standard(1)) == {"x": 1, "y": 2, "names": []}
    assert repr(Point(1, 3)) == repr(Standard(1, 3)).replace("Standard", "Point")
    assert replace(Point(1), y=5) == Point(1, 5)
    assert Point(1).names is not Point(1).names
    assert Point(1) != Standard(1)
    assert Point(1) == Point(1, 2, [])
    assert hash(Named(x=1)) == hash(Named(x=1))
    assert Identity(1) != Identity(1)
    assert len({Identity(1), Identity(1)}) == 2


def test_it_is_frozen() -> None:
    point = Point(1)
    with pytest.raises(FrozenInstanceError, match="'x' of a Point"):
        point.x = 3  # type: ignore[misc]
    with pytest.raises(FrozenInstanceError, match="'x' from a Point"):
        del point.x
    assert point.x == 1


@pytest.mark.parametrize(("positional", "named"), [((), {}), ((1, 2, [], 3), {}), ((1,), {"x": 1}), ((1,), {"z": 1})])
def test_values_that_do_not_fit(positional: tuple[object, ...], named: dict[str, object]) -> None:
    for made in (Point, Standard):
        with pytest.raises(TypeError):
            made(*positional, **named)  # type: ignore[arg-type]


def test_checks_run() -> None:
    with pytest.raises(ValueError, match="negative"):
        Named(x=-1)
    with pytest.raises(TypeError):
        Named(1)  # type: ignore[misc]
