"""A progress bar on stderr for what takes long: only on a terminal."""

import sys
from collections.abc import Iterable, Iterator
from typing import TypeVar

T = TypeVar("T")

SHORT = 50
"""Items below which no bar is worth its line."""


def watched(items: Iterable[T], total: int, what: str) -> Iterator[T]:
    """`items`, of which there are `total`, with a bar while they are taken; it goes when the last one is done."""
    if total < SHORT or sys.stderr is None or not sys.stderr.isatty():
        yield from items
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (BarColumn(), MofNCompleteColumn(), TextColumn(what), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        yield from progress.track(items, total=total)
