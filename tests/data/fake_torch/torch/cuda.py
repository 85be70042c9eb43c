import os
from types import SimpleNamespace

_counters = {"allocated": 0, "reserved": 0}


def use(nbytes):
    """Have so many bytes allocated at once."""
    _counters["allocated"] = max(_counters["allocated"], nbytes)
    _counters["reserved"] = max(_counters["reserved"], nbytes * 11 // 10)


def is_available():
    return not os.environ.get("FAKE_TORCH_WITHOUT_GPU")


is_initialized = is_available


def synchronize():
    pass


def max_memory_allocated():
    return _counters["allocated"]


def max_memory_reserved():
    return _counters["reserved"]


def reset_peak_memory_stats():
    _counters["allocated"] = 0


def memory_reserved():
    return _counters["reserved"]


def current_device():
    return 0


def get_device_name(device):
    return "NVIDIA H100 80GB HBM3"


def mem_get_info():
    return 10 * 2**30, 80 * 2**30


def memory_snapshot():
    block = {"state": "active_allocated", "requested_size": 32 * 2**20}
    return [{"blocks": [block, block, {"state": "inactive", "requested_size": 0}]}]


memory = SimpleNamespace()
