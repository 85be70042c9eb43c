"""Streams that are closed, full, or know few characters, and Ctrl-C wherever it lands, in processes of their own."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from support.weights import write_json

ESTIMATE = ("estimate", "--params", "4B")
HEARS = "import signal\nsignal.signal(signal.SIGINT, signal.default_int_handler)\n"
"""A program that a shell started in the background ignores Ctrl-C; these are to hear it."""

PROGRAM = "import sys; from memcalc.cli import main; sys.argv[0] = 'memcalc'; main()"


def memcalc(*arguments: str, before: str = "", **options: Any) -> "subprocess.CompletedProcess[bytes]":
    command = [sys.executable, "-c", before + PROGRAM, *arguments]
    done: subprocess.CompletedProcess[bytes] = subprocess.run(
        command, timeout=60, **{"capture_output": True, **options}
    )
    return done


@pytest.mark.parametrize("arguments", [ESTIMATE, (*ESTIMATE, "--json"), ("--help",), ("--version",), ("gpus",)])
def test_a_closed_stdout_is_an_error(arguments: tuple[str, ...]) -> None:
    closing = ["sh", "-c", 'exec "$@" >&-', "sh", sys.executable, "-c", PROGRAM, *arguments]
    done = subprocess.run(closing, capture_output=True, timeout=60)
    assert done.returncode == 1
    assert done.stderr.startswith(b"memcalc: The answer could not be written")
    assert done.stderr.count(b"\n") == 1


@pytest.mark.parametrize("arguments", [ESTIMATE, ("--help",)])
def test_a_full_disk(arguments: tuple[str, ...]) -> None:
    with Path("/dev/full").open("wb") as full:
        done = memcalc(*arguments, capture_output=False, stdout=full, stderr=subprocess.PIPE)
    assert done.returncode == 1
    assert b"could not be written" in done.stderr
    assert b"fault" not in done.stderr


@pytest.mark.parametrize("encoding", ["ascii", "cp1252", "cp1251", "cp437", "koi8-r", "latin-1", "utf-16", "mac-roman"])
def test_every_output_in_every_encoding(encoding: str, tmp_path: Path) -> None:
    """One process asks for all of them, with a model whose name has characters of many scripts."""
    path = write_json(tmp_path / "модель-模型-é" / "config.json", {"model_type": "llama"}).parent
    forms = [["--markdown"], ["--json"], [], ["--ascii"], ["--color"]]
    asked = [*(["from-file", str(path), *form] for form in forms), ["inspect", str(path)], ["families"], ["optimizers"]]
    code = (
        "import sys\nfrom memcalc.cli import app\n"
        f"for arguments in {asked!r}:\n"
        "    try: app(arguments, prog_name='memcalc')\n"
        "    except SystemExit as done: assert not done.code, (arguments, done.code)\n"
    )
    environment = {**os.environ, "PYTHONIOENCODING": encoding}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=60, env=environment)
    assert (done.returncode, done.stderr) == (0, b"")
    assert done.stdout.decode(encoding).count("llama") > 2


def test_ctrl_c_in_a_finalizer_ends_the_program() -> None:
    """Python cannot raise there: the interrupt must not be lost, and nobody sees a traceback."""
    before = (
        f"{HEARS}from memcalc.autograd.tensor import Storage\nfreed, count = Storage.__del__, [0]\n"
        "def interrupted(storage):\n"
        "    freed(storage)\n"
        "    count[0] += 1\n"
        "    if count[0] == 50: signal.raise_signal(signal.SIGINT)\n"
        "Storage.__del__ = interrupted\n"
    )
    done = memcalc(*ESTIMATE, before=before)
    assert (done.returncode, done.stderr, done.stdout) == (130, b"", b"")


def test_ctrl_c_at_any_moment(tmp_path: Path) -> None:
    """Of a program that has begun: it ends with 130 and is silent, or it was done already."""
    for delay in (0.1, 0.15, 0.2, 0.3, 0.4):
        code = f"{HEARS}import sys; from memcalc.cli import main; print('begun', file=sys.stderr, flush=True); main()"
        command = [sys.executable, "-c", code, *ESTIMATE, "--seq-len", "4096"]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
            assert process.stderr is not None
            assert process.stderr.readline() == b"begun\n"
            time.sleep(delay)
            process.send_signal(signal.SIGINT)
            out, err = process.communicate(timeout=60)
        assert process.returncode in (0, 130), err
        assert err == b""
        assert (process.returncode == 0) == out.endswith(b"\n")
