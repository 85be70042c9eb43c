"""What the argument of a command for models outside names: something on disk or a model of the Hub."""

import os


def is_local(text: str) -> bool:
    """Whether `text` names something on disk, there or not, and no model of the Hub."""
    return os.path.lexists(text) or text.startswith((".", os.sep)) or text.endswith((".json", ".safetensors", ".gguf"))


def short_name(path: str) -> str:
    """What to call the model at `path`: its folder's name, or the file's own where it is not called config.json."""
    whole = os.path.abspath(path)
    if os.path.basename(whole) == "config.json":
        whole = os.path.dirname(whole)
    return os.path.basename(whole) or "model"
