"""One GET through huggingface_hub's own HTTP session, read piece by piece.

The session (its proxies, certificates, connection pool and offline switch) is huggingface_hub's; only its streaming
differs between versions: httpx-like clients from 1.0 on, `requests` before.
"""

import socket
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

from memcalc.errors import HubError, MemcalcError
from memcalc.sources.display_names import shown
from memcalc.sources.hub.addresses import host_of


@dataclass(frozen=True)
class Reply:
    """An answer whose body has not been read yet; `chunks` gives it as it comes, not decoded."""

    status: int
    headers: Mapping[str, str]
    chunks: Iterator[bytes]


class Unreachable(HubError):
    """No answer: no network, a timeout, a broken connection. `retry` tells whether trying again may help."""

    def __init__(self, message: str, *, retry: bool) -> None:
        super().__init__(message)
        self.retry = retry


class Connections:
    """The sockets that requests opened, so that reading from a server that drips can be ended from outside."""

    def __init__(self) -> None:
        self._sockets: weakref.WeakSet[socket.socket] = weakref.WeakSet()
        self._lock = threading.Lock()
        self.broken = False

    def trace(self, event: str, info: Mapping[str, Any]) -> None:
        """httpx's `trace` extension: notes each connection that is made."""
        if event.endswith(("connect_tcp.complete", "start_tls.complete")):
            found = info["return_value"].get_extra_info("socket")
            if isinstance(found, socket.socket):
                with self._lock:
                    self._sockets.add(found)
                    if self.broken:
                        _shut(found)

    def break_off(self) -> None:
        """End every read that is under way, and each that may still begin."""
        with self._lock:
            self.broken = True
            for one in list(self._sockets):
                _shut(one)


def _shut(one: socket.socket) -> None:
    with suppress(OSError, ValueError):
        one.shutdown(socket.SHUT_RDWR)


@contextmanager
def get(
    session: Callable[[], Any], url: str, headers: Mapping[str, str], timeout: float, connections: Connections
) -> Iterator[Reply]:
    """Send the request and hand out the answer, a redirect too; leaving the block early drops the connection.

    Args:
        session: makes or gives huggingface_hub's.
        url, headers: what is asked.
        timeout: the longest wait for a connection or for the next bytes, seconds.
        connections: remembers what is opened.

    Raises:
        Unreachable: for whatever the HTTP library raises, on sending and while the body is read.
    """
    try:
        client = session()
        if callable(getattr(client, "stream", None)):  # `requests` has a switch of that name
            more = {"follow_redirects": False, "extensions": {"trace": connections.trace}}
            with client.stream("GET", url, headers=headers, timeout=timeout, **more) as answer:
                yield Reply(answer.status_code, answer.headers, answer.iter_raw())
        else:
            with client.get(url, headers=headers, timeout=timeout, stream=True, allow_redirects=False) as answer:
                yield Reply(answer.status_code, answer.headers, answer.raw.stream(1 << 14, decode_content=False))
    except MemcalcError:
        raise
    except Exception as problem:  # every HTTP library has its own tree of exceptions; none may reach the user
        raise _unreachable(problem, host_of(url), timeout) from problem


_UNSENDABLE = (
    "InvalidURL",
    "UnsupportedProtocol",
    "InvalidSchema",
    "MissingSchema",
    "LocalProtocolError",
    "InvalidHeader",
    "UnicodeError",
    "UnicodeEncodeError",
)


def _unreachable(problem: Exception, host: str, timeout: float) -> Unreachable:
    kind = type(problem).__name__
    if "Offline" in kind:
        return Unreachable("HF_HUB_OFFLINE is set.", retry=False)
    if "Timeout" in kind:
        return Unreachable(
            f"{host} did not answer within {timeout:.2g} seconds; try again, or give it longer with --timeout.",
            retry=False,
        )
    if "Proxy" in kind:
        return Unreachable(
            f"the proxy on the way to {host} refused ({shown(problem)}); check HTTPS_PROXY.", retry=False
        )
    if "Connect" in kind and "Remote" not in kind:
        return Unreachable(
            f"no connection to {host} ({shown(problem)}); check the network, or HF_ENDPOINT for a mirror.", retry=True
        )
    if kind in _UNSENDABLE:
        return Unreachable(f"the request to {host} cannot be sent; check HF_ENDPOINT.", retry=False)
    if kind in ("ValueError", "TypeError", "ImportError", "FileNotFoundError", "SSLError"):
        return Unreachable(
            f"no connection to {host} can be made ({shown(problem)}); check HF_ENDPOINT, and the variables for proxies "
            "and certificates.",
            retry=False,
        )
    return Unreachable(f"the connection to {host} broke ({kind}); try again.", retry=True)
