"""The README's code blocks."""

import re

from support.paths import ROOT

README = (ROOT / "README.md").read_text(encoding="utf-8")
BLOCKS: list[tuple[str, str]] = re.findall(r"```(\w*)\n(.*?)```", README, re.DOTALL)
"""Language and text of each."""
