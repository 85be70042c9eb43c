"""Where things lie in this repository."""

from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SOURCE = ROOT / "src" / "memcalc"
DATA = ROOT / "tests" / "data"
