"""A command as the parser sees it: an unknown option is answered by its meaning or by the names near to it."""

from collections.abc import Sequence
from typing import Any

import typer
from typer.core import TyperCommand

from memcalc.errors import UsageError
from memcalc.render.terminal_text import visible

WORDS = "memcalc.words"
"""Where the context keeps the words of the line that a command is made for; absent where it has all its options."""


class Command(TyperCommand):
    """A command that knows the options of other tools."""

    def parse_args(self, ctx: Any, args: list[str]) -> Any:
        """Parse the line; an option of another tool is answered by its meaning, one that is near by its name."""
        typed = list(args)
        try:
            return super().parse_args(ctx, args)
        except typer.TyperException:
            if ctx.meta.pop(WORDS, None) is not None:  # the command with all its options says what is wrong
                return ctx.parent.command.get_command(ctx.parent, ctx.info_name).parse_args(ctx, typed)
            options = [
                name for parameter in self.get_params(ctx) for name in (*parameter.opts, *parameter.secondary_opts)
            ]
            unknown = _first_unknown(typed, options)
            if unknown is None:
                raise
            raise UsageError(_no_such_option(unknown, typed, options, ctx)) from None

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Print the options in panels."""
        from memcalc.cli.help_panels import print_help  # only help pays for Rich

        print_help(self, ctx)


def _first_unknown(typed: Sequence[str], options: Sequence[str]) -> str | None:
    """The first word that looks like an option and is none; a value may look so too, but then nothing was refused."""
    for word in typed:
        if word == "--":
            return None
        name = word.partition("=")[0]
        if name.startswith("--"):
            if name not in options:
                return name
        elif word.startswith("-") and word[:2] not in options and not word[1:2].isdigit() and len(word) > 1:
            return word[:2]
    return None


def _no_such_option(unknown: str, typed: Sequence[str], options: Sequence[str], ctx: Any) -> str:
    from difflib import get_close_matches  # only an error pays for these

    from memcalc.cli.other_tools import answered

    sentence = answered(typed, options)
    if sentence is not None:
        return sentence
    owners = " and ".join(f"`memcalc {name}`" for name in _with_option(unknown, ctx.parent))
    if owners:
        return f"{unknown} is an option of {owners}, which `{ctx.command_path}` does not have; leave it out."
    near = get_close_matches(unknown.lower(), options, n=2, cutoff=0.75) if unknown.startswith("--") else []
    meant = f"; did you mean {' or '.join(near)}?" if near else ";"
    return f"No such option: {visible(unknown)}{meant} `{ctx.command_path} --help` lists the options."


def _with_option(name: str, program: Any) -> list[str]:
    """The commands of `program` that have an option of this name."""
    found = []
    for command in () if program is None else program.command.list_commands(program):
        parameters = program.command.get_command(program, command).params
        if any(name in parameter.opts for parameter in parameters if not getattr(parameter, "hidden", False)):
            found.append(command)
    return found


_LINE = "memcalc.command_line"


class CommandWithLine(Command):
    """A command that another command line may follow, behind `--`: it is kept as it is."""

    def parse_args(self, ctx: Any, args: list[str]) -> Any:
        """The words before the first `--`; those behind it are for `command_line`."""
        if "--" in args:
            place = args.index("--")
            ctx.meta[_LINE] = args[place + 1 :]
            args = args[:place]
        return super().parse_args(ctx, args)


def command_line(ctx: typer.Context) -> list[str]:
    """The words behind `--`."""
    found: list[str] = ctx.meta.get(_LINE, [])
    return found
