"""GGUF headers: types, shapes, bytes, and what a damaged file is called."""

import struct
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.gguf_files import Typed, gguf, llama_gguf

from memcalc.errors import CheckpointError
from memcalc.sources.checkpoint.stored_tensor import Role
from memcalc.sources.gguf.config import config_from_gguf
from memcalc.sources.gguf.ggml_types import GGML_TYPES
from memcalc.sources.gguf.header import GgufHeader, gguf_checkpoint, read_gguf

LINEAR = 2 * (2 * 512 * 512 + 2 * 128 * 512 + 3 * 1024 * 512)


class Memory:
    def __init__(self, data: bytes, size: int | None) -> None:
        self.data, self.size, self.furthest = data, size, 0

    def read(self, offset: int, length: int) -> bytes:
        found = self.data[offset : offset + length]
        if self.size is not None:
            found += bytes(max(0, min(length, self.size - offset) - len(found)))
        self.furthest = max(self.furthest, offset + length)
        return found


def read(tensors: Any, metadata: Any, **options: Any) -> GgufHeader:
    return read_gguf(Memory(*gguf(tensors, metadata, **options)), "m.gguf")


def refused(data: bytes, size: int | None = None) -> str:
    with pytest.raises(CheckpointError) as caught:
        read_gguf(Memory(data, len(data) if size is None else size), "m.gguf")
    text = str(caught.value)
    assert "m.gguf" in text
    assert "\n" not in text
    return text


@pytest.mark.parametrize(("version", "order"), [(2, "<"), (3, "<"), (3, ">")])
def test_a_small_model(version: int, order: str) -> None:
    header = read(*llama_gguf(), version=version, order=order)
    held = gguf_checkpoint([("m.gguf", header)])
    assert header.version == version
    assert held.parameters == LINEAR + 2 * 1000 * 512 + 5 * 512
    assert held.stored_bytes_by_dtype == {
        "Q4_K": (LINEAR + 512_000) // 256 * 144,
        "Q6_K": 512_000 // 256 * 210,
        "F32": (5 * 512 + 32) * 4,
    }
    assert [t.name for t in held.tensors if t.role is Role.BUFFER] == ["rope_freqs.weight"]
    assert str(held.quantization) == "GGUF Q4_K_M"
    assert held.shapes["blk.0.ffn_down.weight"] == (512, 1024)
    assert held.loaded_bytes("bf16") < held.stored_bytes


def test_bits_per_weight_of_every_type() -> None:
    """The figures that llama.cpp's documentation gives for its types, bits per weight."""
    known = {
        "Q4_0": 4.5,
        "Q4_1": 5.0,
        "Q5_0": 5.5,
        "Q5_1": 6.0,
        "Q8_0": 8.5,
        "Q2_K": 2.625,
        "Q3_K": 3.4375,
        "Q4_K": 4.5,
        "Q5_K": 5.5,
        "Q6_K": 6.5625,
        "IQ2_XXS": 2.0625,
        "IQ2_XS": 2.3125,
        "IQ2_S": 2.5625,
        "IQ3_XXS": 3.0625,
        "IQ3_S": 3.4375,
        "IQ1_S": 1.5625,
        "IQ1_M": 1.75,
        "IQ4_NL": 4.5,
        "IQ4_XS": 4.25,
        "TQ1_0": 1.6875,
        "TQ2_0": 2.0625,
        "MXFP4": 4.25,
        "NVFP4": 4.5,
        "BF16": 16.0,
        "F16": 16.0,
        "F32": 32.0,
    }
    bits = {kind.name: kind.nbytes * 8 / kind.block for kind in GGML_TYPES.values()}
    assert {name: bits[name] for name in known} == known


def test_the_architecture_in_config_words() -> None:
    config = config_from_gguf(read(*llama_gguf()), "m.gguf")
    assert config == {
        "model_type": "llama",
        "num_hidden_layers": 2,
        "hidden_size": 512,
        "intermediate_size": 1024,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "max_position_embeddings": 8192,
        "rope_theta": 500000.0,
        "vocab_size": 1000,
        "tie_word_embeddings": False,
    }
    assert config_from_gguf(read(*llama_gguf(tied=True)), "m.gguf")["tie_word_embeddings"] is True


def test_head_counts_may_differ_by_layer() -> None:
    more = {"llama.attention.head_count": [8, 8], "llama.attention.head_count_kv": [2, 4]}
    config = config_from_gguf(read(*llama_gguf(more=more)), "m.gguf")
    assert config["num_attention_heads"] == 8
    assert config["num_key_value_heads"] == [2, 4]


def test_experts() -> None:
    config = config_from_gguf(read(*llama_gguf(more={"llama.expert_count": 8, "llama.expert_used_count": 2})), "m.gguf")
    assert (config["model_type"], config["num_local_experts"], config["num_experts_per_tok"]) == ("mixtral", 8, 2)


def test_little_more_than_the_header_is_read() -> None:
    tensors, metadata = llama_gguf(more={"tokenizer.ggml.tokens": [f"word{i}" for i in range(60_000)]})
    data, size = gguf(tensors, metadata)
    source = Memory(data, 10**12)
    header = read_gguf(source, "m.gguf")
    assert header.nbytes == len(data)
    assert source.furthest < len(data) + 2**21
    assert header.metadata["tokenizer.ggml.tokens"] == (60_000,)
    assert size < 10**12


def test_without_a_known_size_the_header_is_enough() -> None:
    assert len(read_gguf(Memory(gguf(*llama_gguf())[0], None), "m.gguf").tensors) == 22


def test_split_files_are_one_model() -> None:
    tensors, metadata = llama_gguf()
    names = list(tensors)
    parts = [read({name: tensors[name] for name in chosen}, metadata) for chosen in (names[:5], names[5:])]
    whole = gguf_checkpoint([("m.gguf", read(tensors, metadata))])
    assert (
        gguf_checkpoint([("m-00001-of-00002.gguf", parts[0]), ("m-00002-of-00002.gguf", parts[1])]).parameters
        == whole.parameters
    )


def test_an_unknown_type_has_the_bytes_up_to_the_next_tensor() -> None:
    data, size = gguf({"a": ("Q4_0", (4, 64)), "b": ("F32", (8,))}, {})
    changed = data.replace(struct.pack("<QIQ", 4, 2, 0), struct.pack("<QIQ", 4, 999, 0))
    header = read_gguf(Memory(changed, size), "m.gguf")
    assert (header.tensors[0].type, header.tensors[0].nbytes) == ("type 999", 160)
    assert "999" in header.notes[0]


START = b"GGUF" + struct.pack("<I", 3)


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"", "cut short"),
        (b"GG", "cut short"),
        (b"PK\x03\x04" + bytes(40), "zip archive"),
        (b"version https://git-lfs.github.com/spec/v1\n", "git lfs pull"),
        (b"<!DOCTYPE html>", "web page"),
        (b"ggjt" + bytes(40), "not a GGUF file"),
        (b"GGUF" + struct.pack("<IQQ", 1, 0, 0), "version 1"),
        (b"GGUF" + struct.pack("<IQQ", 4, 0, 0), "version 4"),
        (b"GGUF" + struct.pack("<IQQ", 0, 0, 0), "version 0"),
        (START, "cut short"),
        (START + struct.pack("<QQ", 2**63, 0), "9,223,372,036,854,775,808 tensors"),
        (START + struct.pack("<QQ", 0, 2**60), "metadata entries"),
        (START + struct.pack("<QQQ", 0, 1, 2**40) + bytes(80), "bytes of text"),
        (START + struct.pack("<QQQ1sI", 0, 1, 1, b"a", 77) + bytes(40), "unknown type 77"),
        (START + struct.pack("<QQQ1sIIQ", 0, 1, 1, b"a", 9, 8, 2**50) + bytes(40), "array items"),
        (START + struct.pack("<QQQ1sI", 1, 0, 1, b"a", 99) + bytes(80), "99 dimensions"),
        (START + struct.pack("<QQQ1sIQIQ", 1, 0, 1, b"a", 1, 2**63, 0, 0) + bytes(80), "absurd shape"),
    ],
)
def test_files_that_are_damaged(data: bytes, words: str) -> None:
    assert words in refused(data)


def test_a_header_that_stops_anywhere_is_cut_short() -> None:
    data, _ = gguf(*llama_gguf())
    for length in (30, 100, 1000, len(data) // 2, len(data) - 1):
        assert "cut short" in refused(data[:length]) or "can hold" in refused(data[:length])


def test_missing_weights_are_noticed() -> None:
    data, size = gguf(*llama_gguf())
    assert "past the file's end" in refused(data + bytes(1000), size - 5000)


def test_alignment_and_kind_are_checked() -> None:
    assert "alignment" in refused(*gguf({}, {"general.alignment": 0}))
    projector = read({}, {"general.architecture": "clip", "general.type": "mmproj"})
    with pytest.raises(CheckpointError, match="not a language model"):
        config_from_gguf(projector, "mmproj.gguf")


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_any_damage_is_read_or_refused(data: st.DataObject) -> None:
    start, size = gguf({"a": ("F32", (4,))}, {"general.alignment": 32, "k": [1, 2], "s": ["x"], "f": Typed(6, 1.0)})
    changed = bytearray(start)
    for _ in range(data.draw(st.integers(1, 3))):
        changed[data.draw(st.integers(4, len(start) - 1))] = data.draw(st.integers(0, 255))
    try:
        read_gguf(Memory(bytes(changed), size), "m")
    except CheckpointError as problem:
        words = str(problem)
    else:
        words = ""
    assert words.isprintable()
