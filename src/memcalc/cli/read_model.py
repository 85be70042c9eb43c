"""A model as one word: a path, a model of the Hub, or a parameter count."""

from typing import TYPE_CHECKING

from memcalc.cli.errors import warn
from memcalc.common.escaping import quoted
from memcalc.errors import UsageError

if TYPE_CHECKING:
    from memcalc.common.assumption import Assumption
    from memcalc.models.spec import ModelSpec


def read_model(text: str, what: str = "MODEL") -> tuple["ModelSpec", tuple["Assumption", ...]]:
    """The spec of the model that `text` names, and what is assumed of it; its config is all that counts.

    `what` names the argument in messages. Raises MemcalcError where it is no model.
    """
    from memcalc.cli.model_argument import is_local
    from memcalc.models.llama_shape import canonical_spec
    from memcalc.sources.display_names import short_name
    from memcalc.units import parse_parameters

    local = is_local(text)
    if not local and "/" not in text:
        try:
            spec, lines = canonical_spec(parse_parameters(text))
        except UsageError:
            raise UsageError(
                f"{what} cannot be {quoted(text)}: give a path, a model of the Hub such as ORG/NAME, or a parameter "
                "count such as 8B."
            ) from None
        return spec, tuple(lines)
    from memcalc.sources import load
    from memcalc.sources.model_spec import spec_of

    model = load(text, kind="file" if local else "hub", progress=warn)
    if model.components:
        from memcalc.sources.diffusers_spec import pipeline_spec

        return pipeline_spec(model, short_name(text) if local else model.name)
    return spec_of(model, short_name(text) if local else model.name, generic=False)
