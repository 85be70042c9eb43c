"""A memory snapshot on disk, read as plain containers."""

from __future__ import annotations

import os
import stat
from typing import Any

from memcalc.common.escaping import quoted
from memcalc.errors import ConfigError
from memcalc.sources.plain_pickle import LARGEST, loads


def load_snapshot(path: str) -> Any:
    """The value of the pickle at `path`. Raises ConfigError where it cannot be read, is too large or is not plain."""
    try:
        found = os.stat(path)
        if not stat.S_ISREG(found.st_mode):
            raise ConfigError(
                f"{quoted(path)} is no file; --snapshot takes what torch.cuda.memory._dump_snapshot wrote."
            )
        if found.st_size > LARGEST:
            raise ConfigError(
                f"{quoted(path)} is larger than {LARGEST >> 20} MiB; record fewer events (max_entries of "
                "torch.cuda.memory._record_memory_history)."
            )
        with open(path, "rb") as file:
            data = file.read(LARGEST + 1)
    except (OSError, ValueError) as problem:
        reason = getattr(problem, "strerror", None) or "no name of a file"
        raise ConfigError(f"{quoted(path)} cannot be read ({reason}); give the file of a memory snapshot.") from None
    return loads(data)
