"""The heat map of a sweep: a size in each cell, or a mark where there is no room; colours by the verdict."""

import pytest

from memcalc.render import styles
from memcalc.render.heat_map import Cell, Grid, html, render
from memcalc.render.terminal_text import cells

GIB = 2**30
FREE = [(4, 20), (8, 16), (23, 1), (30, -6)]


def grid(columns: int, rows: int = 2) -> Grid:
    values = [str(number) for number in range(max(columns, rows))]
    lines = [[Cell(*(GIB * size for size in FREE[(row + at) % 4])) for at in range(columns)] for row in range(rows)]
    return Grid("--batch", "--seq-len", values[:rows], values[:columns], lines)


def test_sizes_where_there_is_room() -> None:
    text = styles.plain(render(grid(4), 80))
    assert text.splitlines()[0] == "--batch down, --seq-len across"
    assert [line.split() for line in text.splitlines()[1:4]] == [
        ["0", "1", "2", "3"],
        ["0", "4.0", "GiB", "✓", "8.0", "GiB", "✓", "23.0", "GiB", "✓", "30.0", "GiB", "×"],
        ["1", "8.0", "GiB", "✓", "23.0", "GiB", "✓", "30.0", "GiB", "×", "4.0", "GiB", "✓"],
    ]
    assert "does not fit" in text


@pytest.mark.parametrize(("columns", "rows"), [(4, 2), (12, 2), (40, 40), (90, 90)])
@pytest.mark.parametrize("unicode", [True, False])
def test_no_line_is_wider_than_asked(columns: int, rows: int, unicode: bool) -> None:
    lines = styles.plain(render(grid(columns, rows), 60, unicode=unicode)).splitlines()
    assert max(map(cells, lines)) <= 60
    assert unicode or "".join(lines).isascii()


def test_many_rows_take_time_in_proportion() -> None:
    """A thousand rows: a width that is counted anew for each cell would take minutes."""
    lines = [[Cell(GIB * (row + 1)), Cell(GIB)] for row in range(1000)]
    values = [str(row) for row in range(1000)]
    text = styles.plain(render(Grid("--seq-len", "--batch", values, ["1", "2"], lines), 80))
    assert text.count("GiB") == 2000 + 2


def test_columns_become_rows_before_sizes_go() -> None:
    text = styles.plain(render(grid(12, 2), 60))
    assert text.startswith("--seq-len down, --batch across")
    assert text.count("GiB") == 24 + 2


def test_colours_say_what_fits() -> None:
    used = {span.style: span.text for line in render(grid(4), 80) for span in line}
    assert "4.0 GiB" in used["black on green"] or "8.0 GiB" in used["black on green"]
    assert "23.0 GiB" in used["black on yellow"]
    assert "30.0 GiB" in used["white on red"]


def test_without_a_gpu_a_mark_says_how_large() -> None:
    one = Grid("--batch", "--lora-rank", ["1"], ["8", "16", "32"], [[Cell(GIB), Cell(8 * GIB), Cell(None)]])
    line = styles.plain(render(one, 80)).splitlines()[2]
    assert line.split() == ["1", "1.0", "GiB", "▁", "8.0", "GiB", "█", "-"]
    assert "cannot be computed" in styles.plain(render(one, 80))


def test_a_page_says_the_same() -> None:
    table = html(grid(4))
    assert table.count("<td") == 8
    assert table.count("30.0 GiB ✗") == table.count('class="no"') == 2
    assert '<th scope="row">1</th>' in table
