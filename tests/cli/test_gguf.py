"""`from-file model.gguf`: shapes from the metadata, bytes by the tensors' types, and files that are damaged."""

from pathlib import Path
from typing import Any

import pytest
from support.cli_runs import answer, assumes, refused, weights
from support.gguf_files import gguf, llama_gguf


def gguf_file(path: Path) -> str:
    start, size = gguf(*llama_gguf())
    with path.open("wb") as file:
        file.write(start)
        file.truncate(size)
    return str(path)


def test_a_gguf_file(tmp_path: Path) -> None:
    path = gguf_file(tmp_path / "model-Q4_K_M.gguf")
    found = answer("from-file", path, "--mode", "inference")
    assert found["setup"]["engine"] == "llama.cpp"
    assert assumes(found, "engine llama.cpp, as the weights are GGUF")
    parts = {part["name"]: part["bytes"] for part in found["components"]["model_weights"]["parts"]}
    matrices = 2 * (2 * 512 * 512 + 2 * 128 * 512 + 3 * 1024 * 512)
    assert parts["Q4_K weights"] == matrices // 256 * 144
    assert parts["Q6_K weights"] == 512_000 // 256 * 210
    assert found["model"]["parameters"]["total"] == matrices + 2 * 512_000 + 5 * 512
    assert found["kv_cache_bytes"] == 2 * 2 * 2 * 64 * 256 * 2
    assert assumes(found, "the token embedding among them")
    other = answer("from-file", path, "--mode", "inference", "--engine", "transformers")
    assert weights(other) > weights(found)
    assert assumes(other, "unpacks GGUF")
    assert assumes(answer("from-file", path), "unpacked to fp32 for training")


def test_a_gguf_file_whose_layers_differ(tmp_path: Path) -> None:
    """Heads and widths by layer (OpenELM): lists in the metadata."""
    heads, kv_heads, widths = [4, 6], [2, 3], [256, 512]
    tensors: dict[str, tuple[str, tuple[int, ...]]] = {"token_embd.weight": ("F16", (100, 128))}
    for i in range(2):
        for name, shape in (
            ("attn_qkv", ((heads[i] + 2 * kv_heads[i]) * 32, 128)),
            ("attn_output", (128, heads[i] * 32)),
            ("ffn_gate", (widths[i], 128)),
            ("ffn_up", (widths[i], 128)),
            ("ffn_down", (128, widths[i])),
        ):
            tensors[f"blk.{i}.{name}.weight"] = ("F16", shape)
    metadata = {
        "general.architecture": "openelm",
        "openelm.block_count": 2,
        "openelm.embedding_length": 128,
        "openelm.attention.head_count": heads,
        "openelm.attention.head_count_kv": kv_heads,
        "openelm.attention.key_length": 32,
        "openelm.feed_forward_length": widths,
    }
    start, size = gguf(tensors, metadata)
    (tmp_path / "m.gguf").write_bytes(start + bytes(size - len(start)))
    found = answer("from-file", str(tmp_path / "m.gguf"), "--mode", "inference")
    assert found["kv_cache_bytes"] == 256 * sum(kv_heads) * 2 * 32 * 2
    llama = llama_gguf(more={"llama.attention.head_count_kv": [2, 4]})
    start, size = gguf(*llama)
    (tmp_path / "l.gguf").write_bytes(start + bytes(size - len(start)))
    assert "num_key_value_heads" in refused(1, "from-file", str(tmp_path / "l.gguf"))


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (lambda data: data[:200], "cut short"),
        (lambda data: data[:-1], "past the file's end"),
        (lambda data: data[:4] + b"\x63\0\0\0" + data[8:], "GGUF version 99"),
        (lambda data: data[:8] + b"\xff" * 7 + b"\x0f" + data[16:], "tensors"),
        (lambda data: b"GGML" + data[4:], "not a GGUF file"),
    ],
    ids=["in the header", "in the data", "version", "counts", "magic"],
)
def test_gguf_files_that_are_damaged(tmp_path: Path, damage: Any, says: str) -> None:
    data = Path(gguf_file(tmp_path / "whole.gguf")).read_bytes()
    (tmp_path / "model.gguf").write_bytes(damage(data))
    assert says in refused(1, "from-file", str(tmp_path / "model.gguf"), "--mode", "inference")
