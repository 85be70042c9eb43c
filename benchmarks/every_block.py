"""Tries the law that one block of a kind answers for the others on every measured model, deeper, with every option.

    python benchmarks/every_block.py [N]    tries one in N (default 1: all, a quarter of an hour)

Prints what differs; exits with 1 where anything does.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

from support.every_block import deep_jobs, differences, measured_jobs


def main() -> int:
    """Compare, print, and say whether anything differs."""
    every = int(sys.argv[1]) if len(sys.argv) > 1 else 1
    tried = answered = different = 0
    for jobs in (measured_jobs(), deep_jobs(every)):
        for name, job in jobs:
            numbers = differences(*job)
            tried += 1
            answered += numbers is not None
            if numbers:
                different += 1
                print(name, numbers, flush=True)
    print(f"{tried:,} setups, {answered:,} of them computed, {different:,} differ")
    return 1 if different else 0


if __name__ == "__main__":
    sys.exit(main())
