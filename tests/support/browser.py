"""A real browser without a window, where one is installed."""

import os
import shutil
import subprocess
import tempfile
from pathlib import Path

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome", "msedge")
FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--hide-scrollbars",
)


def browser() -> str:
    """The program; the test is skipped where there is none. MEMCALC_BROWSER names another."""
    for name in filter(None, (os.environ.get("MEMCALC_BROWSER"), *NAMES)):
        if (found := shutil.which(name)) is not None:
            return found
    pytest.skip("no Chromium or Chrome is installed: pages are not opened in a real browser")


def opened(path: Path, *flags: str) -> str:
    """What the browser makes of the page at `path` (with --dump-dom: the document after it was drawn)."""
    with tempfile.TemporaryDirectory() as profile:
        command = [browser(), *FLAGS, f"--user-data-dir={profile}", *flags, path.resolve().as_uri()]
        return subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout
