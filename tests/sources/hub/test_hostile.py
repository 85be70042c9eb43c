"""A Hub that means harm: nothing is written but the cache, nothing hangs, the token stays where it belongs."""

import os
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from support.hostile_hub import AT_ONCE, LARGE, SLOWLY, HostileHub, Way, echoes, file, listing, whole
from support.hub_server import serving

from memcalc.errors import HubError, MemcalcError, UsageError
from memcalc.sources.hub import client as hub_client
from memcalc.sources.hub.load import load_hub

TOKEN = "hf_SeCrEtSeCrEt"
PATIENCE = 0.5
"""Seconds for --timeout of these tests."""


@pytest.fixture(scope="module")
def server() -> Iterator[tuple[HostileHub, str]]:
    hub = HostileHub()
    with serving(hub.serve) as url:
        yield hub, url


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that all caches lie in, with the working folder beside them."""
    for name in ("HF_TOKEN", "HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "HF_ENDPOINT"):
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(hub_client, "PAUSES", (0.0, 0.01, 0.02))
    return tmp_path


def model_of(config: bytes) -> Way:
    """A model that is in order and has this config alone."""
    return Way({"revision": listing("config.json", size=len(config)), "resolve": whole(config)})


def ask(url: str, timeout: float = 1.5, name: str = "x/y", **options: Any) -> str:
    """What loading says, "" where it gives a model; it must be one harmless sentence, in time."""
    began = time.monotonic()
    try:
        load_hub(name, **{"endpoint": url, "timeout": timeout, "token": TOKEN, **options})
    except MemcalcError as problem:
        text = str(problem)
        assert text.isprintable()
        assert text.endswith((".", "?"))
        assert "Traceback" not in text
        assert len(text) < 500
        return text
    finally:
        assert time.monotonic() - began < timeout + 4.0
    return ""


def written(folder: Path) -> set[str]:
    """Every file below `folder` but the cache's own, none of which may hold the token."""
    found = set()
    for path in folder.rglob("*"):
        assert TOKEN not in path.name
        if path.is_file():
            assert TOKEN.encode() not in path.read_bytes()
            found.add(str(path.relative_to(folder)))
    return {name for name in found if not name.startswith(os.path.join("home", "assets", "memcalc"))}


@pytest.mark.parametrize("way", [*AT_ONCE, *LARGE])
def test_odd_answers(server: tuple[HostileHub, str], home: Path, way: str) -> None:
    hub, url = server
    hub.way, hub.asked = Way(LARGE[way]() if way in LARGE else AT_ONCE[way]), []
    ask(url)
    assert written(home) == set()
    assert not Path("/tmp/memcalc-was-here").exists()
    assert not any("passwd" in head for head in hub.asked)


@pytest.mark.parametrize("only", ["revision", "resolve", "404"])
def test_one_deadline_for_everything(server: tuple[HostileHub, str], home: Path, only: str) -> None:
    """Of the model's answer, of its files, and of the look-ups after a 404; all ways of taking for ever at once."""
    hub, url = server
    hub.ways = [Way(way, only) for way in SLOWLY.values()]

    def took(number: int) -> float:
        began = time.monotonic()
        assert ask(url, PATIENCE, name=f"x/model{number}")
        return time.monotonic() - began

    with ThreadPoolExecutor(len(SLOWLY)) as pool:
        times = dict(zip(SLOWLY, pool.map(took, range(len(SLOWLY))), strict=True))
    assert {way: seconds for way, seconds in times.items() if seconds > PATIENCE + 2.0} == {}
    assert written(home) == set()


@pytest.mark.parametrize("way", echoes(TOKEN))
@pytest.mark.parametrize("where", ["revision", "resolve"])
def test_a_token_that_is_sent_back(server: tuple[HostileHub, str], home: Path, way: str, where: str) -> None:
    hub, url = server
    answer = echoes(TOKEN)[way]
    hub.way = Way(file(answer) if where == "resolve" else answer)
    assert TOKEN not in ask(url)
    assert written(home) == set()


def test_a_token_in_names_and_files(server: tuple[HostileHub, str], home: Path) -> None:
    """In the list of files, the config and the headers: not in the model that is read, nor in the cache."""
    hub, url = server
    escaped = TOKEN.replace("S", "\\u0053")
    for name in (TOKEN, escaped):
        config = f'{{"model_type": "{name}", "{name}": 1}}'.encode()
        hub.way = Way({"revision": listing("config.json", f"{TOKEN}.bin", size=len(config)), "resolve": whole(config)})
        model = load_hub("x/y", endpoint=url, token=TOKEN)
        assert TOKEN not in repr(model)
        written(home)


def test_the_token_stays_with_its_origin(server: tuple[HostileHub, str], home: Path) -> None:
    """A redirect to the same machine under another name or port is another origin."""
    hub, url = server
    other = HostileHub()
    other.way = Way(whole(b"{}"))
    with serving(other.serve) as elsewhere:
        for target in (elsewhere, url.replace("127.0.0.1", "localhost")):
            hub.way, hub.asked = Way({"api": whole(b"", 302, Location=f"{target}/y")}), []
            ask(url)
            for head in [*other.asked, *(head for head in hub.asked if "GET /y" in head)]:
                assert "authorization" not in head.lower()
    assert other.asked


@pytest.mark.parametrize(
    "endpoint",
    [
        "http://127.0.0.1:99999",
        "http://127.0.0.1:x",
        "http://",
        "http://[",
        "http://[::1",
        "http:// ",
        "http://a\nb",
        "http://\ud800/",
        "file:///etc/passwd",
        "127.0.0.1",
        "http://127.0.0.1:9/?a=",
        f"http://user:{TOKEN}@127.0.0.1:9",
        f"ftp://user:{TOKEN}@127.0.0.1:9",
        f"http://{'a' * 300}.invalid",
        "http://xn--a.invalid",
        "http://..",
    ],
)
def test_endpoints(home: Path, endpoint: str) -> None:
    said = ask(endpoint, 1.0)
    assert TOKEN not in said
    assert said


@pytest.mark.parametrize("token", ["é", "a b", "hf_\ud800", "x\ny", "\0", "a" * 5000])
def test_tokens_that_are_none(home: Path, token: str, monkeypatch: pytest.MonkeyPatch) -> None:
    said = ask("http://127.0.0.1:9", token=token)
    assert "token holds characters" in said
    assert token not in said


@pytest.mark.parametrize("revision", ["\ud800", "a\0b", "a b", "x" * 300, "\x1b[2J"])
def test_revisions_that_are_none(home: Path, revision: str) -> None:
    with pytest.raises(UsageError, match="is no revision"):
        load_hub("x/y", endpoint="http://127.0.0.1:9", revision=revision)


@pytest.mark.parametrize("variable", ["HF_HOME", "HF_TOKEN_PATH", "HF_ASSETS_CACHE", "HF_HUB_CACHE"])
@pytest.mark.parametrize(
    "value", ["/dev/null", "/dev/null/x", "/proc/self/mem", "relative", "~nobody-here/x", "\udcff"]
)
def test_homes(
    server: tuple[HostileHub, str], home: Path, variable: str, value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub, url = server
    config = b'{"model_type": "llama"}'
    hub.way = model_of(config)
    monkeypatch.setenv(variable, value)
    ask(url, token=None)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    ask(url)


def test_two_hubs_never_share_an_entry(server: tuple[HostileHub, str], home: Path) -> None:
    hub, url = server
    other, config = HostileHub(), b'{"model_type": "llama", "hidden_size": 64}'
    hub.way = model_of(config)
    forged = config.replace(b"64", b"32")
    other.way = model_of(forged)
    with serving(other.serve) as elsewhere:
        for _ in range(2):
            assert load_hub("x/y", endpoint=elsewhere, token="").require_config()["hidden_size"] == 32
            assert load_hub("x/y", endpoint=url, token="").require_config()["hidden_size"] == 64
    with pytest.raises(HubError):
        load_hub("x/y", endpoint="http://127.0.0.1:9", token="")


def test_damaged_and_hostile_caches(server: tuple[HostileHub, str], home: Path) -> None:
    """Every file of the cache replaced by rubbish, links, pipes and folders: the answer is read anew."""
    hub, url = server
    config = b'{"model_type": "llama", "hidden_size": 64}'
    hub.way = model_of(config)
    for spoil in SPOILERS:
        first = load_hub("x/y", endpoint=url, token="")
        entries = [path for path in (home / "home").rglob("*") if path.is_file()]
        assert len(entries) == 3
        for path in entries:
            spoil(path)
        assert load_hub("x/y", endpoint=url, token="").config == first.config
        for path in entries:
            if path.is_dir():
                path.rmdir()


def _flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-3] ^= 1
    path.write_bytes(data)


def _pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def _folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def _link(path: Path) -> None:
    path.unlink()
    path.symlink_to(path)


def _zero(path: Path) -> None:
    path.unlink()
    path.symlink_to("/dev/zero")


SPOILERS: list[Callable[[Path], object]] = [
    _flip,
    _pipe,
    _folder,
    _link,
    _zero,
    lambda path: path.write_bytes(b""),
    lambda path: path.write_bytes(b"\n"),
    lambda path: path.write_bytes(b"[" * 100_000),
    lambda path: path.write_bytes(b"\xff" * 200),
    lambda path: path.chmod(0),
]
