"""A config.json from disk: a file, or the folder that holds one."""

import errno
import os
import stat
from pathlib import Path
from typing import Any

from memcalc.errors import ConfigError
from memcalc.sources.json_object import parse_object
from memcalc.sources.names import shown

LARGEST_CONFIG = 10_000_000
"""Largest config.json that is read, bytes. The longest ones that are published stay below 1 MB."""


def read_config(path: str) -> tuple[dict[str, Any], str]:
    """The values of the config.json at `path`, and what to call its model: the name of its folder.

    Raises:
        ConfigError: nothing is there, it may not be read, or it is no JSON object; the message says what to do.
    """
    if "\0" in path or not path:
        raise ConfigError("The path is empty or holds a zero byte: give the path of a config.json or of its folder.")
    given = Path(path)
    file = given / "config.json" if os.path.isdir(given) else given
    config = parse_object(_bytes_of(file, given), str(file))
    return config, _name_of(file)


def _bytes_of(file: Path, given: Path) -> bytes:
    """The content of `file`, which has to be a regular file of a sane size."""
    try:
        # A named pipe without a writer would block the program at its opening, for ever.
        handle = os.open(file, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0))
    except OSError as problem:
        raise ConfigError(_why(problem, file, given)) from None
    with open(handle, "rb") as stream:
        status = os.fstat(handle)
        if not stat.S_ISREG(status.st_mode):
            raise ConfigError(f"{shown(file)} is not a regular file: give the path of a config.json or of its folder.")
        try:
            data = stream.read(LARGEST_CONFIG + 1)
        except OSError as problem:
            raise ConfigError(f"{shown(file)} cannot be read ({problem.strerror}): copy it to another place.") from None
    if len(data) > LARGEST_CONFIG:
        raise ConfigError(
            f"{shown(file)} is larger than {LARGEST_CONFIG // 1_000_000} MB, which no config.json is: "
            "give the config.json, not the weights."
        )
    return data


def _why(problem: OSError, file: Path, given: Path) -> str:
    """Why `file` could not be opened, and what to do about it."""
    if problem.errno == errno.ENOENT:
        if file != given:
            return f"{shown(given)} holds no config.json: give the folder of a model, or the path of its config.json."
        return f"{shown(given)} does not exist: check the path (from-hub takes names such as org/model)."
    if problem.errno in (errno.EACCES, errno.EPERM):
        return f"{shown(file)} may not be read (permission denied): change its permissions, or copy it."
    if problem.errno == errno.ELOOP:
        return f"{shown(file)} is a symbolic link that leads back to itself: give the path of the real file."
    return f"{shown(file)} cannot be opened ({problem.strerror}): check the path."


def _name_of(file: Path) -> str:
    """What to call the model: its folder's name, or the file's own where it is not called config.json."""
    if file.name != "config.json":
        return file.stem
    return Path(os.path.abspath(file)).parent.name or "model"
