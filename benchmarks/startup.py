"""How long the whole process takes, against an interpreter that imports only the libraries it is built on.

Run: python benchmarks/startup.py [repetitions]. Prints the ratio of the fastest runs, for the command of the README and
for one that prints a table. Processes take turns, so that a busy machine slows all of them alike.
"""

import os
import subprocess
import sys
import time
from pathlib import Path

PYTHON = sys.executable
MEMCALC = str(Path(PYTHON).with_name("memcalc"))
BASELINE = [PYTHON, "-c", "import typer, rich, pydantic"]
COMMANDS = {
    "memcalc gpus": [MEMCALC, "gpus"],
    "memcalc estimate --params 4B --batch 16": [MEMCALC, "estimate", "--params", "4B", "--batch", "16"],
}
# An installed package has its byte code beside it, so this one may have it too, whatever the shell says.
ENVIRONMENT = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}

BOUND = 1.3
"""The ratio that the project allows itself."""


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
        verdict = "" if best <= BOUND * baseline else f"  over {BOUND}"
        print(f"{best * 1000:6.0f} ms  x{best / baseline:.2f}  {name}{verdict}")


if __name__ == "__main__":
    main()
