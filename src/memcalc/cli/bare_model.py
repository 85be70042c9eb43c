"""`memcalc MODEL`: the command that a model in the place of a command stands for."""

import os
import re

from memcalc.cli.model_argument import is_local
from memcalc.errors import MemcalcError

_HUB = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
_WEIGHTS = (".safetensors", ".gguf")
_RUN_FILES = (".yaml", ".yml", ".toml")
_SNIFFED = 1 << 20
"""Bytes of a JSON file in which a model's key is looked for."""


def meant_by(text: str) -> list[str] | None:
    """The words that `text` stands for before its options (`estimate --params 8B`); None where it is no model."""
    if os.path.exists(text):
        return ["from-file" if _is_model(text) else "from-config", text]
    if is_local(text):  # and not there, which its reader says
        return ["from-file", text]
    if text.lower().endswith(_RUN_FILES):
        return ["from-config", text]
    from memcalc.units import parse_parameters

    try:
        parse_parameters(text)
    except MemcalcError:
        return ["from-hub", text] if _HUB.fullmatch(text) else None
    return ["estimate", "--params", text]


def _is_model(path: str) -> bool:
    """Whether a path is a model's, not a file of a training or serving framework."""
    if os.path.isdir(path) or path.endswith(_WEIGHTS):
        return True
    if not path.endswith(".json"):
        return False
    try:
        with open(path, "rb") as file:
            head = file.read(_SNIFFED)
    except OSError:
        return True  # whose reader says what is wrong with it
    return b'"model_type"' in head or b'"_class_name"' in head or os.path.basename(path) == "config.json"
