"""The interpreter's reference counts, on which lifetimes of tensors rest: what they are here, and whether they will do.

A storage dies when its last reference goes, and a gradient that nobody else refers to is taken over without a copy.
Both are read off CPython's counts. How many references a running function adds depends on its version (3.14 lends
locals to calls instead of counting them), so that it is measured when this module is imported.
"""

from __future__ import annotations

from collections.abc import Sequence

from memcalc.errors import UnsupportedPythonError

try:
    from sys import getrefcount
except ImportError:  # PyPy

    def getrefcount(object: object, /) -> int:  # type: ignore[misc]
        """No count."""
        return 0


def only_reference(held: Sequence[object]) -> bool:
    """Whether nothing but this list refers to its first element."""
    return getrefcount(held[0]) == _ALONE


class _Probe:
    """Notes when it dies."""

    alive = 0

    def __init__(self) -> None:
        _Probe.alive += 1

    def __del__(self) -> None:
        _Probe.alive -= 1


def _measured() -> int:
    """What `only_reference` counts for an object that a list alone refers to.

    Raises UnsupportedPythonError where objects do not die with their last reference, or counts do not tell.
    """
    held: list[object] = [_Probe()]
    alone = getrefcount(held[0])
    other = held[0]
    shared = getrefcount(held[0])
    del other
    counts = shared == alone + 1 and getrefcount(held[0]) == alone
    held.clear()
    if not counts or _Probe.alive:
        from platform import python_implementation, python_version

        raise UnsupportedPythonError(
            "memcalc reads how long tensors live off the reference counts of CPython 3.11 or newer, which this "
            f"interpreter ({python_implementation()} {python_version()}) does not keep: run it with CPython."
        )
    return alone


_ALONE = _measured()
