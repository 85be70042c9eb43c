"""Tables: aligned text, Markdown, comma-separated values."""

from collections.abc import Collection, Mapping, Sequence
from html import escape

from memcalc.render.terminal_text import cells, visible

Cells = Sequence[str]


def text(heads: Cells, rows: Sequence[Cells], right: Collection[int] = (), unicode: bool = True) -> str:
    """Columns side by side; those in `right` are aligned to the right."""
    table = [tuple(visible(cell, unicode) for cell in row) for row in (heads, *rows)]
    widths = [max(cells(row[column]) for row in table) for column in range(len(heads))]

    def padded(column: int, cell: str) -> str:
        space = " " * (widths[column] - cells(cell))
        return space + cell if column in right else cell + space

    return "".join("  ".join(padded(*item) for item in enumerate(row)).rstrip() + "\n" for row in table)


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
