"""Read a JSON object that somebody else wrote: config.json, an index, an adapter's config."""

import json
from collections.abc import Callable
from typing import Any

from memcalc.errors import ConfigError, MemcalcError
from memcalc.sources.display_names import shown

# The largest text file that is read whole, bytes. The biggest index files in public repositories are about 10 MB.
TEXT_CAP = 100_000_000

# More keys and values than any such file has: the index of the largest model names 207,000 tensors.
MOST_KEYS, MOST_VALUES = 500_000, 2_000_000

_KINDS = {list: "list", str: "string", int: "number", float: "number", bool: "true or false", type(None): "null"}
"""What JSON calls the values that are no objects."""


def parse_object(
    data: bytes, name: str, error: type[MemcalcError] = ConfigError, *, most_keys: int = MOST_KEYS
) -> dict[str, Any]:
    """The object in `data`; `name` is the file's, for messages.

    A byte order mark, `NaN` and `Infinity` are accepted: published configs have them. A key given twice is not,
    because two readers would take different values.

    Raises:
        error: `data` is not UTF-8, not JSON, not an object, repeats a key, or holds more than `most_keys` of them.
    """
    if not data.strip():
        raise error(f"{shown(name)} is empty: download it again.")
    if data.lstrip()[:1] == b"<":
        raise error(f"{shown(name)} holds a web page instead of JSON: an address, a proxy or a login page was saved.")
    if data.startswith(b"version https://git-lfs"):
        raise error(f"{shown(name)} is a Git LFS pointer, not the file itself: run `git lfs pull` in its folder.")
    if data.count(b":") > most_keys or data.count(b",") > MOST_VALUES:
        raise error(f"{shown(name)} holds more keys or values than any model's: it is not the file that it should be.")
    try:
        value = json.loads(data.decode("utf-8-sig"), object_pairs_hook=_unique(name, error))
    except UnicodeDecodeError:
        raise error(f"{shown(name)} is not UTF-8 text: it is damaged or not a JSON file.") from None
    except RecursionError:
        raise error(f"{shown(name)} is nested too deeply to be read: it is damaged.") from None
    except json.JSONDecodeError as problem:
        what = problem.msg.removesuffix(" at")
        where = f"line {problem.lineno}, column {problem.colno}"
        raise error(f"{shown(name)} is not valid JSON ({what} at {where}): correct or download it again.") from None
    except ValueError:  # an integer of more digits than Python converts
        raise error(f"{shown(name)} holds a number of thousands of digits: it is damaged.") from None
    if not isinstance(value, dict):
        raise error(
            f"{shown(name)} holds a JSON {_KINDS[type(value)]} where an object is needed: is it the right file?"
        )
    return value


def _unique(name: str, error: type[MemcalcError]) -> Callable[[list[tuple[str, Any]]], dict[str, Any]]:
    def collect(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) != len(pairs):
            seen: set[str] = set()
            twice = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
            raise error(f"{shown(name)} has the key '{shown(twice)}' twice: remove one of them.")
        return found

    return collect
