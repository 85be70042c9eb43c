"""The search for the largest that fits: right for every size that never falls, in few evaluations."""

from collections.abc import Callable

import pytest

from memcalc.common.largest_fit import ENDLESS, LIMIT, largest_fit

SIZES: dict[str, Callable[[int], int]] = {
    "linear": lambda n: 10**9 + 123_457 * n,
    "rounded": lambda n: -(-(10**9 + 123_457 * n) // 2**21) * 2**21,
    "pages": lambda n: 10**9 + 4096 * (-(-n // 256) * 256),
    "quadratic": lambda n: 10**9 + 77 * n + 13 * n * n,
    "two slopes": lambda n: 10**9 + 1000 * min(n, 5000) + 10 * n,
    "steeper later": lambda n: 10**9 + 10 * n + 10**6 * max(n - 5000, 0),
    "level": lambda n: 10**9,
    "copied unless aligned": lambda n: 10**9 + 1000 * n + (300 * n if n % 8 else 0),
    "too short at first": lambda n: 0 if n < 700 else 10**9 + 1000 * n,
    "too long at last": lambda n: 10**9 + n if n <= 8192 else ENDLESS,
}
ROOMS = [10**9 - 1, 10**9, 10**9 + 12_345, 10**9 + 5_010_000, 10**9 + 10**8, 10**10, 80 * 10**9]


@pytest.mark.parametrize("known", [(), (1,), (3000,)])
@pytest.mark.parametrize("limit", [1, 2, 4096, 131_072, LIMIT])
@pytest.mark.parametrize("name", SIZES)
def test_the_answer_fits_and_one_more_does_not(name: str, limit: int, known: tuple[int, ...]) -> None:
    for room in ROOMS:
        asked: list[int] = []

        def size(n: int, asked: list[int] = asked) -> int:
            asked.append(n)
            return SIZES[name](n)

        found = largest_fit(size, room, limit, {n: SIZES[name](n) for n in known})
        assert found == 0 or SIZES[name](found) <= room
        assert found == limit or SIZES[name](found + 1) > room
        aligned = (found // 8 + 1) * 8
        assert aligned > limit or SIZES[name](aligned) > room
        assert len(asked) == len(set(asked)) <= 30, (room, asked)


def test_a_linear_size_takes_few_evaluations() -> None:
    asked: list[int] = []

    def size(n: int) -> int:
        asked.append(n)
        return SIZES["linear"](n)

    assert largest_fit(size, 80 * 10**9, known={1: size(1)}) == 639_898
    assert len(asked) <= 6
