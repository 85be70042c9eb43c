"""A command that takes the options of a job: those of its setup, the GPU's, and the answer's."""

from collections.abc import Callable, Collection, Sequence
from inspect import signature
from typing import Any

from memcalc.cli.job import Request
from memcalc.cli.job_options import job_options, output_options
from memcalc.cli.option_groups import Group, is_named
from memcalc.cli.options import declared

_BOTH = "width"
"""The option that is the picture's width for a denoiser, and the box's for all other models."""

_FIRST = ("mode", "gpu", "check")
"""Options that everyone wants."""


class JobCommand:
    """A command with the setup, GPU and output options beside its own: its function gets them as keyword `job`.

    A function with a `request` in its place gets them unread: it knows the mode and more options itself.

    Args:
        function: the command, with its own arguments and options.
        without: options that its help does not list: it refuses them in a sentence.
        groups: further options, which the function gets as one argument a group.
    """

    def __init__(self, function: Callable[..., None], without: Sequence[str] = (), groups: Sequence[Group] = ()):
        self.function = function
        self.without = without
        self.groups = groups

    def taking(self, words: Collection[str] | None) -> Callable[..., None]:
        """The function that Typer makes a command of.

        Typer prepares each option of a command at some cost, and a line names few of 150: for the words of a line the
        function takes the options that they name, and for None, as help needs it, all of them.
        """
        asked = signature(self.function).parameters
        groups = [(group, group.options()) for group in self.groups]
        others = {"job", "request", *(group.name for group in self.groups)}
        own = [parameter for parameter in asked.values() if parameter.name not in others]
        grouped = [
            option for _, options in groups for option in options if words is None or is_named(option.name, words)
        ]
        fields = [option for option in declared().values() if option.name != _BOTH]
        of_setup = [option.parameter() for option in fields if words is None or is_named(option.name, words)]
        shared = [*job_options(), *output_options()]
        chosen = {parameter.name: parameter.default for parameter in shared}
        shared = [parameter for parameter in shared if words is None or is_named(parameter.name, words)]
        for parameter in shared:
            if parameter.name in self.without:
                (info,) = parameter.annotation.__metadata__
                info.hidden = True

        def command(**values: Any) -> None:
            given = {field.name: values.pop(field.name, None) for field in fields}
            of_job = {name: values.pop(name, default) for name, default in chosen.items()}
            request = Request(of_job.pop("mode"), given, of_job)
            for group, options in groups:
                values[group.name] = group.read({one.name: values.pop(one.name, one.default) for one in options})
            if "request" in asked:
                self.function(request=request, **values)
            else:
                self.function(job=request.read(), **values)

        shared.sort(key=lambda parameter: parameter.name not in _FIRST)
        first = sum(parameter.name in _FIRST for parameter in shared)
        parameters = [*own, *grouped, *shared[:first], *of_setup, *shared[first:]]
        command.__signature__ = signature(self.function).replace(parameters=parameters)  # type: ignore[attr-defined]
        command.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
        command.__doc__ = self.function.__doc__
        return command


def with_job(
    *, without: Sequence[str] = (), groups: Sequence[Group] = ()
) -> Callable[[Callable[..., None]], JobCommand]:
    """Give a command the options of a job: see JobCommand."""
    return lambda function: JobCommand(function, without, groups)
