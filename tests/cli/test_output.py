"""The answer on real streams: pipes, encodings, colours, widths, readers that go away, Ctrl-C."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from typing import Any

import pytest
from support.cli_runs import run

MEMCALC = [sys.executable, "-c", "from memcalc.cli import main; main()"]
ESTIMATE = [*MEMCALC, "estimate", "--params", "1B"]


def process(command: list[str], *, expect: int = 0, **environment: str) -> Any:
    """Run a command in a pipe, with nothing in the environment that changes what is shown."""
    clean = {name: value for name, value in os.environ.items() if name not in {"COLUMNS", "NO_COLOR", "TERM"}}
    done = subprocess.run(command, capture_output=True, env=clean | environment, check=False)
    assert done.returncode == expect, done.stderr
    return done


def test_a_pipe_gets_80_plain_columns() -> None:
    done = process(ESTIMATE, PYTHONIOENCODING="utf-8")
    lines = done.stdout.decode().splitlines()
    assert len(lines[0]) == 80
    assert lines[0].startswith("┌")
    assert b"\x1b" not in done.stdout
    assert done.stderr == b""


@pytest.mark.parametrize("columns", [60, 100, 200])
def test_the_width_is_the_terminal_s(columns: int) -> None:
    done = process(ESTIMATE, PYTHONIOENCODING="utf-8", COLUMNS=str(columns))
    assert len(done.stdout.decode().splitlines()[0]) == columns
    assert len(run("estimate", "--params", "1B", "--width", str(columns)).stdout.splitlines()[0]) == columns


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "cp1252"])
def test_a_stream_that_is_not_utf_8_gets_ascii(encoding: str) -> None:
    done = process(ESTIMATE, PYTHONIOENCODING=encoding)
    assert done.stdout.isascii()
    assert done.stdout.startswith(b"+-")
    assert b"#" in done.stdout
    for table in ("gpus", "optimizers", "families", "schema"):
        assert process([*MEMCALC, table], PYTHONIOENCODING=encoding).stdout.isascii()


def test_ascii_on_request() -> None:
    text = run("estimate", "--params", "1B", "--ascii").stdout
    assert text.isascii()
    assert text.startswith("+- TENSORS -")


def test_colours_on_request_only() -> None:
    assert "\x1b[" in run("estimate", "--params", "1B", "--color").stdout
    assert "\x1b[" not in run("estimate", "--params", "1B", "--no-color").stdout
    assert "\x1b[" not in run("estimate", "--params", "1B").stdout


def on_a_terminal(**environment: str) -> str:
    """What `memcalc estimate` writes to a pseudo-terminal."""
    import pty

    parent, child = pty.openpty()
    clean = {name: value for name, value in os.environ.items() if name not in {"COLUMNS", "NO_COLOR", "TERM"}}
    with subprocess.Popen(ESTIMATE, stdout=child, stderr=child, env=clean | {"COLUMNS": "80"} | environment) as running:
        os.close(child)
        seen = b""
        while True:
            try:
                part = os.read(parent, 65536)
            except OSError:
                break
            if not part:
                break
            seen += part
    os.close(parent)
    assert running.returncode == 0
    return seen.decode()


def test_a_terminal_gets_colours_unless_somebody_says_no() -> None:
    assert "\x1b[" in on_a_terminal(TERM="xterm-256color")
    assert "\x1b[" not in on_a_terminal(TERM="xterm-256color", NO_COLOR="1")
    assert "\x1b[" in on_a_terminal(TERM="xterm-256color", NO_COLOR="")
    assert "\x1b[" not in on_a_terminal(TERM="dumb")


def test_units() -> None:
    for unit in ("GB", "gb"):
        text = run("estimate", "--params", "4B", "--batch", "16", "--unit", unit).stdout
        rows = [line for line in text.splitlines() if re.match(r"│ [A-Z]{4,}", line)]
        assert all(re.search(r" (GB|MB|KB|B) ", line) for line in rows[:6])


def test_json_is_one_object_and_nothing_else() -> None:
    done = process([*ESTIMATE, "--json"])
    assert json.loads(done.stdout)["schema_version"] == 2
    assert done.stderr == b""
    assert done.stdout.isascii()


def test_markdown() -> None:
    assert "| model weights |" in run("estimate", "--params", "1B", "--markdown").stdout


@pytest.mark.parametrize("arguments", [["--json"], [], ["--gpu", "24GB", "--check"]])
def test_a_reader_that_goes_away_is_no_error(arguments: list[str]) -> None:
    read_end, write_end = os.pipe()
    os.close(read_end)
    done = subprocess.run([*ESTIMATE, *arguments], stdout=write_end, stderr=subprocess.PIPE, check=False)
    os.close(write_end)
    assert (done.returncode, done.stderr) == (0, b"")


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no device that is always full")
@pytest.mark.parametrize("command", [ESTIMATE, [*ESTIMATE, "--help"]], ids=["answer", "help"])
def test_a_full_disk_is_told(command: list[str]) -> None:
    with open("/dev/full", "w") as full:
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr.startswith("memcalc: The answer could not be written")
    assert done.stderr.count("\n") == 1


def test_ctrl_c_is_quiet() -> None:
    program = (
        "import os, signal\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"  # a parent in the background may ignore it
        "def slow(*_, **__):\n"
        "    os.kill(os.getpid(), signal.SIGINT)\n"
        "    import time; time.sleep(10)\n"
        "import memcalc.estimation.estimate as estimation; estimation.estimate = slow\n"
        "from memcalc.cli import main; main()"
    )
    start = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-c", program, "estimate", "--params", "1B"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 128 + signal.SIGINT
    assert (done.stdout, done.stderr) == ("", "")
    assert time.monotonic() - start < 9


def test_the_trained_share_is_told() -> None:
    """Beside adapters the whole count says little; where all is trained, it would say the same twice."""
    head = run("estimate", "--params", "1B", "--lora-rank", "8", "--width", "90").stdout.splitlines()[0]
    assert "993M parameters, 639k trained · batch 1 × 256 tokens" in head
    assert "639k trained" in run("estimate", "--params", "1B", "--lora-rank", "8", "--markdown").stdout
    assert "trained" not in run("estimate", "--params", "1B").stdout.splitlines()[0]
