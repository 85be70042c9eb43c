"""--output, --html and --svg: files are written whole or not at all, and every failure is one sentence."""

import json
import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest
from support.cli_runs import refused, run
from support.paths import ROOT

from memcalc.cli import files
from memcalc.errors import UsageError

JOB = ("estimate", "--params", "1B", "--seq-len", "64")


@pytest.mark.parametrize(
    ("options", "name", "begins"),
    [
        ((), "box.txt", "┌─ TENSORS"),
        ((), "no-suffix", "┌─ TENSORS"),
        (("--json",), "report.txt", "{"),
        ((), "report.json", "{"),
        ((), "report.md", "**"),
        ((), "REPORT.HTML", "<!doctype html>"),
        ((), "step.svg", "<svg"),
        (("--markdown",), "report.json", "**"),
        (("--ascii",), "box.txt", "+- TENSORS"),
    ],
)
def test_the_format_is_the_options_or_the_suffix(
    options: tuple[str, ...], name: str, begins: str, tmp_path: Path
) -> None:
    path = tmp_path / name
    assert run(*JOB, *options, "--output", str(path)).stdout == ""
    assert path.read_text(encoding="utf-8").startswith(begins)
    assert os.listdir(tmp_path) == [name]


def test_it_is_what_would_be_printed(tmp_path: Path) -> None:
    for options in ((), ("--json",), ("--markdown",)):
        run(*JOB, *options, "--output", str(tmp_path / "answer"))
        assert (tmp_path / "answer").read_text() == run(*JOB, *options).stdout


def test_pages_and_pictures_beside_the_answer(tmp_path: Path) -> None:
    page, picture = tmp_path / "a.html", tmp_path / "a.svg"
    found = run(*JOB, "--json", "--html", str(page), "--svg", str(picture))
    assert json.loads(found.stdout)["peak"]
    assert "</html>" in page.read_text()
    assert "</svg>" in picture.read_text()
    run("timeline", "1B", "--html", str(page), "--svg", str(picture))
    assert "memcalc timeline" not in page.read_text() or "Made with" in page.read_text()


def test_other_commands(tmp_path: Path) -> None:
    sweep = ("sweep", "1B", "--batch", "1,2", "--seq-len", "64,128")
    for name, begins in (("a.csv", "batch,seq_len,"), ("a.html", "<!doctype"), ("a.md", "**1B**"), ("a.json", "{")):
        run(*sweep, "--output", str(tmp_path / name))
        assert (tmp_path / name).read_text().startswith(begins)
    run("compare", "1B", "2B", "--seq-len", "64", "--html", str(tmp_path / "b.html"))
    assert "2 setups side by side" in (tmp_path / "b.html").read_text()
    assert "--svg" in refused(2, "compare", "1B", "2B", "--svg", str(tmp_path / "d.svg"))
    assert "--html" in refused(2, "fit", "1B", "--gpu", "24GB", "--html", str(tmp_path / "d.html"))
    assert ".csv" in refused(2, *JOB, "--output", str(tmp_path / "d.csv"))
    assert not list(tmp_path.glob("d.*"))


def test_what_would_make_it_fit_is_on_the_page(tmp_path: Path) -> None:
    run(*JOB, "--gpu", "T4", "--html", str(tmp_path / "a.html"))
    text = (tmp_path / "a.html").read_text()
    assert "What makes it smaller" in text
    assert "--optimizer" in text


def test_a_pipeline_has_a_page_with_a_picture(tmp_path: Path) -> None:
    job = (*JOB, "--gpus", "2", "--pipeline-parallel-size", "2")
    run(*job, "--html", str(tmp_path / "a.html"), "--svg", str(tmp_path / "a.svg"))
    assert "<svg" in (tmp_path / "a.html").read_text()
    assert (tmp_path / "a.svg").read_text().startswith("<svg")


def test_what_was_read_of_a_run_file(tmp_path: Path) -> None:
    path, file = tmp_path / "a.json", str(ROOT / "examples" / "axolotl_qlora.yaml")
    run("from-config", file, "--show-setup", "--output", str(path))
    assert "setup" in json.loads(path.read_text())
    assert "--html" in refused(2, "from-config", file, "--show-setup", "--html", str(path))
    assert "--json" in refused(2, "from-config", file, "--as-options", "--json")


def test_what_cannot_be_written(tmp_path: Path) -> None:
    assert "no folder" in refused(2, *JOB, "--output", str(tmp_path / "missing" / "a.txt"))
    assert "is a folder" in refused(2, *JOB, "--output", str(tmp_path))
    assert "no name" in refused(2, *JOB, "--output", str(tmp_path / "a\0b"))
    assert "no folder" in refused(2, *JOB, "--html", str(tmp_path / "missing" / "a.html"))
    assert os.listdir(tmp_path) == []


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_no_permission(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    try:
        assert "ermission" in refused(2, *JOB, "--output", str(tmp_path / "a.txt"))
    finally:
        tmp_path.chmod(0o700)


def test_a_full_disk_leaves_the_file_as_it_was(tmp_path: Path) -> None:
    """A limit on the size of files stands for it."""
    path = tmp_path / "a.json"
    path.write_text("old")
    command = [sys.executable, "-m", "memcalc", *JOB, "--json", "--output", str(path)]

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))

    done = subprocess.run(command, capture_output=True, text=True, preexec_fn=limit, check=False)
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert "could not be written" in done.stderr
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["a.json"]


def test_an_interrupted_write_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a"
    path.write_text("old")

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("memcalc.cli.files.os.replace", interrupted)
    with pytest.raises(KeyboardInterrupt):
        files.write_whole(str(path), "new")
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["a"]


def test_links_modes_and_devices_stay_what_they_are(tmp_path: Path) -> None:
    path, link = tmp_path / "a", tmp_path / "link"
    path.write_text("old")
    path.chmod(0o640)
    link.symlink_to(path)
    files.write_whole(str(link), "new")
    assert link.is_symlink()
    assert path.read_text() == "new"
    assert path.stat().st_mode & 0o777 == 0o640
    files.write_whole(os.devnull, "gone")
    assert not Path(os.devnull).is_file()


def test_surrogates_of_file_names_are_written_as_escapes(tmp_path: Path) -> None:
    files.write_whole(str(tmp_path / "a"), "\ud800")
    assert (tmp_path / "a").read_text() == "\\ud800"
    with pytest.raises(UsageError, match="no folder"):
        files.write_whole(str(tmp_path / "b" / "c"), "")


def test_secrets_are_not_in_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["memcalc", "from-hub", "a/b", "--token", "hf_x", "--token=hf_y", "--unit", "a b"])
    assert files.command_line() == [
        "memcalc",
        "from-hub",
        "a/b",
        "--token",
        "'***'",
        "'--token=***'",
        "--unit",
        "'a b'",
    ]


def test_pipes_are_written_where_somebody_reads_them(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    assert "nobody reads this pipe" in refused(2, *JOB, "--output", str(pipe))
    assert "named pipe" in refused(1, "from-config", str(pipe))
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    run(*JOB, "--output", str(pipe))
    assert "TENSORS" in os.read(reader, 10_000).decode()
    os.close(reader)
    assert "is empty" in refused(2, *JOB, "--output", "")
