"""The picture in the terminal: exact width, stacked rows, the peak pinned, phases marked, with and without colours."""

import re

import pytest
from support.shapes import decoder

from memcalc import InferenceSetup, ModelSpec, TrainingSetup
from memcalc.render import styles
from memcalc.render.terminal_text import cells
from memcalc.render.timeline import HEIGHT, columns, render
from memcalc.report.timeline import Timeline
from memcalc.timeline import timeline
from memcalc.units import format_bytes, round_step

SPEC = ModelSpec.from_config(decoder(1024, 12, 8, 8, 4096, 32000))


def picture(
    width: int, setup: TrainingSetup | InferenceSetup, *, gpu: str | None = None, unicode: bool = True
) -> tuple[Timeline, list[str]]:
    found = timeline(SPEC, setup, gpu, samples=columns(width))
    return found, styles.plain(render(found, width, unicode=unicode)).splitlines()


TRAINING = TrainingSetup(batch=8, seq_len=512)


@pytest.mark.parametrize("unicode", [True, False])
@pytest.mark.parametrize("width", [60, 61, 80, 133, 200])
def test_no_line_is_wider_than_asked(width: int, unicode: bool) -> None:
    for setup in (TRAINING, InferenceSetup(batch=4, seq_len=2048)):
        found, lines = picture(width, setup, gpu="RTX-3060", unicode=unicode)
        assert max(map(cells, lines)) <= width
        area = [line for line in lines if re.match(r"[ 0-9.a-zA-Z]{9}[│┤|]", line)]
        assert len(area) == HEIGHT
        assert max(map(cells, area)) == width - 1
        assert unicode or "".join(lines).isascii()
        assert format_bytes(found.report.peak.process_bytes) in "".join(lines)


def test_the_arrow_stands_over_the_fullest_column() -> None:
    for width in (60, 100, 200):
        found, lines = picture(width, TRAINING)
        arrow = next(line for line in lines if "▼" in line)
        at = arrow.index("▼") - len("         │")
        assert at == found.peak
        top = next(line for line in lines if "│" in line)
        assert top[arrow.index("▼")] != " "


def test_columns_are_the_rows_of_the_series() -> None:
    found, lines = picture(100, TRAINING)
    area = [line[10:] for line in lines if re.match(r"[ 0-9.a-zA-Z]{9}[│┤|]", line)]
    top = found.report.peak.process_bytes
    for at, sample in enumerate(found.samples):
        column = "".join(line[at] if at < len(line) else " " for line in area)
        for shade, nbytes in zip("█▓▒░╱·", sample.rows, strict=True):
            assert abs(column.count(shade) - nbytes * HEIGHT / top) <= 1


def test_phases_and_blocks_stand_under_their_columns() -> None:
    found, lines = picture(120, TRAINING)
    phases = next(line for line in lines if "forward" in line and "backward" in line and "step" in line)
    for phase in found.phases:
        assert phases.index(phase.name) - 10 == round(phase.start)
    assert "block 1 → 12" in "".join(lines)
    assert "block 12 → 1" in "".join(lines)


def test_the_gpu_is_a_line_where_it_is_near() -> None:
    near = "\n".join(picture(80, TRAINING, gpu="12GB")[1])
    far = "\n".join(picture(80, TRAINING, gpu="H200")[1])
    small = "\n".join(picture(80, TRAINING, gpu="4GB")[1])
    assert "GPU ┤╌╌╌" in near
    assert "fits" in near
    assert "╌" not in far
    assert "GPU ┤╌╌╌" in small
    assert "does not fit" in small


def test_colours_are_those_of_the_box() -> None:
    found = timeline(SPEC, TRAINING, samples=columns(80))
    lines = render(found, 80, colour=True)
    used = {word for line in lines for span in line for word in span.style.split()}
    assert {"blue", "magenta", "cyan", "green", "yellow", "red"} <= used
    assert "\x1b" not in styles.plain(lines)
    assert not any(span.style in ("blue", "red") for line in render(found, 80) for span in line)


def test_a_hostile_name_is_harmless() -> None:
    spec = ModelSpec.from_config(SPEC.config, name="\x1b[2J<script>" + "é" * 10_000 + "\n\x07")
    lines = styles.plain(render(timeline(spec, TRAINING, samples=columns(80)), 80)).splitlines()
    assert all(line.isprintable() for line in lines)
    assert max(map(cells, lines)) <= 80


@pytest.mark.parametrize(
    ("top", "step"), [(80 << 30, 20 << 30), (3 << 30, 1 << 30), (1 << 30, (1 << 30) // 5 + 1), (900, 200), (1, 1)]
)
def test_axis_marks_are_round(top: int, step: int) -> None:
    assert round_step(top) == step
