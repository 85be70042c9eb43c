"""A real HTTP server on loopback that speaks the part of the Hub's API that memcalc needs; faults on request."""

import asyncio
import hashlib
import json
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import unquote

from support.http_pieces import Blob, Request, flood, ranged, read_request, send


@dataclass
class Repo:
    """A model repository; the fields switch on what can go wrong with it."""

    files: dict[str, Blob]
    commit: str = "c" * 40
    branches: dict[str, str] = field(default_factory=dict)
    gated: bool = False
    private: bool = False
    disabled: bool = False
    sizes_in_info: bool = True
    moved_to: str | None = None


@dataclass
class Seen:
    method: str
    path: str
    range: str | None
    authorization: str | None
    status: int = 0
    sent: int = 0


GOOD_TOKEN = "hf_good"


class Hub:
    """The server's state and what it saw. `faults` maps a part of a path to a fault, taken off when used up."""

    def __init__(self) -> None:
        self.repos: dict[str, Repo] = {}
        self.others: dict[str, str] = {}
        self.latency = 0.0
        self.redirects = True
        self.page = 1000
        self.faults: dict[str, list[str]] = {}
        self.seen: list[Seen] = []
        self.connections = 0
        self.busiest = 0
        self._busy = 0
        self.url = ""

    def add(self, repo_id: str, files: dict[str, bytes | Blob | dict[str, Any]], **options: Any) -> Repo:
        blobs = {}
        for name, value in files.items():
            data = json.dumps(value).encode() if isinstance(value, dict) else value
            blobs[name] = data if isinstance(data, Blob) else Blob(data, len(data))
        self.repos[repo_id] = Repo(blobs, **options)
        return self.repos[repo_id]

    @property
    def body_bytes(self) -> Counter[str]:
        """Bytes sent, by path."""
        total: Counter[str] = Counter()
        for request in self.seen:
            total[request.path] += request.sent
        return total

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        try:
            while (request := await read_request(reader)) is not None:
                self._busy += 1
                self.busiest = max(self.busiest, self._busy)
                try:
                    if self.latency:
                        await asyncio.sleep(self.latency)
                    keep = await self._answer(request, writer)
                finally:
                    self._busy -= 1
                if not keep:
                    break
        except (ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError):
            pass
        finally:
            writer.close()

    async def _answer(self, request: Request, writer: asyncio.StreamWriter) -> bool:
        seen = Seen(request.method, request.path, request.headers.get("range"), request.headers.get("authorization"))
        self.seen.append(seen)
        fault = self._fault(request.path)
        if fault:
            done = await self._misbehave(fault, request, seen, writer)
            if done is not None:
                return done
        status, headers, body = self._route(request)
        seen.status, seen.sent = status, len(body)
        await send(writer, status, headers, body)
        return True

    def _fault(self, path: str) -> str | None:
        for part, faults in self.faults.items():
            if part in path and faults:
                return faults[0] if faults[0].endswith("!") else faults.pop(0)
        return None

    async def _misbehave(self, fault: str, request: Request, seen: Seen, writer: asyncio.StreamWriter) -> bool | None:
        """`fault` may end in `!`: then it never wears off."""
        kind, _, value = fault.rstrip("!").partition(":")
        if kind == "status":
            code, _, extra = value.partition(",")
            await send(writer, int(code), {"Retry-After": extra} if extra else {}, b"")
            return True
        if kind == "html":
            await send(writer, 200, {"Content-Type": "text/html"}, b"<!DOCTYPE html><title>Log in</title>")
            return True
        if kind == "hang":
            await asyncio.sleep(30)
            return False
        if kind == "drop":
            return False
        if kind == "ignore-ranges":
            seen.sent = await flood(writer, self._blob(request), int(value))
            return False
        if kind == "truncate":
            status, headers, body = self._route(request)
            await send(writer, status, {**headers, "Content-Length": str(len(body))}, body[: len(body) // 2])
            return False
        if kind == "drip":
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 100000\r\n\r\n")
            for _ in range(200):
                writer.write(b" ")
                await writer.drain()
                await asyncio.sleep(0.05)
            return False
        raise AssertionError(fault)

    def _blob(self, request: Request) -> Blob:
        name, path = _split_resolve(request.path)
        return self.repos[name].files[path]

    def _route(self, request: Request) -> tuple[int, dict[str, str], bytes]:
        path = request.path
        if path.startswith("/cdn/"):
            return self._cdn(request)
        if path.startswith("/api/models/") or path == "/api/models":
            return self._models(request)
        for kind in ("dataset", "space"):
            if path.startswith(f"/api/{kind}s/"):
                found = self.others.get(path.removeprefix(f"/api/{kind}s/")) == kind
                return (200, {}, b'{"id": "x"}') if found else _no_repo()
        if "/resolve/" in path:
            return self._resolve(request)
        return 404, {}, b"{}"

    def _refused(self, name: str, request: Request, *, content: bool) -> tuple[int, dict[str, str], bytes] | None:
        repo = self.repos.get(name)
        token = request.headers.get("authorization", "").removeprefix("Bearer ")
        if token.startswith("hf_broken"):
            return 401, {"X-Error-Message": "Invalid credentials in Authorization header"}, b"{}"
        if repo is None or (repo.private and token != GOOD_TOKEN):
            return (404, {"X-Error-Code": "RepoNotFound"}, b"{}") if token else _no_repo()
        if repo.disabled:
            return 403, {"X-Error-Message": "Access to this resource is disabled."}, b"{}"
        if repo.gated and content and token != GOOD_TOKEN:
            message = f"Access to model {name} is restricted."
            return 403 if token else 401, {"X-Error-Code": "GatedRepo", "X-Error-Message": message}, b"{}"
        return None

    def _models(self, request: Request) -> tuple[int, dict[str, str], bytes]:
        rest = request.path.removeprefix("/api/models").strip("/")
        if not rest:
            words = [value.lower() for key in ("search", "author") for value in request.query.get(key, [])]
            ids = [{"id": name} for name in self.repos if all(word in name.lower() for word in words)]
            return 200, {}, json.dumps(ids).encode()
        name, _, tail = _split_api(rest, self.repos)
        if refused := self._refused(name, request, content=False):
            return refused
        repo = self.repos[name]
        if repo.moved_to:
            return 307, {"Location": f"/api/models/{repo.moved_to}/{tail}".rstrip("/")}, b""
        if tail == "refs":
            rows = [{"name": branch} for branch in ("main", *repo.branches)]
            return 200, {}, json.dumps({"branches": rows, "tags": []}).encode()
        if tail.startswith("tree/"):
            return self._tree(repo, request)
        revision = unquote(tail.removeprefix("revision/")) if tail else "main"
        commit = self._commit(repo, revision)
        if commit is None:
            return 404, {"X-Error-Code": "RevisionNotFound"}, b"{}"
        return 200, {}, json.dumps({"id": name, "sha": commit, "siblings": self._siblings(repo)}).encode()

    def _commit(self, repo: Repo, revision: str) -> str | None:
        return repo.commit if revision in ("main", repo.commit) else repo.branches.get(revision)

    def _siblings(self, repo: Repo) -> list[dict[str, Any]]:
        if not repo.sizes_in_info:
            return [{"rfilename": path} for path in repo.files]
        return [{"rfilename": path, "size": blob.size} for path, blob in repo.files.items()]

    def _tree(self, repo: Repo, request: Request) -> tuple[int, dict[str, str], bytes]:
        begin = int(request.query.get("cursor", ["0"])[0])
        rows = [{"type": "file", "path": path, "size": blob.size} for path, blob in repo.files.items()]
        more = begin + self.page < len(rows)
        link = {"Link": f'<{self.url}{request.path}?cursor={begin + self.page}>; rel="next"'} if more else {}
        return 200, link, json.dumps(rows[begin : begin + self.page]).encode()

    def _resolve(self, request: Request) -> tuple[int, dict[str, str], bytes]:
        name, path = _split_resolve(request.path)
        if refused := self._refused(name, request, content=True):
            return refused
        repo = self.repos[name]
        blob = repo.files.get(path)
        if blob is None:
            return 404, {"X-Error-Code": "EntryNotFound"}, b"{}"
        etag = hashlib.sha256(path.encode()).hexdigest()
        headers = {"ETag": f'"{etag}"', "X-Repo-Commit": repo.commit}
        if self.redirects and not path.endswith(".json"):
            location = f"{self.url.replace('127.0.0.1', 'localhost')}/cdn/{name}/resolve/x/{path}"
            return 302, {**headers, "X-Linked-Size": str(blob.size), "Location": location}, b""
        return ranged(blob, request, headers)

    def _cdn(self, request: Request) -> tuple[int, dict[str, str], bytes]:
        name, path = _split_resolve(request.path.removeprefix("/cdn"))
        return ranged(self.repos[name].files[path], request, {})


def _no_repo() -> tuple[int, dict[str, str], bytes]:
    """What an anonymous request for an unknown or private repository gets."""
    return 401, {"X-Error-Message": "Invalid username or password."}, b'{"error":"Invalid username or password."}'


def _split_api(rest: str, repos: dict[str, Repo]) -> tuple[str, str, str]:
    parts = rest.split("/")
    if parts[0] in repos:
        return parts[0], "/", "/".join(parts[1:])
    return "/".join(parts[:2]), "/", "/".join(parts[2:])


def _split_resolve(path: str) -> tuple[str, str]:
    name, _, rest = path.strip("/").partition("/resolve/")
    return name, rest.partition("/")[2]


async def _stop(server: asyncio.Server, writers: Iterable[asyncio.StreamWriter]) -> None:
    """End what is still being served, so that nothing is left pending or open: no client reads what is not sent yet."""
    server.close()
    tasks = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    for writer in writers:
        writer.transport.abort()
    await asyncio.sleep(0)  # sockets are closed in the next turn of the loop


@contextmanager
def running() -> Iterator[Hub]:
    """A hub that answers until the block is left."""
    hub = Hub()
    with serving(hub.serve) as hub.url:
        yield hub


@contextmanager
def serving(serve: Callable[[asyncio.StreamReader, asyncio.StreamWriter], Any]) -> Iterator[str]:
    """The address on loopback where `serve` answers connections until the block is left."""
    loop = asyncio.new_event_loop()
    ready = threading.Event()
    servers: list[asyncio.Server] = []
    writers: list[asyncio.StreamWriter] = []

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writers.append(writer)
        try:
            await serve(reader, writer)
        finally:
            writer.close()

    async def start() -> None:
        servers.append(await asyncio.start_server(connected, "127.0.0.1", 0))
        ready.set()

    def run() -> None:
        asyncio.set_event_loop(loop)
        loop.run_until_complete(start())
        loop.run_forever()

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    ready.wait(5)
    try:
        yield f"http://127.0.0.1:{servers[0].sockets[0].getsockname()[1]}"
    finally:
        asyncio.run_coroutine_threadsafe(_stop(servers[0], writers), loop).result(5)
        loop.call_soon_threadsafe(loop.stop)
        thread.join(5)
        loop.close()
