"""Help as Rich shows it: options in panels, each on a line with what it takes, and what it means below or beside it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from memcalc.cli.output import console

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.text import Text

BROAD = 110
"""Columns from which on the meaning stands beside the option."""
WIDEST = 140
"""Longer lines are hard to read."""


def print_help(command: Any, ctx: Any, commands: Mapping[str, str] | None = None) -> None:
    """Print the help of a command, with the list of its own `commands` where it has any."""
    from rich.padding import Padding
    from rich.text import Text

    out = console()
    out.width = min(out.width, WIDEST)
    out.print(Padding(Text(command.get_usage(ctx), style="bold"), (1, 1)))
    for paragraph in (command.help or "").split("\n\n"):
        out.print(Padding(Text(" ".join(paragraph.split())), (0, 1, 1, 1)))
    for title, parameters in _by_panel(command.get_params(ctx)).items():
        _print_panel(out, title, [(_names(parameter), _meaning(parameter)) for parameter in parameters])
    if commands:
        rows = [(Text(name, style="bold cyan"), Text(text)) for name, text in commands.items()]
        _print_panel(out, "Commands", rows, beside=True)


def _by_panel(parameters: Iterable[Any]) -> dict[str, list[Any]]:
    panels: dict[str, list[Any]] = {}
    for parameter in parameters:
        if not getattr(parameter, "hidden", False):
            other = "Arguments" if parameter.param_type_name == "argument" else "Help"
            panels.setdefault(getattr(parameter, "rich_help_panel", None) or other, []).append(parameter)
    panels.update({"Help": panels.pop("Help", [])})  # last
    return {title: held for title, held in panels.items() if held}


def _names(parameter: Any) -> Text:
    """The option, and what it takes: `--batch N`; `--dora, --no-dora` where it can be turned off."""
    from rich.text import Text

    if parameter.param_type_name == "argument":
        return Text(parameter.metavar or parameter.name, style="bold cyan")
    names = (*sorted(parameter.opts, key=len, reverse=True), *parameter.secondary_opts)
    text = Text(", ".join(names), style="bold cyan")
    if parameter.metavar:
        text.append(f" {parameter.metavar.replace('|', ' | ')}", style="not bold yellow")
    return text


def _meaning(parameter: Any) -> Text:
    from rich.text import Text

    text = Text(parameter.help or "")
    if isinstance(parameter.show_default, str):
        text.append(f" [default: {parameter.show_default}]", style="dim")
    return text


def _print_panel(out: Any, title: str, rows: list[tuple[Text, Text]], *, beside: bool = False) -> None:
    from rich.padding import Padding
    from rich.panel import Panel
    from rich.table import Table

    grid = Table.grid(padding=(0, 2, 0, 0))
    if beside or out.width >= BROAD:
        grid.add_column(max_width=None if beside else out.width * 2 // 5, overflow="fold")
        grid.add_column(ratio=1)
        for names, meaning in rows:
            grid.add_row(names, meaning)
    else:
        grid.add_column(overflow="fold")
        for names, meaning in rows:
            cells: list[RenderableType] = [names, Padding(meaning, (0, 0, 0, 4))]
            for cell in cells:
                grid.add_row(cell)
    out.print(Panel(grid, title=title, title_align="left", border_style="dim"))
