"""The smallest device on which a job runs: where one is full, cached segments go back and the allocator tries again."""

from __future__ import annotations

from memcalc.allocator.caching import PAGE, OutOfDeviceMemory
from memcalc.allocator.conf import DEFAULT_CONF, AllocatorConf
from memcalc.allocator.events import JobEvents, RunEvents
from memcalc.allocator.simulation import Simulated, simulate

PRECISION = 1000
"""The answer is exact to one part in so many."""
NEAR = 4
"""How many such parts below what is reserved is tried first: most jobs need about what they reserve."""


def runs(job: JobEvents | RunEvents, capacity: int, conf: AllocatorConf = DEFAULT_CONF) -> bool:
    """Whether a job runs on a device of `capacity` bytes, CUDA context excluded."""
    try:
        simulate(job, conf, capacity)
    except OutOfDeviceMemory:
        return False
    return True


def smallest_capacity(job: JobEvents | RunEvents, unlimited: Simulated, conf: AllocatorConf = DEFAULT_CONF) -> int:
    """Bytes of the smallest device on which a job runs that is known without a limit, CUDA context excluded."""
    fails, works = unlimited.allocated // PAGE - 1, -(-unlimited.reserved // PAGE)
    close = max(1, works // PRECISION)
    middle = works - NEAR * close
    while works - fails > close:
        if middle <= fails:
            middle = (fails + works) // 2
        if runs(job, middle * PAGE, conf):
            works = middle
        else:
            fails = middle
        middle = (fails + works) // 2
    return works * PAGE
