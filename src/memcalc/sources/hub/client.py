"""Bounded requests to the Hub: sizes, waiting and retries all have limits, and everything is counted."""

import os
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from memcalc.errors import HubError
from memcalc.sources.display_names import shown
from memcalc.sources.hub.addresses import checked_endpoint, host_of, joined, origin_of
from memcalc.sources.hub.deadline import Deadline
from memcalc.sources.hub.errors import Busy, refusal
from memcalc.sources.hub.secrets import Token
from memcalc.sources.hub.transport import Connections, Reply, Unreachable, get
from memcalc.sources.json_object import TEXT_CAP
from memcalc.sources.loaded_model import Traffic

# How often one request is tried, and the pauses before it is, seconds.
PAUSES = (0.0, 0.5, 1.5)

# What huggingface_hub allows too.
MOST_REDIRECTS = 10

# What a redirect may say besides its address, bytes.
REDIRECT_CAP = 1 << 16


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
        endpoint: the Hub's address.
        token: sent to the endpoint and to nobody else; None or "" sends none.
        deadline: when the last answer must be there.

    Raises:
        HubError: `endpoint` is no address, or `token` cannot be one.
    """

    def __init__(self, endpoint: str, token: str | None, deadline: Deadline) -> None:
        self.endpoint, self.deadline = checked_endpoint(endpoint), deadline
        self._token = Token(token) if token else None
        self._connections = Connections()
        self._lock = threading.Lock()
        self._requests = self._bytes = 0
        self.repo_id = ""

    @property
    def has_token(self) -> bool:
        return self._token is not None

    @property
    def host(self) -> str:
        """The endpoint's host, for messages."""
        return host_of(self.endpoint)

    @property
    def page(self) -> str:
        """The repository's page, for people."""
        return f"{urlsplit(self.endpoint).scheme}://{self.host}{urlsplit(self.endpoint).path}/{self.repo_id}"

    @property
    def traffic(self) -> Traffic:
        return Traffic(self._requests, self._bytes)

    @property
    def given_up(self) -> bool:
        """Whether the deadline is over, and nobody waits for answers any more."""
        return self._connections.broken

    def in_time(self, work: Callable[[], Any]) -> Any:
        """The result of `work`, which asks this client, or Unreachable once the deadline is over."""
        return self.deadline.bound(work, self.host, self._connections.break_off)

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

    def hidden(self, data: bytes) -> bytes:
        """`data` with asterisks in place of the token, should a server have sent it back; its length stays."""
        return self._token.hidden(data) if self._token else data

    def _tried(self, once: Callable[[], Piece]) -> Piece:
        """Try again after a break, a 5xx, or a 429 that asks for no longer than there is time."""
        for pause in PAUSES[1:]:
            try:
                return once()
            except Busy as busy:
                pause = max(pause, busy.wait or 0)
                if pause > self.deadline.left:
                    raise
            except Unreachable as problem:
                if not problem.retry or pause > self.deadline.left:
                    raise
            time.sleep(pause)
        return once()

    def _once(self, url: str, offset: int | None, length: int, follow: bool = True) -> Piece:
        """One request, and those that redirects make of it."""
        asked = url
        for _ in range(MOST_REDIRECTS):
            if not self.deadline.left or self.given_up:
                raise self.deadline.over(host_of(url))
            headers = self._headers(url, offset, length)
            with get(_session, url, headers, self.deadline.silence, self._connections) as answer:
                with self._lock:
                    self._requests += 1
                reply = self._plain(answer)
                location = reply.headers.get("location") if 300 <= reply.status < 400 else None
                if location is None:
                    return self._answered(reply, asked, url, offset, length)
                self._drain(reply, url, REDIRECT_CAP, exact=True)
                url = joined(url, location, "a request on")
                if not follow:
                    return Piece(b"", None, url, None)
        raise Unreachable(f"{host_of(asked)} redirects in a circle; check HF_ENDPOINT.", retry=False)

    def _headers(self, url: str, offset: int | None, length: int) -> dict[str, str]:
        """What goes with a request; the token only to the endpoint's own origin."""
        headers = {"user-agent": _agent(), "accept-encoding": "identity"}
        if self._token and origin_of(url) == origin_of(self.endpoint):
            headers["authorization"] = self._token.header
        if offset is not None:
            headers["range"] = f"bytes={offset}-{offset + length - 1}"
        return headers

    def _plain(self, reply: Reply) -> Reply:
        """The answer with small header names, and without the token."""
        given = reply.headers
        headers = self._token.hidden_in(given) if self._token else {key.lower(): given[key] for key in given}
        return Reply(reply.status, headers, reply.chunks)

    def _answered(self, reply: Reply, asked: str, url: str, offset: int | None, length: int) -> Piece:
        if reply.status == 416 and offset is not None:  # the file ends before the range begins
            return Piece(b"", _total(reply.headers), url, None)
        if not 200 <= reply.status < 300:
            about_file = not urlsplit(asked).path.startswith(urlsplit(self.endpoint).path + "/api/models/")
            raise refusal(reply.status, reply.headers, self.repo_id, self.page, token=self.has_token, file=about_file)
        coding = reply.headers.get("content-encoding", "identity").strip().lower()
        if coding not in ("", "identity"):
            raise HubError(
                f"{host_of(url)} sends compressed data ({shown(coding)}) where plain data was asked for; is a proxy "
                "in between, or HF_ENDPOINT wrong?"
            )
        return self._read(reply, url, offset, length)

    def _read(self, reply: Reply, url: str, offset: int | None, length: int) -> Piece:
        skip = offset or 0
        if offset is not None and reply.status == 206:
            begin = _begin(reply.headers)
            if begin is not None and begin != offset:
                raise HubError(f"{host_of(url)} sent another part of the file than was asked for; try again.")
            skip = 0
        due = _number(reply.headers.get("content-length", ""))
        if offset is None and due is not None and due > length:
            raise HubError(f"{host_of(url)} answers with {due:,} bytes where a small file is due; check HF_ENDPOINT.")
        data = self._drain(reply, url, skip + length, exact=due == skip + length or offset is None)
        if offset is None and len(data) > length:
            raise HubError(f"{host_of(url)} sent over {length:,} bytes where a small file is due; check HF_ENDPOINT.")
        total = _total(reply.headers) if reply.status == 206 else due
        if due is not None and len(data) < min(due, skip + length):
            raise Unreachable(f"{host_of(url)} stopped in the middle of a file; try again.", retry=True)
        return Piece(self.hidden(data[skip : skip + length]), total, url, _next_page(reply.headers))

    def _drain(self, reply: Reply, url: str, limit: int, *, exact: bool) -> bytes:
        """The body up to `limit`. A body known to end there is read to its end, which lets the connection be reused."""
        body = bytearray()
        for chunk in reply.chunks:
            body += chunk
            with self._lock:
                self._bytes += len(chunk)
            if len(body) > limit or (len(body) == limit and not exact):
                break
            if not self.deadline.left or self.given_up:
                raise self.deadline.over(host_of(url))
        return bytes(body)


def _session() -> Any:
    from huggingface_hub.utils import get_session  # type: ignore[attr-defined]

    return get_session()


def _agent() -> str:
    from huggingface_hub import __version__ as library_version

    return f"memcalc; hf_hub/{library_version}"


def endpoint_now() -> str:
    """HF_ENDPOINT as it is set now, else what huggingface_hub found when it was imported."""
    from huggingface_hub import constants

    return os.environ.get("HF_ENDPOINT") or str(constants.ENDPOINT)


def token_now(token: str | None) -> str | None:
    """The token to send: the one given, else that of the environment or of `huggingface-cli login`.

    Raises:
        HubError: the file of the login cannot be read.
    """
    from huggingface_hub import constants, get_token

    if token is not None:
        return token.strip() or None
    if constants.HF_HUB_DISABLE_IMPLICIT_TOKEN:
        return None
    try:
        found: str | None = get_token()
    except (OSError, ValueError) as problem:
        why = problem.strerror if isinstance(problem, OSError) else "it is not text"
        raise HubError(
            f"the login's token cannot be read ({shown(why)}); check HF_HOME and HF_TOKEN_PATH, or give --token."
        ) from None
    return found


def _begin(headers: Mapping[str, str]) -> int | None:
    """The first byte of "bytes 8-99/1000"."""
    return _number(headers.get("content-range", "").partition(" ")[2].partition("-")[0])


def _total(headers: Mapping[str, str]) -> int | None:
    return _number(headers.get("content-range", "").rpartition("/")[2])


def _number(text: str) -> int | None:
    return int(text) if text.isascii() and text.isdecimal() and len(text) < 19 else None


def _next_page(headers: Mapping[str, str]) -> str | None:
    """The address in `Link: <...>; rel="next"`."""
    for part in headers.get("link", "").split(","):
        address, _, relation = part.partition(";")
        if 'rel="next"' in relation.replace(" ", ""):
            return address.strip().strip("<>")
    return None
