"""Types of what a program hands to the library: a wrong one is refused by the argument's name."""

from collections.abc import Sequence

from memcalc.common.escaping import quoted
from memcalc.errors import UsageError


def check_choice(name: str, value: object, choices: Sequence[str]) -> None:
    """Raise UsageError where `value` is none of `choices`."""
    if value not in choices:
        raise UsageError(f"{name} must be {' or '.join(choices)}, not {quoted(str(value))}.")


def check_type(name: str, value: object, kinds: type | tuple[type, ...], due: str) -> None:
    """Raise UsageError where `value` is none of `kinds`; `due` says in words what the argument `name` needs."""
    listed = kinds if isinstance(kinds, tuple) else (kinds,)
    if not isinstance(value, listed) or (isinstance(value, bool) and bool not in listed):
        said = quoted(value) if value is None or isinstance(value, bool | int | float | str) else type(value).__name__
        raise UsageError(f"{name} needs {due}, not {said}.")
