"""One GET through huggingface_hub's own HTTP session, read piece by piece.

The session (its proxies, certificates, connection pool and offline switch) is huggingface_hub's; only its streaming
differs between versions: httpx-like clients from 1.0 on, `requests` before.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from memcalc.errors import HubError, MemcalcError
from memcalc.sources.display_names import shown


@dataclass(frozen=True)
class Reply:
    """An answer whose body has not been read yet. `hops` counts its redirects."""

    status: int
    headers: Mapping[str, str]
    url: str
    hops: int
    chunks: Iterator[bytes]


class Unreachable(HubError):
    """No answer: no network, a timeout, a broken connection. `retry` tells whether trying again may help."""

    def __init__(self, message: str, *, retry: bool) -> None:
        super().__init__(message)
        self.retry = retry


@contextmanager
def get(session: Any, url: str, headers: Mapping[str, str], timeout: float, *, follow: bool = True) -> Iterator[Reply]:
    """Send the request and hand out the answer; leaving the block early drops the connection.

    Args:
        session: huggingface_hub's.
        url, headers: what is asked; the token is in the headers and stays with the first host when redirected.
        timeout: the longest wait for a connection or for the next bytes, seconds.
        follow: whether to go where a redirect leads, or to hand it out.

    Raises:
        Unreachable: for whatever the HTTP library raises, on sending and while the body is read.
    """
    try:
        if callable(getattr(session, "stream", None)):  # `requests` has a switch of that name
            with session.stream("GET", url, headers=headers, timeout=timeout, follow_redirects=follow) as answer:
                yield Reply(
                    answer.status_code, answer.headers, str(answer.url), len(answer.history), answer.iter_bytes()
                )
        else:
            with session.get(url, headers=headers, timeout=timeout, stream=True, allow_redirects=follow) as answer:
                chunks = answer.iter_content(1 << 14)
                yield Reply(answer.status_code, answer.headers, answer.url, len(answer.history), chunks)
    except MemcalcError:
        raise
    except Exception as problem:  # every HTTP library has its own tree of exceptions; none may reach the user
        raise _unreachable(problem, url, timeout) from problem


def _unreachable(problem: Exception, url: str, timeout: float) -> Unreachable:
    kind = type(problem).__name__
    host = shown(url.split("/")[2] if url.count("/") > 2 else url)
    if "Offline" in kind:
        return Unreachable("HF_HUB_OFFLINE is set.", retry=False)
    if "Timeout" in kind:
        return Unreachable(
            f"{host} did not answer within {timeout:g} seconds; try again, or give it longer with --timeout.",
            retry=False,
        )
    if "Proxy" in kind:
        return Unreachable(
            f"the proxy on the way to {host} refused ({shown(problem)}); check HTTPS_PROXY.", retry=False
        )
    if "Redirect" in kind:
        return Unreachable(f"{host} redirects in a circle; check HF_ENDPOINT.", retry=False)
    if "Connect" in kind and "Remote" not in kind:
        return Unreachable(
            f"no connection to {host} ({shown(problem)}); check the network, or HF_ENDPOINT for a mirror.", retry=True
        )
    if kind in (
        "InvalidURL",
        "UnsupportedProtocol",
        "InvalidSchema",
        "MissingSchema",
        "LocalProtocolError",
        "InvalidHeader",
    ):
        return Unreachable(f"the request to {host} cannot be sent; check HF_ENDPOINT and the token.", retry=False)
    return Unreachable(f"the connection to {host} broke ({kind}); try again.", retry=True)
