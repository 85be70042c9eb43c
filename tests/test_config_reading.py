"""config.json files as people have them, whole and broken: one sentence for each fault."""

import json
import os
from pathlib import Path

import pytest

from memcalc.errors import ConfigError
from memcalc.sources.config import read_config

GOOD = {"model_type": "llama", "hidden_size": 64}


def write(folder: Path, content: bytes | str, name: str = "config.json") -> str:
    path = folder / name
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return str(path)


def refusal(path: str) -> str:
    with pytest.raises(ConfigError) as problem:
        read_config(path)
    message = str(problem.value)
    assert "\n" not in message
    assert "\x1b" not in message
    assert 20 < len(message) < 400
    return message


def test_a_file_and_its_folder_are_the_same(tmp_path: Path) -> None:
    folder = tmp_path / "tiny-llama"
    folder.mkdir()
    path = write(folder, json.dumps(GOOD))
    assert read_config(path) == (GOOD, "tiny-llama")
    assert read_config(str(folder)) == (GOOD, "tiny-llama")
    assert read_config(str(folder) + "/") == (GOOD, "tiny-llama")


def test_the_name_of_the_current_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "here").mkdir()
    write(tmp_path / "here", json.dumps(GOOD))
    monkeypatch.chdir(tmp_path / "here")
    assert read_config(".")[1] == "here"
    assert read_config("config.json")[1] == "here"


def test_another_file_name_is_the_model_s_name(tmp_path: Path) -> None:
    assert read_config(write(tmp_path, json.dumps(GOOD), "my-8b.json"))[1] == "my-8b"


@pytest.mark.parametrize(
    "content",
    [
        b"\xef\xbb\xbf" + json.dumps(GOOD).encode(),
        b"\n  " + json.dumps(GOOD, indent=4).encode() + b"\n\n",
    ],
)
def test_byte_order_marks_and_space_are_harmless(tmp_path: Path, content: bytes) -> None:
    assert read_config(write(tmp_path, content))[0] == GOOD


def test_infinity_and_nan_are_legal_in_real_configs(tmp_path: Path) -> None:
    config, _ = read_config(write(tmp_path, '{"time_step_limit": [0.0, Infinity], "x": -Infinity, "y": NaN}'))
    assert config["time_step_limit"][1] == float("inf")


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "empty"),
        (b" \n\t ", "empty"),
        (b'{"model_type": "llama", "hidden_size"', "not valid JSON"),
        (b"[]", "list"),
        (b"[1, 2]", "list"),
        (b'"llama"', "str"),
        (b"17", "int"),
        (b"null", "object is needed"),
        (b'{"hidden_size": 1, "hidden_size": 2}', "'hidden_size' twice"),
        (b'{"a": {"b\\u001b[2J": 1, "b\\u001b[2J": 2}}', "twice"),
        (b"\xff\xfe{\x00}\x00", "not UTF-8"),
        (b'{"name": "\xe9"}', "not UTF-8"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 7\n", "Git LFS pointer"),
        (b"<!doctype html><title>Sign in</title>", "web page"),
        (b'{"a":' * 100_000 + b"1" + b"}" * 100_000, "nested too deeply"),
        (b'{"hidden_size": ' + b"9" * 10_000 + b"}", "digits"),
        (b"{" * 50_000_000, "larger than 10 MB"),
        (b"hello", "not valid JSON"),
        (b"\x00" * 100, "not valid JSON"),
    ],
)
def test_what_is_no_config(tmp_path: Path, content: bytes, says: str) -> None:
    assert says in refusal(write(tmp_path, content))


def test_a_path_that_does_not_exist(tmp_path: Path) -> None:
    assert "does not exist" in refusal(str(tmp_path / "nothing.json"))
    assert "does not exist" in refusal(str(tmp_path / "\x1b[2Jnothing"))
    assert "holds no config.json" in refusal(str(tmp_path))
    assert "empty" in refusal("")
    assert "zero byte" in refusal("a\0b")


def test_a_path_through_a_file_or_too_long(tmp_path: Path) -> None:
    path = write(tmp_path, "{}")
    assert "cannot be opened" in refusal(path + "/config.json")
    assert "cannot be opened" in refusal("x" * 5000)


def test_a_file_that_may_not_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path, "{}")
    os.chmod(path, 0)
    if os.access(path, os.R_OK):  # root may read everything, so the system's answer is put in its mouth

        def forbidden(*_: object) -> int:
            raise PermissionError(13, "Permission denied")

        monkeypatch.setattr(os, "open", forbidden)
    assert "may not be read" in refusal(path)


def test_a_link_in_a_circle(tmp_path: Path) -> None:
    link = tmp_path / "config.json"
    link.symlink_to(link)
    assert "symbolic link" in refusal(str(link))
    assert "symbolic link" in refusal(str(tmp_path))


def test_a_link_to_a_config_is_followed(tmp_path: Path) -> None:
    (tmp_path / "blobs").mkdir()
    (tmp_path / "model").mkdir()
    target = write(tmp_path / "blobs", json.dumps(GOOD), "abc123")
    (tmp_path / "model" / "config.json").symlink_to(target)
    assert read_config(str(tmp_path / "model")) == (GOOD, "model")


def test_a_pipe_does_not_block_and_a_device_is_no_config(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "config.json")
    assert "not a regular file" in refusal(str(tmp_path))
    assert "not a regular file" in refusal("/dev/zero")
