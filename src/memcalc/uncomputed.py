"""Options that are declared but that nothing computes yet. A row goes when its option is computed.

Where leaving one out makes the answer too small it is refused, so that nothing fits by mistake; where it makes the
answer too large, the answer is given and says so.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from memcalc.errors import MemcalcError
from memcalc.fields import option_name

if TYPE_CHECKING:
    from memcalc.setup import TrainingSetup

_TOO_SMALL = {"objective": ("sft",)}
_TOO_LARGE: dict[str, tuple[object, ...]] = {}
"""Fields of a training setup with the values that are computed."""


def check_computed(setup: TrainingSetup) -> None:
    """Raise MemcalcError for an option without which the answer would be too small."""
    for name, computed in _TOO_SMALL.items():
        if getattr(setup, name) not in computed:
            raise MemcalcError(
                f"{_said(setup, name)} is not computed yet, and without it the answer would be too small; leave it "
                "out, and add what it takes by hand."
            )


def upper_bounds(setup: TrainingSetup) -> Iterator[str]:
    """Lines for the options without which the answer is too large."""
    for name, computed in _TOO_LARGE.items():
        if getattr(setup, name) not in computed:
            yield f"{_said(setup, name)} is not computed yet: the answer is what it takes without it, an upper bound"


def _said(setup: TrainingSetup, name: str) -> str:
    value = getattr(setup, name)
    return option_name(name) if value is True else f"{option_name(name)} {value}"
