"""What can go wrong, said to the person at the prompt: what, why, and what to do next."""

from collections.abc import Iterable


class MemcalcError(Exception):
    """memcalc cannot answer (exit code 1). The message is one sentence for the user."""

    exit_code = 1


class UsageError(MemcalcError):
    """An option or argument makes no sense (exit code 2)."""

    exit_code = 2


class TooLongError(UsageError):
    """A sequence is longer than the model's table of learned positions, which has `longest`."""

    def __init__(self, message: str, longest: int) -> None:
        super().__init__(message)
        self.longest = longest


class TooShortError(UsageError):
    """A sequence is too short for what it must hold, such as the tokens of its images."""


class ConfigError(MemcalcError):
    """A config.json is missing, malformed, contradictory, or lacks a key."""


class UnknownFamilyError(MemcalcError):
    """No family describes this model_type."""


class CheckpointError(MemcalcError):
    """A checkpoint file cannot be read as what its name says."""


class UnsupportedPythonError(MemcalcError):
    """The interpreter does not count references as CPython does."""


class HubError(MemcalcError):
    """The Hub did not give what was asked for."""


def option_name(field: str) -> str:
    """The option of a field: `seq_len` is `--seq-len`."""
    return "--" + field.replace("_", "-")


def given_option(field: str, value: object) -> str:
    """The option as it was typed: a flag that is False is its `--no-`."""
    return option_name(f"no_{field}" if value is False else field)


def close_matches(word: str, known: Iterable[str]) -> str:
    """`"; did you mean 'a' or 'b'?"`, or an empty string when nothing known comes near `word`; case does not matter."""
    from difflib import get_close_matches  # costs milliseconds that only an error has to pay

    names = {name.lower(): name for name in known}
    near = get_close_matches(word.lower(), list(names), n=3, cutoff=0.5)
    return f"; did you mean {' or '.join(repr(names[name]) for name in near)}?" if near else ""
