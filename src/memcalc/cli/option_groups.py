"""Options that several commands share, as one argument of each."""

from collections.abc import Callable, Mapping, Sequence
from inspect import Parameter, signature
from typing import Any


def with_group(
    function: Callable[..., None], name: str, options: Sequence[Parameter], read: Callable[[Mapping[str, Any]], Any]
) -> Callable[..., None]:
    """A command that takes `options` in place of its keyword argument `name`, which is what `read` makes of them."""
    asked = signature(function)
    own = [parameter for parameter in asked.parameters.values() if parameter.name != name]

    def command(**values: Any) -> None:
        given = {option.name: values.pop(option.name) for option in options}
        function(**{name: read(given)}, **values)

    parameters = [*own, *options]
    command.__signature__ = asked.replace(parameters=parameters)  # type: ignore[attr-defined]
    command.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    command.__doc__ = function.__doc__
    return command
