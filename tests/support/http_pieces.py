"""HTTP/1.1 by hand, for a test server: requests, answers, ranges, and an answer that is far too long."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass
from urllib.parse import parse_qs, unquote, urlsplit


@dataclass
class Blob:
    """A file: its beginning, and as many zero bytes behind it as make up `size`."""

    start: bytes
    size: int

    def part(self, begin: int, end: int) -> bytes:
        found = self.start[begin:end]
        return found + bytes(max(0, end - max(begin, len(self.start)))) if end > len(self.start) else found


@dataclass
class Request:
    method: str
    path: str
    query: dict[str, list[str]]
    headers: dict[str, str]


async def read_request(reader: asyncio.StreamReader) -> Request | None:
    line = await reader.readline()
    if not line:
        return None
    method, target, _ = line.decode().split()
    headers = {}
    while (line := await reader.readline()) not in (b"\r\n", b""):
        key, _, value = line.decode().partition(":")
        headers[key.strip().lower()] = value.strip()
    parts = urlsplit(target)
    return Request(method, unquote(parts.path), parse_qs(parts.query), headers)


async def send(writer: asyncio.StreamWriter, status: int, headers: dict[str, str], body: bytes) -> None:
    lines = {"Content-Length": str(len(body)), "Content-Type": "application/json", **headers}
    text = "".join(f"{key}: {value}\r\n" for key, value in lines.items())
    writer.write(f"HTTP/1.1 {status} X\r\n{text}\r\n".encode() + body)
    await writer.drain()


async def flood(writer: asyncio.StreamWriter, blob: Blob, size: int) -> int:
    """A 200 with the whole file, however much was asked for; returns what the client took before it hung up."""
    writer.write(f"HTTP/1.1 200 OK\r\nContent-Length: {size}\r\n\r\n".encode() + blob.start)
    sent = len(blob.start)
    try:
        async for chunk in _zeros(size - sent):
            writer.write(chunk)
            await writer.drain()
            sent += len(chunk)
    except ConnectionError:
        pass
    return sent


async def _zeros(size: int) -> AsyncIterator[bytes]:
    while size > 0:
        yield bytes(min(size, 1 << 16))
        size -= 1 << 16


def ranged(blob: Blob, request: Request, headers: dict[str, str]) -> tuple[int, dict[str, str], bytes]:
    wanted = request.headers.get("range")
    if not wanted:
        return 200, headers, blob.part(0, blob.size)
    begin, end = (int(part) for part in wanted.removeprefix("bytes=").split("-"))
    if begin >= blob.size:
        return 416, {**headers, "Content-Range": f"bytes */{blob.size}"}, b""
    end = min(end + 1, blob.size)
    return 206, {**headers, "Content-Range": f"bytes {begin}-{end - 1}/{blob.size}"}, blob.part(begin, end)
