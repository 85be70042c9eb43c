"""`explain` as text: the tensors of a moment, each with what made it, why it is alive, and its formula."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence

from memcalc.provenance.explanation import Explanation, TensorEntry
from memcalc.render.terminal_text import visible, wrap
from memcalc.tables.dtypes import ALIASES, short
from memcalc.units import Unit, format_bytes

_INDENT = " " * 12
_NAME = re.compile(r"\b[a-z_]\w*\b(?!\()")


def render(found: Explanation, width: int, unit: Unit, *, unicode: bool = True) -> str:
    """The explanation in lines of at most `width` columns."""
    peak = ", the peak" if found.is_peak else ""
    lines = [f"{found.model}: {found.moment}{peak}: {format_bytes(found.total_bytes, unit)}", ""]
    for entry in found.tensors:
        lines += _entry(entry, width, unit)
    if found.left_out_bytes:
        lines.append(f"{format_bytes(found.left_out_bytes, unit):>10}  everything else (--top, --row)")
    rows = ", ".join(f"{_title(row)} {format_bytes(nbytes, unit)}" for row, nbytes in found.rows.items())
    lines += ["", *wrap(f"Rows of the box: {rows}", width)]
    for line in found.assumptions:
        lines += [("- " if not index else "  ") + text for index, text in enumerate(wrap(line.text, width - 2))]
    return "".join(visible(line, unicode).rstrip() + "\n" for line in lines)


def _entry(entry: TensorEntry, width: int, unit: Unit) -> Iterator[str]:
    made = f"{entry.module} · {entry.operation}" if entry.module else entry.operation
    head = f"{layout(entry.count, entry.shape, entry.dtype)}{_title(entry.row)}: {made}"
    if entry.made_in != "before the step":
        head += f" (made in {entry.made_in})"
    first, *more = wrap(head, width - len(_INDENT))
    yield f"{format_bytes(entry.bytes, unit):>10}  {first}"
    said = f"{entry.alive_because}; dies {entry.until}" if not entry.until.startswith("never") else entry.alive_because
    for text in (said, _formula(entry, unit), entry.source):
        more += wrap(text, width - len(_INDENT)) if text else []
    yield from (_INDENT + line for line in more)


def _title(row: str) -> str:
    return row.replace("_", " ").upper()


def layout_of(entry: TensorEntry) -> str:
    """How many of which shape and dtype; "" for one that is no tensor."""
    return layout(entry.count, entry.shape, entry.dtype).strip().removesuffix(" ×")


def layout(count: int, shape: Sequence[int] | None, dtype: str | None) -> str:
    """How many of which shape and dtype, with a space behind it."""
    times = f"{count:,} × " if count > 1 else ""
    if shape is None:
        return times
    name = "" if dtype is None else f" {short(ALIASES[dtype]) if dtype in ALIASES else dtype}"
    return f"{times}[{', '.join(map(str, shape))}]{name}  "


def worked_out(formula: str, numbers: Mapping[str, int | float]) -> str:
    """The formula with the values of its names beside them; "" for one that is a number alone."""
    if formula.lstrip("-").isdecimal():
        return ""

    def with_value(name: str) -> str:
        return f"{name} ({numbers[name]:,})" if name in numbers else name

    return _NAME.sub(lambda name: with_value(name[0]), formula).replace(" * ", " × ")


def _formula(entry: TensorEntry, unit: Unit) -> str:
    """The formula with what it gives."""
    text = worked_out(entry.formula, entry.numbers)
    times = f" × {entry.count:,} = {format_bytes(entry.bytes, unit)}" if entry.count > 1 else ""
    return text and f"{text} = {entry.bytes // entry.count:,} bytes{times}"
