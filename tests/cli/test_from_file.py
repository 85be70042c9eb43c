"""`from-file` with config.json files as people have them, whole and broken: one sentence for each fault."""

import json
import os
from pathlib import Path

import pytest
from support.cli_runs import refused, run
from support.reports import lines

LLAMA = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 256,
    "intermediate_size": 704,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "vocab_size": 1000,
}


def write(folder: Path, content: bytes | str | dict[str, object], name: str = "config.json") -> str:
    path = folder / name
    text = json.dumps(content) if isinstance(content, dict) else content
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return str(path)


def name_of(path: str) -> str:
    return str(json.loads(run("from-file", path, "--json").stdout)["model"]["name"])


def test_a_file_and_its_folder_are_the_same(tmp_path: Path) -> None:
    folder = tmp_path / "tiny-llama"
    folder.mkdir()
    path = write(folder, LLAMA)
    assert name_of(path) == name_of(str(folder)) == name_of(f"{folder}/") == "tiny-llama"
    found = json.loads(run("from-file", path, "--json", "--batch", "2").stdout)
    assert found["setup"]["batch"] == 2
    assert found["model"]["family"] == "llama"


def test_the_name_of_the_current_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "here").mkdir()
    write(tmp_path / "here", LLAMA)
    monkeypatch.chdir(tmp_path / "here")
    assert name_of(".") == name_of("config.json") == "here"


def test_another_file_name_is_the_model_s_name(tmp_path: Path) -> None:
    assert name_of(write(tmp_path, LLAMA, "my-8b.json")) == "my-8b.json"


@pytest.mark.parametrize(
    "content",
    [
        b"\xef\xbb\xbf" + json.dumps(LLAMA).encode(),
        b"\n  " + json.dumps(LLAMA, indent=4).encode() + b"\n\n",
        json.dumps(LLAMA)[:-1].encode() + b', "x": [Infinity, -Infinity, NaN]}',
    ],
    ids=["byte order mark", "space", "infinity"],
)
def test_what_real_configs_have_is_harmless(tmp_path: Path, content: bytes) -> None:
    assert "MODEL WEIGHTS" in run("from-file", write(tmp_path, content)).stdout


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
        (b"{" * 50_000_000, "not valid JSON"),
        (b"hello", "not valid JSON"),
        (b"\x00" * 100, "not valid JSON"),
        ("{}", "no 'model_type'"),
        ({"model_type": None}, "no 'model_type'"),
        ({"model_type": 7}, "no 'model_type'"),
        ({"model_type": "lama"}, "did you mean 'llama'"),
        ({"model_type": "\x1b[31mllama[/]\n"}, "llama"),
        (LLAMA | {"hidden_size": "many"}, "hidden_size"),
        (LLAMA | {"hidden_size": -1}, "hidden_size"),
        (LLAMA | {"hidden_size": None}, "hidden_size"),
        (LLAMA | {"num_hidden_layers": 1e30}, "num_hidden_layers"),
        (LLAMA | {"num_hidden_layers": 0}, "num_hidden_layers"),
        (LLAMA | {"num_attention_heads": 3}, "num_attention_heads"),
        (LLAMA | {"num_key_value_heads": 3}, "num_key_value_heads"),
        (LLAMA | {"vocab_size": [1]}, "vocab_size"),
        (LLAMA | {"quantization_config": "nf4"}, "'quantization_config' as 'nf4', but it must be an object"),
        (LLAMA | {"quantization_config": {"quant_method": "gptq", "bits": "four"}}, "'bits' in 'quantization_config'"),
        (LLAMA | {"vocab_size": "1\x1b[2J0"}, "vocab_size"),
    ],
)
def test_what_is_no_config(tmp_path: Path, content: bytes | str | dict[str, object], says: str) -> None:
    assert says in refused(1, "from-file", write(tmp_path, content))


def test_a_sequence_longer_than_rotary_positions_is_an_assumption(tmp_path: Path) -> None:
    path = write(tmp_path, LLAMA | {"max_position_embeddings": 512})
    found = json.loads(run("from-file", path, "--seq-len", "1024", "--json").stdout)
    assert any("512" in line for line in lines(found))


def test_a_name_with_escapes_does_not_reach_the_terminal(tmp_path: Path) -> None:
    folder = tmp_path / "evil\x1b[31m[bold]red[]"
    folder.mkdir()
    path = write(folder, LLAMA)
    text = run("from-file", path, "--color").stdout
    assert "\x1b[31m[bold]" not in text
    assert r"evil\x1b[31m[bold]red[]" in text
    assert r"evil\x1b" in refused(1, "from-file", str(folder / "nothing.json"))


@pytest.mark.parametrize("path", ["nothing.json", ".", "a/b/c", "x" * 5000, "a\0b", ""])
def test_paths_where_nothing_is(tmp_path: Path, path: str) -> None:
    refused(1, "from-file", f"{tmp_path}/{path}")


def test_a_file_that_may_not_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path, LLAMA)
    os.chmod(path, 0)
    if os.access(path, os.R_OK):  # root may read everything, so the system's answer is put in its mouth

        def forbidden(*_: object) -> int:
            raise PermissionError(13, "Permission denied")

        monkeypatch.setattr(os, "open", forbidden)
    assert "ermission denied" in refused(1, "from-file", path)


def test_a_link_in_a_circle(tmp_path: Path) -> None:
    link = tmp_path / "config.json"
    link.symlink_to(link)
    assert "symbolic link" in refused(1, "from-file", str(link))
    assert "symbolic link" in refused(1, "from-file", str(tmp_path))


def test_a_link_to_a_config_is_followed(tmp_path: Path) -> None:
    (tmp_path / "blobs").mkdir()
    (tmp_path / "model").mkdir()
    target = write(tmp_path / "blobs", LLAMA, "abc123")
    (tmp_path / "model" / "config.json").symlink_to(target)
    assert name_of(str(tmp_path / "model")) == "model"


def test_a_pipe_does_not_block_and_a_device_is_no_config(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "config.json")
    assert "not a regular file" in refused(1, "from-file", str(tmp_path))
    refused(1, "from-file", "/dev/zero")


@pytest.mark.parametrize("command", ["from-file", "inspect"])
def test_a_link_to_itself_is_told(command: str, tmp_path: Path) -> None:
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    message = refused(1, command, str(tmp_path / "loop"))
    assert "too many levels of symbolic links" in message
    assert "did you mean" not in message
