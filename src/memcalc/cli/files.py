"""Files that take an answer: written whole or not at all."""

import errno
import os
import stat
import sys
import tempfile
from collections.abc import Sequence
from contextlib import suppress

from memcalc.common.escaping import quoted
from memcalc.errors import UsageError
from memcalc.render.terminal_text import visible

_SECRET = "--tok"
"""How an option begins whose value is not shown, however it was misspelt."""


def write_whole(path: str, text: str | bytes) -> None:
    """Write `text` (or bytes) to the file at `path`, replacing what is there, or leave everything as it is.

    It is written to a temporary file in the same folder, which then takes the place of the file. A link is followed; a
    device or a pipe is written to as it is.

    Raises:
        UsageError: there is no such folder, `path` is a folder, or the disk, or who may write there, does not allow it.
    """
    data = text if isinstance(text, bytes) else text.encode("utf-8", "backslashreplace")
    if not path:
        raise UsageError("the name of a file to write is empty: give one, or leave the option out.")
    try:
        if os.path.isdir(path):
            raise IsADirectoryError(f"{quoted(path)} is a folder")
        if os.path.exists(path) and not stat.S_ISREG(os.stat(path).st_mode):  # not its real path: a pipe has none
            _write_through(path, data)
        else:
            _replace(os.path.realpath(path), data)
    except OSError as problem:
        raise UsageError(f"{quoted(path)} could not be written ({_reason(path, problem)}).") from None
    except ValueError:  # a name with a null byte
        raise UsageError(f"{quoted(path)} is no name of a file.") from None


def _write_through(path: str, data: bytes) -> None:
    """Write to a device or a pipe; a named pipe that nobody reads would keep us waiting for ever."""
    try:
        handle = os.open(path, os.O_WRONLY | os.O_NONBLOCK)
    except OSError as problem:
        if problem.errno == errno.ENXIO and stat.S_ISFIFO(os.stat(path).st_mode):
            raise OSError(errno.ENXIO, "nobody reads this pipe") from None
        raise
    os.set_blocking(handle, True)
    with os.fdopen(handle, "wb") as file:
        file.write(data)


def _replace(target: str, data: bytes) -> None:
    folder, name = os.path.split(target)
    if os.path.exists(target) and not os.access(target, os.W_OK):
        raise PermissionError("the file may not be written")
    handle, temporary = tempfile.mkstemp(dir=folder, prefix=f".{name[:40]}.")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(temporary, _mode(target))
        os.replace(temporary, target)
    except BaseException:
        with suppress(OSError):
            os.unlink(temporary)
        raise


def _mode(target: str) -> int:
    """Who may read and write the file: as before, or as the umask says for a new one."""
    try:
        return stat.S_IMODE(os.stat(target).st_mode)
    except OSError:
        mask = os.umask(0)
        os.umask(mask)
        return 0o666 & ~mask


def _reason(path: str, problem: OSError) -> str:
    folder = os.path.dirname(path) or "."
    if not os.path.isdir(folder):
        return f"there is no folder {quoted(folder)}"
    return visible(problem.strerror or str(problem))


def command_line(words: Sequence[str] | None = None) -> list[str]:
    """The words of a command (None: of the one that runs), as a shell takes them, without secrets."""
    import shlex

    out, hide = [], False
    for word in sys.argv[1:] if words is None else words:
        name, equals, _ = word.partition("=")
        secret = name.startswith(_SECRET)
        out.append("***" if hide else f"{name}=***" if secret and equals else word)
        hide = secret and not equals
    return ["memcalc", *map(shlex.quote, out)]
