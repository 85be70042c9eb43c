"""The program `memcalc`: its commands, which are imported when they run, and its answer to errors."""

from importlib import import_module
from typing import Annotated, Any

import typer
from typer.core import TyperGroup
from typer.main import get_command as build

from memcalc.cli.errors import plainly, unknown_command, warn
from memcalc.cli.parser import WORDS, Command

COMMANDS = {
    "estimate": "Estimate a model that exists only as a parameter count or as shape numbers.",
    "from-file": "Estimate the model of a config.json, or of a folder that holds one.",
    "from-hub": "Estimate a model of the Hugging Face Hub; no weights are downloaded.",
    "from-config": "Estimate the run of a training or serving framework's files or launch line.",
    "fit": "Find the largest job that fits a GPU, and the smallest GPU for the job.",
    "compare": "Estimate several models, or ways to train one, side by side.",
    "sweep": "Estimate one model under many setups.",
    "explain": "Show the tensors that are alive at the peak, what made them and why they are there.",
    "trace": "List what a step allocates, tensor by tensor.",
    "timeline": "Draw the memory of one step over time.",
    "verify": "Run your own script for a few steps, and lay its real peaks beside the estimate.",
    "calibration": "Show what verify measured on this machine.",
    "inspect": "Show what memcalc understands of a model: family, shapes, parameters.",
    "gpus": "List the GPUs that --gpu knows.",
    "optimizers": "List the optimizers that --optimizer knows.",
    "families": "List the model families.",
    "help": "Explain a topic: precision, checkpointing, lora, sharding, serving, pictures, run-files.",
    "schema": "Print the JSON Schema of what --json prints.",
}
"""Every command and what it does. Its function is `command` in the module of its name in this package."""

HELP = ("-h", "--help")


class Program(TyperGroup):
    """A group that imports a command when it is wanted, so that start-up costs what the command at hand needs."""

    def list_commands(self, ctx: Any) -> list[str]:
        """The names of all commands, in the order of the help."""
        return list(COMMANDS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """The command of this name, or None."""
        if cmd_name not in COMMANDS:
            return None
        module = import_module(f"memcalc.cli.commands.{cmd_name.replace('-', '_')}")
        function = module.command
        if hasattr(function, "taking"):
            function = function.taking(ctx.meta.get(WORDS))
        single = typer.Typer(add_completion=False, rich_markup_mode="rich", pretty_exceptions_enable=False)
        single.command(cmd_name, cls=getattr(module, "COMMAND_CLASS", Command))(function)
        return build(single)

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Print the options and the commands, without importing any of these."""
        from memcalc.cli.help_panels import print_help

        print_help(self, ctx, COMMANDS)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """The command that `args` begins with, or that a model in its place stands for.

        Anything else is a usage error that names the close matches.
        """
        if args and args[0] not in COMMANDS and not args[0].startswith("-") and not ctx.resilient_parsing:
            from memcalc.cli.bare_model import meant_by
            from memcalc.cli.files import command_line

            words = meant_by(args[0])
            if words is None:
                raise unknown_command(args[0], COMMANDS)
            args = [*words, *args[1:]]
            warn(" ".join(command_line(args)))
        words_of_line = frozenset(word.partition("=")[0] for word in args)
        if not ctx.resilient_parsing and words_of_line.isdisjoint(HELP):
            ctx.meta[WORDS] = words_of_line
        return super().resolve_command(ctx, args)

    def make_context(self, *args: Any, **kwargs: Any) -> Any:
        """Parse the options before the command."""
        with plainly():
            return super().make_context(*args, **kwargs)

    def invoke(self, ctx: Any) -> Any:
        """Run the command; what goes wrong is told in one sentence on stderr, with the exit code of its kind."""
        with plainly(ctx):
            return super().invoke(ctx)


app = typer.Typer(
    cls=Program,
    invoke_without_command=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": list(HELP)},
)


def _print_version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        typer.echo(f"memcalc {version('gpu-memcalc')}")
        raise typer.Exit


@app.callback()
def memcalc(
    ctx: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and leave.")
    ] = False,
) -> None:
    """How much GPU memory a transformer job needs: the tensors that PyTorch really keeps, without torch or a GPU."""
    if ctx.invoked_subcommand is None:
        ctx.get_help()  # Rich prints it
