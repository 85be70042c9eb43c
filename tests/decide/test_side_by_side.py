"""Many setups on all processors: in order, with the errors of a loop, ended when nobody reads on."""

import multiprocessing
from itertools import islice

import pytest

from memcalc.decide import side_by_side
from memcalc.errors import UsageError


def halved(number: int) -> int:
    if number < 0:
        raise UsageError("negative")
    return number // 2


@pytest.mark.parametrize("count", [0, 1, side_by_side.ALONE - 1, side_by_side.ALONE, 1000])
def test_results_come_in_order(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(side_by_side, "_processors", lambda: 2)
    assert list(side_by_side.each(halved, range(count))) == [number // 2 for number in range(count)]
    assert not multiprocessing.active_children()


def test_an_error_is_that_of_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(side_by_side, "_processors", lambda: 2)
    with pytest.raises(UsageError, match="negative"):
        list(side_by_side.each(halved, [*range(500), -1]))
    assert not multiprocessing.active_children()


def test_it_ends_where_the_reader_stops(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(side_by_side, "_processors", lambda: 2)
    results = side_by_side.each(halved, range(10_000))
    assert list(islice(results, 3)) == [0, 0, 1]
    results.close()  # type: ignore[attr-defined]
    assert not multiprocessing.active_children()
