"""The teacher of --objective distillation: a path, a model of the Hub, or a parameter count."""

from typing import TYPE_CHECKING

from memcalc.cli.read_model import read_model

if TYPE_CHECKING:
    from memcalc.models.spec import ModelSpec


def read_teacher(text: str) -> "ModelSpec":
    """The spec of the model that `text` names. Raises MemcalcError where it is no model."""
    return read_model(text, what="--teacher").spec()
