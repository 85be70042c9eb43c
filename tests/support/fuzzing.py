"""Mutated inputs of every kind, each within a budget of time and memory; what comes out must hold together.

`tests/fuzz` runs every kind for some seconds. For as long as one likes, from the root of the repository:

    PYTHONPATH=tests python -m support.fuzzing --seconds 600 --seed 7 [kind ...]
"""

import argparse
import resource
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

from support.fuzz_inputs import KINDS, Kind

SECONDS, MEGABYTES = 5.0, 300
"""What one input may take of processor time and of memory beyond what was in use before."""

LONGEST_MESSAGE, LONGEST_SHOWN = 700, 2500


@dataclass
class Found:
    """What a run of one kind came to: `faults` are inputs with what is wrong about them."""

    kind: str
    seed: int
    inputs: int = 0
    answered: int = 0
    refused: int = 0
    slowest: float = 0.0
    faults: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        return (
            f"{self.kind} (seed {self.seed}): {self.inputs} inputs, {self.answered} answered, {self.refused} refused, "
            f"slowest {self.slowest:.2f} s, {len(self.faults)} faults"
        )


class OverBudget(BaseException):
    """An input took too long."""


def fuzz(kind: str, seconds: float, seed: int) -> Found:
    """Mutated inputs of `kind` for so many seconds of processor time, and a few times as long where others have it."""
    found, random = Found(kind, seed), Random(f"{kind} {seed}")
    end, latest = time.process_time() + seconds, time.monotonic() + 8 * seconds
    with tempfile.TemporaryDirectory() as place:
        while time.process_time() < end and time.monotonic() < latest and len(found.faults) < 20:
            state = random.getstate()
            folder = Path(place) / str(found.inputs)
            folder.mkdir()
            _one(KINDS[kind], random, folder, found)
            if found.faults and not found.faults[-1].endswith("\n"):
                found.faults[-1] += f"\n  input {found.inputs} of seed {seed}, state {hash(state)}\n"
            _removed(folder)
    return found


def _one(kind: Kind, random: Random, folder: Path, found: Found) -> None:
    began, before = time.process_time(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    found.inputs += 1
    try:
        with _limited(2 * SECONDS):
            said = kind(random, folder)
        found.answered += not said
        found.refused += bool(said)
        if said and not (said.isprintable() and said.endswith((".", "?")) and len(said) < LONGEST_MESSAGE):
            found.faults.append(f"a message that is no sentence: {said!r}{_shown(folder)}")
    except OverBudget:
        found.faults.append(f"over {2 * SECONDS} seconds{_shown(folder)}")
    except Exception as problem:  # whatever it is, it should not have been
        place = traceback.extract_tb(problem.__traceback__)[-1]
        found.faults.append(f"{type(problem).__name__}: {problem} ({place.name}, line {place.lineno}){_shown(folder)}")
    took = time.process_time() - began
    found.slowest = max(found.slowest, took)
    if took > SECONDS:
        found.faults.append(f"{took:.1f} seconds{_shown(folder)}")
    if (grown := (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024) > MEGABYTES:
        found.faults.append(f"{grown:.0f} MB{_shown(folder)}")


@contextmanager
def _limited(seconds: float) -> Iterator[None]:
    def over(*_: object) -> None:
        raise OverBudget

    # Of processor time, as other programs may have the processor; again and again, as a finalizer would ignore it.
    before = signal.signal(signal.SIGPROF, over)
    signal.setitimer(signal.ITIMER_PROF, seconds, 0.01)
    hook, sys.unraisablehook = sys.unraisablehook, lambda _: None
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)
        sys.unraisablehook = hook


def _shown(folder: Path) -> str:
    texts = [
        f"\n    {path.name}: {path.read_bytes()[:LONGEST_SHOWN]!r}"
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    ]
    return "".join(texts)


def _removed(folder: Path) -> None:
    for path in sorted(folder.rglob("*"), reverse=True):
        path.rmdir() if path.is_dir() and not path.is_symlink() else path.unlink()
    folder.rmdir()


def main() -> None:
    """Run kinds by hand and print what was found."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, default=60.0, help="for each kind")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("kinds", nargs="*", choices=[*KINDS, []])
    asked = parser.parse_args()
    for kind in asked.kinds or KINDS:
        found = fuzz(kind, asked.seconds, asked.seed)
        print(found, *found.faults, sep="\n", flush=True)


if __name__ == "__main__":
    main()
