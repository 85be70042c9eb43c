"""Tables: aligned text, Markdown, comma-separated values."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from io import StringIO
from typing import TYPE_CHECKING, Literal

from memcalc.render.terminal_text import visible

if TYPE_CHECKING:
    from rich.table import Table
    from rich.text import Text

Cells = Sequence[str]


@dataclass(frozen=True)
class Column:
    """A column of a table.

    right: aligned to the right, as numbers are.
    whole: its cells are not wrapped.
    needs: the width of a terminal from which on it is shown.
    """

    head: str
    right: bool = False
    whole: bool = False
    needs: int = 0


def text(
    heads: Cells, rows: Sequence[Cells], right: Collection[int] = (), unicode: bool = True, width: int = 80
) -> str:
    """Columns side by side, in lines of `width` columns; those in `right` are aligned to the right."""
    columns = [Column(head, right=index in right) for index, head in enumerate(heads)]
    return laid_out(columns, rows, unicode=unicode, width=width)


def laid_out(columns: Sequence[Column], rows: Sequence[Cells], *, unicode: bool, width: int) -> str:
    """A table as Rich lays it out: cells wrap where `width` is small.

    One that cannot be so narrow is wider: nothing is cut.
    """
    from rich.table import Table

    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    shown = [index for index, column in enumerate(columns) if column.needs <= width]
    for index in shown:
        column = columns[index]
        justify: Literal["left", "right"] = "right" if column.right else "left"
        table.add_column(_cell(column.head, unicode), justify=justify, no_wrap=column.whole, overflow="fold")
    for row in rows:
        table.add_row(*(_cell(row[index], unicode) for index in shown))
    return _rendered(table, width)


def fields(pairs: Sequence[tuple[str, str]], *, unicode: bool, width: int) -> str:
    """Names with their values, which wrap beside them."""
    from rich.table import Table

    grid = Table.grid(padding=(0, 2, 0, 0))
    grid.add_column(no_wrap=True)
    grid.add_column(overflow="fold")
    for name, value in pairs:
        grid.add_row(_cell(name, unicode), _cell(value, unicode))
    return _rendered(grid, width)


def _rendered(table: "Table", width: int) -> str:
    from rich.console import Console
    from rich.measure import Measurement

    out = Console(file=StringIO(), width=width, color_system=None, legacy_windows=False)
    out.width = max(width, Measurement.get(out, out.options.update(max_width=10**4), table).minimum)
    with out.capture() as captured:
        out.print(table)
    return "".join(line.rstrip() + "\n" for line in captured.get().splitlines())


def _cell(content: str, unicode: bool) -> "Text":
    from rich.text import Text

    return Text(visible(content, unicode))


def markdown(heads: Cells, rows: Sequence[Cells], right: Collection[int] = ()) -> str:
    """The same for issues and wikis."""
    from memcalc.render.markdown import quoted  # which reads reports; a plain table does not pay for that

    rules = ["--:" if column in right else "---" for column in range(len(heads))]
    lines = [[quoted(cell) for cell in heads], rules, *([quoted(cell) for cell in row] for row in rows)]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def html(heads: Cells, rows: Sequence[Cells]) -> str:
    """The same for a page; columns are aligned by its style, the first to the left."""
    head = "".join(f'<th scope="col">{escape(visible(cell))}</th>' for cell in heads)
    body = "".join(f"<tr>{''.join(f'<td>{escape(visible(cell))}</td>' for cell in row)}</tr>\n" for row in rows)
    return f"<table><thead><tr>{head}</tr></thead><tbody>\n{body}</tbody></table>\n"


def csv(rows: Sequence[Mapping[str, object]]) -> str:
    """Comma-separated values under the names of the first row's keys."""
    import csv as csv_text
    import io

    out = io.StringIO()
    writer = csv_text.DictWriter(out, fieldnames=list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return out.getvalue()
