"""A server on loopback that misbehaves in the way that the model's name asks for.

What comes at once stands in `AT_ONCE` and `LARGE`: those that begin with "answer" are what it sends for the model
itself, those with "file" for a file of a model whose list is in order. What never ends stands in `SLOWLY`.
"""

import asyncio
import gzip
import json
import re
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Any

Write = asyncio.StreamWriter
SHA = "c" * 40
HEAD = b"HTTP/1.1 200 OK\r\n"
CHUNKED = HEAD + b"Transfer-Encoding: chunked\r\n\r\n"


def whole(body: Any, status: int = 200, **headers: str) -> bytes:
    """An answer with a length; what is no bytes is written as JSON."""
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    lines = {"Content-Length": str(len(data)), **{key.replace("_", "-"): value for key, value in headers.items()}}
    return (
        f"HTTP/1.1 {status} X\r\n".encode()
        + "".join(f"{k}: {v}\r\n" for k, v in lines.items()).encode()
        + b"\r\n"
        + data
    )


def listing(*names: Any, sha: Any = SHA, size: Any = 20, **more: Any) -> bytes:
    """The answer about a model with these files."""
    rows = [{"rfilename": name, "size": size} for name in names]
    return whole({"id": "x/y", "sha": sha, "siblings": rows, **more})


def tree(rows: bytes, **headers: Any) -> dict[str, bytes]:
    """A model whose list of files has no sizes, so that its tree is asked for."""
    return {"revision": listing("config.json", size=None), "tree": whole(rows, **headers)}


def file(answer: bytes, name: str = "config.json", size: Any = None) -> dict[str, bytes]:
    """A model of one file, which is answered so."""
    rows = [{"rfilename": name, "size": size}, {"rfilename": "README.md", "size": 1}]
    return {"revision": whole({"id": "x/y", "sha": SHA, "siblings": rows}), "resolve": answer}


def echoes(token: str) -> dict[str, bytes]:
    """Ways of sending the token back, each at a place that may be shown or kept."""
    escaped = "".join(f"\\u{ord(c):04x}" for c in token)
    return {
        "message": whole(b"{}", 400, X_Error_Message=f"no: Bearer {token}"),
        "forbidden": whole(b"{}", 403, X_Error_Message=f"{token}{token}"),
        "sha": whole({"sha": token, "siblings": []}),
        "escaped sha": whole(f'{{"sha": "{escaped}", "siblings": []}}'.encode()),
        "redirect": whole(b"", 302, Location=f"ftp://{token}/"),
        "link": whole([], 200, Link=f'<{token}://x>; rel="next"'),
        "content-encoding": whole(b"{}", 200, Content_Encoding=token),
    }


DEEP = b"[" * 200_000

# What comes at once, by the part of the address that is asked; "" stands for every part.
AT_ONCE: dict[str, bytes | dict[str, bytes]] = {
    "answer: nothing": b"",
    "answer: no HTTP": b"SSH-2.0-OpenSSH_9.9\r\n\r\n",
    "answer: HTTP 0.9": b"<html>hello</html>",
    "answer: status 999": b"HTTP/1.1 999 X\r\nContent-Length: 0\r\n\r\n",
    "answer: status 000": b"HTTP/1.1 000 X\r\nContent-Length: 0\r\n\r\n",
    "answer: status 204": b"HTTP/1.1 204 X\r\n\r\n",
    "answer: status 206": whole(b"{}", 206),
    "answer: status 304": b"HTTP/1.1 304 X\r\n\r\n",
    "answer: status 416": whole(b"{}", 416),
    "answer: status 407": whole(b"{}", 407),
    "answer: status 429 for ever": whole(b"", 429, Retry_After="99999999"),
    "answer: Retry-After below zero": whole(b"", 429, Retry_After="-5"),
    "answer: Retry-After as a date": whole(b"", 503, Retry_After="Wed, 21 Oct 2015 07:28:00 GMT"),
    "answer: Retry-After in other digits": whole(b"", 429, Retry_After="²"),
    "answer: two lengths": HEAD + b"Content-Length: 3\r\nContent-Length: 4\r\n\r\nabcd",
    "answer: length below zero": HEAD + b"Content-Length: -3\r\n\r\n{}",
    "answer: length of a terabyte": HEAD + b"Content-Length: 1000000000000\r\n\r\n{}",
    "answer: too many headers": HEAD + b"X-Filler: 0123456789012345678901234567890123456789\r\n" * 4000 + b"\r\n",
    "answer: one header of a megabyte": HEAD + b"X-Filler: " + b"x" * 10**6 + b"\r\n\r\n",
    "answer: header with a line end": HEAD + b"X-Error-Message: a\x00b\x1b[2J\r\nContent-Length: 2\r\n\r\n{}",
    "answer: bad chunk size": CHUNKED + b"zz\r\n{}\r\n0\r\n\r\n",
    "answer: gzip": HEAD + b"Content-Encoding: gzip\r\nContent-Length: 22\r\n\r\n" + gzip.compress(b"{}"),
    "answer: unknown coding": whole(b"{}", Content_Encoding="rot13"),
    "answer: not UTF-8": whole(b'{"sha": "\xff\xfe"}'),
    "answer: nested deep": whole(DEEP),
    "answer: nested deep in an object": whole(b'{"sha":' + DEEP),
    "answer: a list": whole([]),
    "answer: null": whole(b"null"),
    "answer: a number of 5,000 digits": whole(b'{"sha": ' + b"1" * 5000 + b"}"),
    "answer: nothing in it": whole({}),
    "answer: sha is a number": listing("config.json", sha=5),
    "answer: sha is short": listing("config.json", sha="abc"),
    "answer: sha is a path": listing("config.json", sha="/tmp/memcalc-was-here"),
    "answer: sha climbs": listing("config.json", sha="../../../../memcalc-was-here"),
    "answer: sha ends a line": listing("config.json", sha=SHA + "\n"),
    "answer: sha is big": listing("config.json", sha="C" * 40),
    "answer: id climbs": listing("config.json", id="../../x"),
    "answer: id is an address": listing("config.json", id="http://other.example/x"),
    "answer: id has controls": listing("config.json", id="x/\x1b[2J\ud800"),
    "answer: siblings are text": whole({"sha": SHA, "siblings": "config.json"}),
    "answer: siblings are null": whole({"sha": SHA, "siblings": [None, 1, "a", [], {}]}),
    "answer: names are numbers": listing(1, None, True, ["config.json"], {}),
    "answer: a name without a pair": listing("\ud800.safetensors"),
    "answer: a name with a zero": listing("config.json\0", "model\0.safetensors"),
    "answer: a name that clears the screen": listing("\x1b[2J.safetensors"),
    "answer: names that climb": listing(
        "../../../etc/passwd", "/etc/passwd", "..\\..\\x.safetensors", "C:\\x.safetensors"
    ),
    "answer: no names": listing(""),
    "answer: the same name often": listing(*["config.json"] * 1000),
    "answer: sizes below zero": listing("config.json", "model.safetensors", size=-1),
    "answer: sizes beyond all": listing("config.json", "model.safetensors", size=10**40),
    "answer: sizes are text": listing("config.json", "model.safetensors", size="20"),
    "answer: sizes are floats": listing("config.json", "model.safetensors", size=1e300),
    "answer: sizes are true": listing("config.json", "model.safetensors", size=True),
    "answer: tree is null": tree(b"null"),
    "answer: tree is an object": tree(b"{}"),
    "answer: tree nested deep": tree(DEEP),
    "answer: tree of nulls": tree(b"[null, null]"),
    "answer: tree leads to a file": tree(b"[]", Link='<file:///etc/passwd>; rel="next"'),
    "answer: tree leads elsewhere": tree(b"[]", Link='<http://other.example/x>; rel="next"'),
    "answer: tree leads nowhere": tree(b"[]", Link='<http://[>; rel="next"'),
    "answer: tree leads to itself": tree(b'[{"path": "a", "size": 1}]', Link='<?cursor=1>; rel="next"'),
    "answer: redirect to itself": whole(b"", 302, Location="?x"),
    "answer: redirect to nothing": whole(b"", 302, Location=""),
    "answer: redirect without address": whole(b"", 302),
    "answer: redirect to a file": whole(b"", 302, Location="file:///etc/passwd"),
    "answer: redirect to gopher": whole(b"", 302, Location="gopher://127.0.0.1/x"),
    "answer: redirect to a bad port": whole(b"", 302, Location="http://127.0.0.1:99999/"),
    "answer: redirect to no host": whole(b"", 302, Location="http:///x"),
    "answer: redirect to a bracket": whole(b"", 302, Location="http://[/"),
    "answer: redirect with a login": whole(b"", 302, Location="http://user:password@127.0.0.1:9/"),
    "answer: redirect to a long name": whole(b"", 302, Location=f"http://{'a' * 300}.example/"),
    "file: config is nothing": file(whole(b"")),
    "file: config is a list": file(whole([])),
    "file: config is a page": file(whole(b"<html>")),
    "file: config nested deep": file(whole(b'{"a":' + DEEP)),
    "file: config of a terabyte": file(HEAD + b"Content-Length: 1000000000000\r\n\r\n{}"),
    "file: config is shorter than said": file(HEAD + b"Content-Length: 400\r\n\r\n{}"),
    "file: config is shorter than listed": file(whole({}), size=9),
    "file: config is not there": file(whole(b"{}", 404)),
    "file: config has surrogates": file(whole({"model_type": "\ud800\x1b[2J", "architectures": ["\udfff"]})),
    "file: weights begin elsewhere": file(whole(bytes(8), 206, Content_Range="bytes 5-12/20"), "a.safetensors", 20),
    "file: weights are beyond all": file(
        whole(b"\xff" * 8, 206, Content_Range=f"bytes 0-7/{10**30}"), "model.safetensors"
    ),
    "file: weights claim 2**63 bytes": file(whole(b"\0" * 7 + b"\x80"), "model.safetensors"),
    "file: weights are nothing": file(whole(b""), "model.safetensors"),
    "file: weights end early": file(whole(b"\x10" + bytes(7) + b"{"), "model.safetensors", 24),
    "file: GGUF of many things": file(
        whole(b"GGUF\3\0\0\0" + b"\xff\xff\xff\0\0\0\0\0" * 2 + bytes(4000)), "m.gguf", 4024
    ),
}

# The same, too large to be made before it is sent.
LARGE: dict[str, Callable[[], bytes | dict[str, bytes]]] = {
    "answer: a bomb of gzip": lambda: whole(gzip.compress(bytes(50_000_000)), Content_Encoding="gzip"),
    "answer: many files": lambda: listing(*(f"f{i}" for i in range(120_000))),
    "answer: many values": lambda: whole(b'{"sha": [' + b"[]," * 2_500_000 + b"0]}"),
    "file: config of many values": lambda: file(whole(b'{"a": [' + b"[]," * 3_000_000 + b"0]}")),
    "file: config has many keys": lambda: file(
        whole(b"{" + b",".join(b'"k%d":1' % i for i in range(1_000_000)) + b"}")
    ),
    "file: weights are too much": lambda: file(whole(bytes(3_000_000), 206), "model.safetensors", 3_000_000),
}


async def _drip(write: Write, start: bytes, piece: bytes, pause: float = 0.02) -> None:
    write.write(start)
    while True:
        write.write(piece)
        await write.drain()
        await asyncio.sleep(pause)


async def _silence(write: Write) -> None:
    await asyncio.sleep(60)


async def _slow_redirects(write: Write) -> None:
    await asyncio.sleep(0.1)
    write.write(whole(b"", 302, Location="?again"))


async def _late_server_error(write: Write) -> None:
    await asyncio.sleep(0.15)
    write.write(whole(b"", 503))


def _dripping(start: bytes, piece: bytes) -> Callable[[Write], Any]:
    return lambda write: _drip(write, start, piece)


_EMPTY_BLOCKS = b"5\r\n\x00\x00\x00\xff\xff\r\n"  # deflate blocks that stand for nothing
_GZIP = HEAD + b"Content-Encoding: gzip\r\nTransfer-Encoding: chunked\r\n\r\na\r\n\x1f\x8b\x08\0\0\0\0\0\0\x03\r\n"

# What takes for ever.
SLOWLY: dict[str, Callable[[Write], Any]] = {
    "silence": _silence,
    "silence after a part of the status": lambda write: _then_silent(write, b"HTT"),
    "silence after the headers": lambda write: _then_silent(write, HEAD + b"Content-Length: 100\r\n\r\n"),
    "status line drips": _dripping(b"HTTP/1.1 200 ", b"O"),
    "header lines drip": _dripping(HEAD, b"X-Filler: 1\r\n"),
    "one header drips": _dripping(HEAD + b"X-Filler: ", b"x"),
    "answers before the answer": _dripping(b"", b"HTTP/1.1 102 Processing\r\n\r\n"),
    "early hints": _dripping(b"", b"HTTP/1.1 103 Early Hints\r\nLink: </a>\r\n\r\n"),
    "body drips": _dripping(HEAD + b"Content-Length: 100000\r\n\r\n", b" "),
    "body without length drips": _dripping(HEAD + b"\r\n", b" "),
    "body of 3 KB a second": _dripping(HEAD + b"Content-Length: 100000000\r\n\r\n", b" " * 60),
    "chunks drip": _dripping(CHUNKED, b"1\r\n \r\n"),
    "chunk size drips": _dripping(CHUNKED, b"0"),
    "chunk extension drips": _dripping(CHUNKED + b"1;", b"x"),
    "trailers drip": _dripping(CHUNKED + b"2\r\n{}\r\n0\r\n", b"X-Filler: 1\r\n"),
    "empty blocks of gzip": _dripping(_GZIP, _EMPTY_BLOCKS),
    "redirects, each late": _slow_redirects,
    "redirect whose body drips": _dripping(b"HTTP/1.1 302 X\r\nLocation: ?x\r\nContent-Length: 9999\r\n\r\n", b" "),
    "errors, each late": _late_server_error,
    "error whose body drips": _dripping(b"HTTP/1.1 500 X\r\nContent-Length: 9999\r\n\r\n", b" "),
}


async def _then_silent(write: Write, start: bytes) -> None:
    write.write(start)
    await write.drain()
    await asyncio.sleep(60)


@dataclass
class Way:
    """How one model is answered: with `answer` (bytes, a dict by a part of the address, or a coroutine).

    With `only`, requests for other addresses get a model whose list is in order; with "404", that there is no model.
    """

    answer: Any
    only: str = ""


class HostileHub:
    """Answers as `way` says, or for a model called N as `ways[N]` does; `asked` holds the requests' heads."""

    def __init__(self) -> None:
        self.way = Way(b"")
        self.ways: list[Way] = []
        self.asked: list[str] = []

    async def serve(self, reader: asyncio.StreamReader, writer: Write) -> None:
        try:
            async for head in _requests(reader):
                self.asked.append(head)
                number = re.search(r"model(\d+)", head)
                way = self.ways[int(number[1])] if number else self.way
                await self._answer(way, head.split()[1], writer)
                await writer.drain()
                if not isinstance(way.answer, dict):
                    break
        except (ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError, asyncio.LimitOverrunError):
            pass
        finally:
            writer.close()

    async def _answer(self, way: Way, address: str, writer: Write) -> None:
        answer = way.answer
        if way.only == "404" and "/api/models/" in address:
            answer = whole(b"{}", 404, X_Error_Code="RepoNotFound")
        elif way.only and way.only != "404" and way.only not in address:
            answer = listing("config.json", "model.safetensors")
        if isinstance(answer, dict):
            answer = next((part for name, part in answer.items() if name in address), whole(b"{}", 404))
        if callable(answer):
            await answer(writer)
        else:
            writer.write(answer)


async def _requests(reader: asyncio.StreamReader) -> AsyncIterator[str]:
    while True:
        yield (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
