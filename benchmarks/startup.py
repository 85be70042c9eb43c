"""How long the whole process takes, against an interpreter that imports only the libraries it is built on.

Run: python benchmarks/startup.py [repetitions]. Prints the ratio of the fastest runs: for JSON, the box, a table,
and for the smallest program that uses the three: Typer reads one option into a pydantic model of one field, and Rich
prints a line. A bare import loads little of them (pydantic finds its classes when they are asked for), so what the
smallest program takes above it is theirs. Processes take turns, so that a busy machine slows all of them alike.
"""

import os
import subprocess
import sys
import time
from pathlib import Path

PYTHON = sys.executable
MEMCALC = str(Path(PYTHON).with_name("memcalc"))
BASELINE = [PYTHON, "-c", "import typer, rich, pydantic"]
SMALLEST = """
import typer
from pydantic import BaseModel
from rich.console import Console

class Setup(BaseModel):
    text: str = ''

def main(text: str = ''):
    Console().print(Setup(text=text).text)

typer.run(main)
"""
ESTIMATE = [MEMCALC, "estimate", "--params", "4B", "--batch", "16"]
COMMANDS = {
    "the smallest program": [PYTHON, "-c", SMALLEST],
    "memcalc gpus": [MEMCALC, "gpus"],
    "memcalc estimate --params 4B --batch 16 --json": [*ESTIMATE, "--json"],
    "memcalc estimate --params 4B --batch 16": ESTIMATE,
}
# An installed package has its byte code beside it, so this one may have it too, whatever the shell says.
ENVIRONMENT = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}

BOUNDS = {"memcalc estimate --params 4B --batch 16 --json": 1.6, "memcalc estimate --params 4B --batch 16": 2.0}
"""Ratios that the project would like, to the bare import; the smallest program alone takes about 2."""


def seconds(command: list[str]) -> float:
    """Wall-clock time of one run."""
    start = time.perf_counter()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, env=ENVIRONMENT)
    return time.perf_counter() - start


def main() -> None:
    """Time every command in turn and print the ratios to the baseline."""
    repetitions = int(sys.argv[1]) if len(sys.argv) > 1 else 20
    times: dict[str, list[float]] = {"baseline": [], **{name: [] for name in COMMANDS}}
    for _ in range(repetitions):
        for name, command in {"baseline": BASELINE, **COMMANDS}.items():
            times[name].append(seconds(command))
    baseline = min(times["baseline"])
    print(f"{baseline * 1000:6.0f} ms        python -c 'import typer, rich, pydantic'")
    for name in COMMANDS:
        best = min(times[name])
        bound = BOUNDS.get(name)
        verdict = "" if bound is None or best <= bound * baseline else f"  over {bound}"
        print(f"{best * 1000:6.0f} ms  x{best / baseline:.2f}  {name}{verdict}")


if __name__ == "__main__":
    main()
