"""Bounded requests to the Hub: sizes, waiting and retries all have limits, and everything is counted."""

import os
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import urljoin, urlsplit

from memcalc.errors import HubError
from memcalc.sources.display_names import shown
from memcalc.sources.hub.errors import Busy, refusal
from memcalc.sources.hub.transport import Reply, Unreachable, get
from memcalc.sources.json_object import TEXT_CAP
from memcalc.sources.loaded_model import Traffic

DEFAULT_TIMEOUT = 10.0

# How often one request is tried, and the pauses before it is, seconds.
PAUSES = (0.0, 0.5, 1.5)

# Slower than this, bytes a second, an answer is given up: a server that drips keeps every read timeout alive.
SLOWEST = 2_000


@dataclass(frozen=True)
class Piece:
    """The part of a body that was asked for; `total` is the whole file's size where the server said it.

    `url` is where the body came from in the end, `next_page` the address of a following page.
    """

    data: bytes
    total: int | None
    url: str
    next_page: str | None


class HubClient:
    """Requests about one repository, on huggingface_hub's session.

    Args:
        endpoint: the Hub's address without a slash at the end.
        token: sent to the endpoint and to nobody else; None sends none.
        timeout: the longest wait for a connection or for the next bytes, seconds; also the longest Retry-After obeyed.
    """

    def __init__(self, endpoint: str, token: str | None, timeout: float = DEFAULT_TIMEOUT) -> None:
        from huggingface_hub import __version__ as library_version
        from huggingface_hub.utils import get_session  # type: ignore[attr-defined]

        self.endpoint, self.timeout = endpoint, timeout
        self._token, self._session = token, get_session
        self._agent = f"memcalc; hf_hub/{library_version}"
        self._lock = threading.Lock()
        self._requests = self._bytes = 0
        self.repo_id = ""

    @property
    def has_token(self) -> bool:
        return self._token is not None

    @property
    def page(self) -> str:
        """The repository's page, for people."""
        return f"{self.endpoint}/{self.repo_id}"

    @property
    def traffic(self) -> Traffic:
        return Traffic(self._requests, self._bytes)

    def whole(self, url: str, cap: int = TEXT_CAP) -> Piece:
        """A body of at most `cap` bytes.

        Raises:
            HubError: refused, unreachable, cut short, or longer than `cap`.
        """
        return self._tried(lambda: self._once(url, None, cap))

    def ranged(self, url: str, offset: int, length: int, *, follow: bool = True) -> Piece:
        """`length` bytes from `offset`, and not one more: from a server that ignores ranges, reading stops there.

        Without `follow`, a redirect gives an empty piece whose `url` says where it leads.
        """
        if length <= 0:
            return Piece(b"", None, url, None)
        return self._tried(lambda: self._once(url, offset, length, follow))

    def _tried(self, once: Callable[[], Piece]) -> Piece:
        """Try again after a break, a 5xx, or a 429 that asks for no longer than the timeout."""
        for pause in PAUSES[1:]:
            try:
                return once()
            except Busy as busy:
                if busy.wait is not None and busy.wait > self.timeout:
                    raise
                time.sleep(max(pause, busy.wait or 0))
            except Unreachable as problem:
                if not problem.retry:
                    raise
                time.sleep(pause)
        return once()

    def _once(self, url: str, offset: int | None, length: int, follow: bool = True) -> Piece:
        headers = {"user-agent": self._agent, "accept-encoding": "identity"}
        if self._token and _origin(url) == _origin(self.endpoint):
            headers["authorization"] = f"Bearer {self._token}"
        if offset is not None:
            headers["range"] = f"bytes={offset}-{offset + length - 1}"
        with get(self._session(), url, headers, self.timeout, follow=follow) as reply:
            with self._lock:
                self._requests += 1 + reply.hops
            if reply.status == 416 and offset is not None:  # the file ends before the range begins
                return Piece(b"", _total(reply.headers), reply.url, None)
            if reply.status >= 400:
                about_file = not urlsplit(url).path.startswith(urlsplit(self.endpoint).path + "/api/models/")
                raise refusal(
                    reply.status, reply.headers, self.repo_id, self.page, token=self.has_token, file=about_file
                )
            if reply.status >= 300:
                self._drain(reply, 1 << 16, exact=True)  # what a redirect says besides its address
                return Piece(b"", None, urljoin(url, reply.headers.get("location", url)), None)
            return self._read(reply, offset, length)

    def _read(self, reply: Reply, offset: int | None, length: int) -> Piece:
        skip = offset or 0
        if offset is not None and reply.status == 206:
            begin = _begin(reply.headers)
            if begin is not None and begin != offset:
                raise HubError(f"{_host(reply.url)} sent another part of the file than was asked for; try again.")
            skip = 0
        stated = reply.headers.get("content-length", "")
        due = int(stated) if stated.isdigit() and len(stated) < 19 else None
        if offset is None and due is not None and due > length:
            raise HubError(
                f"{_host(reply.url)} answers with {due:,} bytes where a small file is due; check HF_ENDPOINT."
            )
        data = self._drain(reply, skip + length, exact=due == skip + length or offset is None)
        if offset is None and len(data) > length:
            raise HubError(
                f"{_host(reply.url)} sent over {length:,} bytes where a small file is due; check HF_ENDPOINT."
            )
        total = _total(reply.headers) if reply.status == 206 else due
        if due is not None and len(data) < min(due, skip + length):
            raise Unreachable(f"{_host(reply.url)} stopped in the middle of a file; try again.", retry=True)
        return Piece(data[skip : skip + length], total, reply.url, _next_page(reply.headers))

    def _drain(self, reply: Reply, limit: int, *, exact: bool) -> bytes:
        """The body up to `limit`. A body known to end there is read to its end, which lets the connection be reused."""
        started, parts, held = time.monotonic(), [], 0
        for chunk in reply.chunks:
            parts.append(chunk)
            held += len(chunk)
            with self._lock:
                self._bytes += len(chunk)
            if held > limit or (held == limit and not exact):
                break
            if time.monotonic() - started > 3 * self.timeout + held / SLOWEST:
                raise Unreachable(f"{_host(reply.url)} answers too slowly; try again, or raise --timeout.", retry=False)
        return b"".join(parts)


def endpoint_now() -> str:
    """HF_ENDPOINT as it is set now, else what huggingface_hub found when it was imported."""
    from huggingface_hub import constants

    return (os.environ.get("HF_ENDPOINT") or constants.ENDPOINT).rstrip("/")


def token_now(token: str | None) -> str | None:
    """The token to send: the one given, else that of the environment or of `huggingface-cli login`."""
    from huggingface_hub import constants, get_token

    if token is not None:
        return token.strip() or None
    found: str | None = None if constants.HF_HUB_DISABLE_IMPLICIT_TOKEN else get_token()
    return found


def _origin(url: str) -> tuple[Any, ...]:
    parts = urlsplit(url)
    return parts.scheme, parts.hostname, parts.port


def _host(url: str) -> str:
    return shown(urlsplit(url).netloc)


def _begin(headers: Mapping[str, str]) -> int | None:
    """The first byte of "bytes 8-99/1000"."""
    text = headers.get("content-range", "").partition(" ")[2].partition("-")[0]
    return int(text) if text.isdigit() else None


def _total(headers: Mapping[str, str]) -> int | None:
    text = headers.get("content-range", "").rpartition("/")[2]
    return int(text) if text.isdigit() and len(text) < 19 else None


def _next_page(headers: Mapping[str, str]) -> str | None:
    """The address in `Link: <...>; rel="next"`."""
    for part in headers.get("link", "").split(","):
        address, _, relation = part.partition(";")
        if 'rel="next"' in relation.replace(" ", ""):
            return address.strip().strip("<>")
    return None
