"""Small damage to JSON values and to bytes, from a seeded source of chance."""

import json
from copy import deepcopy
from random import Random
from typing import Any

ODD: list[Any] = [
    None,
    True,
    False,
    0,
    -1,
    1,
    2,
    3,
    7,
    10**5,
    2**31,
    2**63,
    10**30,
    10**400,
    0.0,
    -0.5,
    0.3,
    1.5,
    1e300,
    float("nan"),
    float("inf"),
    "",
    "0",
    "12",
    "-3",
    "auto",
    "\x1b[2J\n",
    "\ud800",
    "a" * 3000,
    "(a+)+b",
    "../../etc/passwd",
    [],
    [None],
    [0],
    [1, 2, 3],
    ["q_proj"],
    [[]],
    {},
    {"a": 1},
    {"": {"": {}}},
]
"""Values that some reader somewhere does not expect."""


def mutated(random: Random, value: Any, changes: int | None = None) -> Any:
    """A copy of a JSON value with one to four changes somewhere in it."""
    copy = json.loads(json.dumps(value))
    for _ in range(changes or random.randint(1, 4)):
        copy = _changed(random, copy)
    return copy


def _changed(random: Random, value: Any) -> Any:
    if isinstance(value, dict) and value and random.random() < 0.9:
        key = random.choice(list(value))
        what = random.random()
        if what < 0.12:
            del value[key]
        elif what < 0.2:
            value[random.choice([*value, "".join(random.choices("abz_.\x00é", k=3))])] = deepcopy(value[key])
        elif what < 0.3:
            value[key] = deepcopy(value[random.choice(list(value))])
        else:
            value[key] = _changed(random, value[key])
        return value
    if isinstance(value, list) and value and random.random() < 0.7:
        index = random.randrange(len(value))
        if random.random() < 0.2:
            del value[index]
        elif random.random() < 0.2:
            value.insert(index, deepcopy(value[index]))
        else:
            value[index] = _changed(random, value[index])
        return value
    if type(value) is int and random.random() < 0.5:
        return random.choice([value + 1, value - 1, -value, value * 2, value // 2, value * 1000, f"{value}", [value]])
    return deepcopy(random.choice(ODD))


def mutated_bytes(random: Random, data: bytes) -> bytes:
    """A copy of `data` that is cut, has bytes changed, doubled, taken out or put in, one to four times."""
    found = bytearray(data)
    for _ in range(random.randint(1, 4)):
        at = random.randrange(len(found) + 1)
        what = random.random()
        if what < 0.15:
            del found[at:]
        elif what < 0.5 and found:
            found[min(at, len(found) - 1)] = random.choice([0, 1, 0x7F, 0x80, 0xFF, 0x22, 0x7B, random.randrange(256)])
        elif what < 0.65:
            del found[at : at + random.randint(1, 16)]
        elif what < 0.8:
            found[at:at] = found[at : at + random.randint(1, 64)]
        elif what < 0.9:
            found[at : at + 8] = random.choice([0, 1, 2**31, 2**32, 2**63, 2**64 - 1]).to_bytes(8, "little")
        else:
            found[at:at] = bytes(random.randrange(256) for _ in range(random.randint(1, 16)))
    return bytes(found)


def mutated_text(random: Random, text: str) -> str:
    """A copy of a config or script whose lines are swapped, doubled, taken out, or given other values."""
    lines = text.splitlines()
    for _ in range(random.randint(1, 4)):
        at = random.randrange(len(lines) or 1)
        what = random.random()
        if not lines or what < 0.1:
            lines.insert(at, random.choice(["- x", "a: &a [*a]", "<<: *x", "\t", "}", "x" * 5000, "---"]))
        elif what < 0.2:
            del lines[at]
        elif what < 0.3:
            lines.insert(at, random.choice(lines))
        elif what < 0.4:
            lines[at] = "  " + lines[at]
        else:
            key, separator, _ = lines[at].partition(random.choice([":", "=", " "]))
            lines[at] = f"{key}{separator} {json.dumps(random.choice(ODD))}"
    return "\n".join(lines)
