"""A command as the parser sees it: options in groups in its help, and no detour for values that are plain text."""

from collections.abc import Callable
from functools import partial
from typing import Any

from typer.core import TyperCommand

from memcalc.errors import UsageError
from memcalc.render.terminal_text import visible


class PlainCommand(TyperCommand):
    """A command whose options all take text or are flags; the text is read by `memcalc.cli.options`, not by Typer."""

    def parse_args(self, ctx: Any, args: list[str]) -> Any:
        """Parse the line; an option of another tool is answered by its meaning, one that is near by its name."""
        typed = list(args)
        try:
            return super().parse_args(ctx, args)
        except Exception as problem:
            unknown = getattr(problem, "option_name", None)
            if type(problem).__name__ != "NoSuchOption" or not isinstance(unknown, str):
                raise
            options = [
                name for parameter in self.get_params(ctx) for name in (*parameter.opts, *parameter.secondary_opts)
            ]
            raise UsageError(_no_such_option(unknown, typed, options, ctx.command_path)) from None

    def get_params(self, ctx: Any) -> Any:
        """All parameters, the help option among them."""
        return without_coercion(super().get_params(ctx))

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Arguments and options under the headings that they were declared with."""
        sections: dict[str, list[tuple[str, str]]] = {}
        for parameter in self.get_params(ctx):
            record = parameter.get_help_record(ctx)
            if record is not None:
                general = "Arguments" if parameter.param_type_name == "argument" else "Other options"
                heading = getattr(parameter, "rich_help_panel", None) or general
                name = record[0].replace(" <list[str]>", "")  # Typer's word for "several"
                sections.setdefault(heading, []).append((name, *record[1:]))
        for heading, records in sections.items():
            with formatter.section(heading):
                formatter.write_dl(records)


def _no_such_option(unknown: str, typed: list[str], options: list[str], command: str) -> str:
    from difflib import get_close_matches  # only an error pays for these

    from memcalc.cli.other_tools import answered

    sentence = answered(typed, options)
    if sentence is not None:
        return sentence
    near = get_close_matches(unknown.lower(), options, n=2, cutoff=0.75) if unknown.startswith("--") else []
    meant = f"; did you mean {' or '.join(near)}?" if near else ";"
    return f"No such option: {visible(unknown)}{meant} `{command} --help` lists the options."


def without_coercion(parameters: list[Any]) -> list[Any]:
    """`parameters`, which from now on let text and flags through as they are.

    Typer builds a pydantic adapter for every option of a command, given or not; that alone takes longer than an
    estimate. Nothing has to be coerced here, so the adapters are not missed.
    """
    for parameter in parameters:
        if "process_value" not in vars(parameter):
            parameter.process_value = partial(_process, parameter, parameter.process_value)
    return parameters


def _process(parameter: Any, coerce: Callable[[Any, Any], Any], ctx: Any, value: Any) -> Any:
    if not isinstance(value, (str, bool)) and (value is not None or parameter.required):
        return coerce(ctx, value)
    return value if parameter.callback is None else parameter.callback(ctx, parameter, value)


_LINE = "memcalc.command_line"


class CommandWithLine(PlainCommand):
    """A command that another command line may follow, behind `--`: it is kept as it is."""

    def parse_args(self, ctx: Any, args: list[str]) -> Any:
        """The words before the first `--`; those behind it are for `command_line`."""
        if "--" in args:
            place = args.index("--")
            ctx.meta[_LINE] = args[place + 1 :]
            args = args[:place]
        return super().parse_args(ctx, args)


def command_line(ctx: Any) -> list[str]:
    """The words behind `--`."""
    found: list[str] = ctx.meta.get(_LINE, [])
    return found
