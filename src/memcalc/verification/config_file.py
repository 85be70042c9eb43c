"""Where memcalc keeps what it measured on a machine."""

import os
import sys


def calibration_path() -> str:
    """The file of calibrations in the user's config directory, as the system has it."""
    if sys.platform == "win32":
        base = os.environ.get("APPDATA") or os.path.expanduser("~/AppData/Roaming")
    else:
        base = os.environ.get("XDG_CONFIG_HOME") or os.path.expanduser("~/.config")
    return os.path.join(base, "memcalc", "calibration.json")
