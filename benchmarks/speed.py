"""How fast the library is: python benchmarks/speed.py

One estimate of a 70B model that no earlier one helps (goal: under 5 ms), and ten thousand setups in one process (goal:
under 20 s); a sweep of as many on all processors (goal: under 20 s with two). `startup.py` times the whole command.
"""

import subprocess
import sys
import time
from itertools import islice, product

from memcalc import TrainingSetup, canonical_spec, estimate


def fresh_estimates() -> float:
    """Fastest estimate of a 70B model that no earlier one helps, in seconds."""
    spec, _ = canonical_spec(70 * 10**9)
    estimate(spec, TrainingSetup())
    best = float("inf")
    for batch in range(1, 40):
        start = time.perf_counter()
        estimate(spec, TrainingSetup(batch=batch, seq_len=1000 + batch))
        best = min(best, time.perf_counter() - start)
    return best


def ten_thousand() -> float:
    """Seconds for 10,000 different setups of a 70B model: every option of a search for what fits."""
    spec, _ = canonical_spec(70 * 10**9)
    grid = product(
        range(1, 17),
        (512, 1024, 2048, 4096, 8192),
        ("bf16", "mixed-bf16", "fp32"),
        ("none", "full"),
        ("sdpa", "eager"),
        (1, 8),
        ("adamw", "sgd", "sgd-momentum", "adafactor"),
        ("foreach", "for-loop"),
    )
    start = time.perf_counter()
    count = 0
    for batch, length, precision, checkpointing, attention, accumulation, optimizer, implementation in islice(
        grid, 10_000
    ):
        setup = TrainingSetup(
            batch=batch,
            seq_len=length,
            precision=precision,
            activation_checkpointing=checkpointing,
            attention=attention,
            grad_accum=accumulation,
            optimizer=optimizer,
            optimizer_impl=implementation,
        )
        estimate(spec, setup)
        count += 1
    assert count == 10_000
    return time.perf_counter() - start


def ten_thousand_on_all_processors() -> float:
    """Seconds of `memcalc sweep` for 9,600 of them, the start of the command and of its processes included."""
    options = {
        "--batch": "1..10",
        "--seq-len": "512..8192*2",
        "--precision": "bf16,mixed-bf16,fp32",
        "--activation-checkpointing": "none,full",
        "--attention": "sdpa,eager",
        "--grad-accum": "1,8",
        "--optimizer": "adamw,sgd,sgd-momentum,adafactor",
        "--optimizer-impl": "foreach,for-loop",
    }
    words = [word for option in options.items() for word in option]
    start = time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-m", "memcalc", "sweep", "70B", *words, "--json"], capture_output=True, text=True, check=True
    )
    assert done.stdout.count("\n") == 9_600
    return time.perf_counter() - start


if __name__ == "__main__":
    print(f"one estimate() of a 70B model        {fresh_estimates() * 1e3:8.2f} ms")
    print(f"ten thousand setups, one process     {ten_thousand():8.2f} s")
    print(f"a sweep of 9,600, all processors     {ten_thousand_on_all_processors():8.2f} s")
