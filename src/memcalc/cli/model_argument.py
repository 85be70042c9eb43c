"""What the argument of a command for models outside names: something on disk or a model of the Hub."""

import os


def is_local(text: str) -> bool:
    """Whether `text` names something on disk, there or not, and no model of the Hub."""
    return os.path.lexists(text) or text.startswith((".", os.sep)) or text.endswith((".json", ".safetensors", ".gguf"))
