"""The smallest device on which a job runs: where one is full, cached segments go back and the allocator tries again."""

from __future__ import annotations

from memcalc.allocator.caching import PAGE, OutOfDeviceMemory
from memcalc.allocator.conf import DEFAULT_CONF, AllocatorConf
from memcalc.allocator.events import JobEvents, RunEvents
from memcalc.allocator.simulation import Simulated, simulate

PRECISION = 1000
"""The answer is exact to one part in so many."""


def reserved_on(job: JobEvents | RunEvents, capacity: int, conf: AllocatorConf = DEFAULT_CONF) -> int:
    """What a job reserves on a device of `capacity` bytes, CUDA context excluded; more than that where it fails.

    That is then what the request that failed would have needed.
    """
    try:
        return simulate(job, conf, capacity).reserved
    except OutOfDeviceMemory as full:
        return max(full.needed, capacity + 1)


def runs(job: JobEvents | RunEvents, capacity: int, conf: AllocatorConf = DEFAULT_CONF) -> bool:
    """Whether a job runs on a device of `capacity` bytes, CUDA context excluded."""
    return reserved_on(job, capacity, conf) <= capacity


def smallest_capacity(job: JobEvents | RunEvents, unlimited: Simulated, conf: AllocatorConf = DEFAULT_CONF) -> int:
    """Bytes of the smallest device on which a job runs that is known without a limit, CUDA context excluded."""
    fails, works = unlimited.allocated // PAGE - 1, -(-unlimited.reserved // PAGE)
    close = max(1, works // PRECISION)
    while works - fails > close:
        middle = (fails + works) // 2
        if runs(job, middle * PAGE, conf):
            works = middle
        else:
            fails = middle
    return works * PAGE
