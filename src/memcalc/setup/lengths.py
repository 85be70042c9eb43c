"""Batches of many lengths: what `--lengths` says, and how long each micro-batch of a run is."""

from __future__ import annotations

import re
from functools import lru_cache
from typing import TYPE_CHECKING

from memcalc.common.escaping import quoted
from memcalc.errors import UsageError
from memcalc.setup.defaults import LONGEST

if TYPE_CHECKING:
    from memcalc.setup.setup import TrainingSetup

Kind = tuple[int, int, int]
"""Lengths from one to another, drawn evenly, and how many sequences have one of them."""

MOST_MICRO_BATCHES = 500
"""Micro-batches of a run that are simulated at most."""

MOST_LENGTHS = 128
"""Different lengths of micro-batches at most: each has to be traced."""

_FILE = re.compile(r"[/\\]|[0-9A-Za-z_)-]\.[A-Za-z]\w*$")
"""What looks like the path of a file."""
_ITEM = re.compile(r"([0-9]{1,8})(?:\.\.([0-9]{1,8})|x([0-9]{1,9}))?")


def parse_lengths(text: str) -> tuple[Kind, ...]:
    """What `--lengths` says: `512..4096`, or lengths with commas, each with how often it comes (`512x30,700`).

    Raises UsageError.
    """
    kinds = []
    for item in re.sub(r"\s", "", text).split(","):
        match = _ITEM.fullmatch(item)
        if match is None:
            if _FILE.search(item):
                raise UsageError(f"--lengths {quoted(text[:80])} is no file that can be read; check its path.")
            raise UsageError(
                f"--lengths {quoted(text[:80])} is neither a range of tokens, such as 512..4096, nor lengths with "
                "commas, nor the path of a file with one length a line."
            )
        low, high, count = match.groups()
        kind = int(low), int(high or low), int(count or 1)
        if kind[1] < kind[0]:
            raise UsageError(f"--lengths {quoted(item)} is a range backwards; write {kind[1]}..{kind[0]}.")
        if not 1 <= kind[0] <= kind[1] <= LONGEST or not kind[2]:
            raise UsageError(f"--lengths {quoted(item)} has no sequence of 1 to {LONGEST:,} tokens in it.")
        kinds.append(kind)
    return tuple(kinds)


def said(text: str) -> str:
    """The distribution that `--lengths` names, in words."""
    kinds = parse_lengths(text)
    low, high = min(kind[0] for kind in kinds), max(kind[1] for kind in kinds)
    if len(kinds) == 1:
        return f"drawn evenly from {low:,} to {high:,} tokens" if low < high else f"of {low:,} tokens"
    return f"drawn from {sum(kind[2] for kind in kinds):,} given lengths of {low:,} to {high:,} tokens"


def drawn_lengths(setup: TrainingSetup) -> tuple[tuple[int, ...], ...]:
    """Tokens of every micro-batch of every step of a run with `--lengths`: the longest of its sequences, padded.

    Raises UsageError where that is more than can be simulated.
    """
    assert setup.lengths is not None
    counts = setup.max_steps, setup.grad_accum, setup.sequences
    return _drawn(setup.lengths, counts, setup.pad_to_multiple_of, setup.seed)


@lru_cache(maxsize=8)
def _drawn(text: str, counts: tuple[int, int, int], multiple: int, seed: int) -> tuple[tuple[int, ...], ...]:
    from random import Random  # only runs of many lengths pay for it

    kinds = parse_lengths(text)
    weights = [count for _, _, count in kinds]
    random = Random(seed)
    steps, micro_batches, sequences = counts
    if steps * micro_batches > MOST_MICRO_BATCHES:
        raise UsageError(
            f"--max-steps {steps} are {steps * micro_batches:,} micro-batches of --lengths; {MOST_MICRO_BATCHES} are "
            "simulated at most: lower it."
        )

    def longest() -> int:
        chosen = random.choices(kinds, weights, k=sequences)
        return -(-max(random.randint(low, high) for low, high, _ in chosen) // multiple) * multiple

    run = tuple(tuple(longest() for _ in range(micro_batches)) for _ in range(steps))
    different = len({length for step in run for length in step})
    if different > MOST_LENGTHS:
        raise UsageError(
            f"the run has micro-batches of {different} different lengths; {MOST_LENGTHS} are simulated at most: round "
            "them with --pad-to-multiple-of, or lower --max-steps."
        )
    return run


def of_length(setup: TrainingSetup, length: int) -> TrainingSetup:
    """The same job with one length for all, in place of `--lengths`."""
    given = {name: getattr(setup, name) for name in setup.model_fields_set - {"lengths", "max_steps", "seed"}}
    return type(setup)(**(given | {"seq_len": length}))
