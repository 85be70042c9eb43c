"""Pages opened in a real browser: nothing runs, everything is drawn, at once. Skipped where there is no browser."""

import re
import struct
from pathlib import Path

import pytest
from support.browser import browser, opened
from support.pages import LLAMA_70B, hostile_pages

from memcalc import ModelSpec, TrainingSetup
from memcalc.render import html
from memcalc.render.page_setup import Setup
from memcalc.timeline import timeline

SCRIPT = "<script>document.body.dataset.ran='yes'</script>"
MEASURE = (
    "<script>addEventListener('load',()=>{const d=document.documentElement;"
    "const t=performance.getEntriesByType('navigation')[0];"
    "d.dataset.wide=d.scrollWidth>innerWidth?'too wide':'fits';d.dataset.ms=Math.round(t.domComplete);"
    "d.dataset.paths=[...document.querySelectorAll('path.a')].filter(p=>p.getBoundingClientRect().height>1).length;"
    "const pin=document.querySelector('.pin'),tip=document.querySelector('[role=tooltip]');"
    "const shown=()=>getComputedStyle(tip).display;d.dataset.before=shown();pin.focus({focusVisible:true});"
    "d.dataset.focused=shown();})</script>"
)


def measured(page: str, path: Path, *flags: str) -> dict[str, str]:
    """What a script finds that the test puts into the page, whose own policy would not let it run."""
    path.write_text(re.sub(r"<meta http-equiv[^>]*>", "", page).replace("</body>", MEASURE + "</body>"))
    document = opened(path, "--dump-dom", *flags)
    return dict(re.findall(r'data-(\w+)="([^"]*)"', document.split(">", 2)[1]))


@pytest.fixture(scope="module")
def page() -> str:
    browser()
    spec = ModelSpec.from_config(LLAMA_70B)
    drawn = timeline(spec, TrainingSetup(precision="bf16", seq_len=2048), "H200", samples=600)
    return html.page([Setup(drawn.report, drawn)], command=["memcalc", "timeline", "70B"])


@pytest.mark.parametrize("kind", ["one.html", "two.html", "picture.svg"])
def test_a_hostile_name_runs_nothing(kind: str, tmp_path: Path) -> None:
    path = tmp_path / kind
    path.write_text(hostile_pages()[kind])
    document = opened(path, "--dump-dom")
    assert "owned" in document  # as text
    assert not re.search(r"<title[^>]*>owned", document)
    assert "<script" not in document
    assert "<img" not in document


def test_the_policy_lets_no_script_run(page: str, tmp_path: Path) -> None:
    path = tmp_path / "page.html"
    path.write_text(page.replace("</body>", SCRIPT + "</body>"))
    assert 'data-ran="yes"' not in opened(path, "--dump-dom")
    path.write_text(re.sub(r"<meta http-equiv[^>]*>", "", page).replace("</body>", SCRIPT + "</body>"))
    assert 'data-ran="yes"' in opened(path, "--dump-dom")


@pytest.mark.parametrize("width", [400, 1600])
def test_it_is_drawn_at_once_and_fits_the_window(page: str, width: int, tmp_path: Path) -> None:
    found = measured(page, tmp_path / "page.html", f"--window-size={width},900")
    assert found["wide"] == "fits"
    assert int(found["ms"]) < 1000
    assert int(found["paths"]) >= 5
    assert (found["before"], found["focused"]) == ("none", "block")


def test_it_is_light_and_dark(page: str, tmp_path: Path) -> None:
    """A screenshot of the same page with the two colour schemes: its first pixel is the background."""
    assert "prefers-color-scheme:dark" in page
    path, picture = tmp_path / "page.html", tmp_path / "page.png"
    for text in (page, page.replace("prefers-color-scheme:dark", "min-width:1px")):
        path.write_text(text)
        opened(path, f"--screenshot={picture}", "--window-size=500,800")
        data = picture.read_bytes()
        assert struct.unpack(">II", data[16:24]) == (500, 800)
        assert len(data) > 10_000
