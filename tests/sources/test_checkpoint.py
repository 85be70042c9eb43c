"""Safetensors headers: what is stored, what is refused, and in which words."""

import json
import struct
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.weights import checkpoint, data_bytes, entries, framed, header, layers

from memcalc.errors import CheckpointError
from memcalc.sources.checkpoint.checkpoint import assemble
from memcalc.sources.checkpoint.safetensors import BITS, HEADER_CAP, Header, parse_header, read_header
from memcalc.sources.checkpoint.stored_tensor import Role


class Memory:
    """A file in memory that says how much of it was read."""

    def __init__(self, data: bytes, size: int | None = None) -> None:
        self.data, self.size, self.furthest = data, len(data) if size is None else size, 0

    def read(self, offset: int, length: int) -> bytes:
        self.furthest = max(self.furthest, offset + length)
        return self.data[offset : offset + length]


def refused(data: bytes, size: int | None = None) -> str:
    with pytest.raises(CheckpointError) as caught:
        read_header(Memory(data, size), "m.safetensors")
    text = str(caught.value)
    assert "m.safetensors" in text
    assert "\n" not in text
    assert text.endswith(".")
    return text


def one(entry: Any) -> bytes:
    return framed(json.dumps({"w": entry}).encode()) + bytes(64)


def test_nothing_behind_the_header_is_read() -> None:
    tensors = layers(2)
    start = header(tensors)
    file = Memory(start, len(start) + data_bytes(tensors))
    found = read_header(file, "m")
    assert file.furthest == len(start) == found.nbytes
    assert sum(t.nbytes for t in found.tensors) == data_bytes(tensors)
    assert found.notes == ()


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"", "0 bytes"),
        (b"\x10\0\0", "cut short"),
        (struct.pack("<Q", 2**63) + b"{}" + bytes(60), "9,223,372,036,854,775,808"),
        (struct.pack("<Q", 500) + b"{}", "cut short"),
        (framed(b'{"w": '), "not valid JSON"),
        (framed(b'{"w": 1, "w": 2}'), "twice"),
        (framed(b"[]"), "no JSON header"),
        (framed(b"{\xff}"), "not UTF-8"),
        (framed(b'{"w": ' + b"[" * 100_000 + b"}"), "nested too deeply"),
        (framed(b'{"w": ' + b"9" * 5000 + b"}"), "digits"),
        (b"PK\x03\x04" + bytes(100), "torch.save"),
        (b"\x80\x02}q\x00." + bytes(100), "pickle"),
        (b"GGUF\x03\0\0\0" + bytes(100), "GGUF"),
        (b"<!DOCTYPE html><html>", "web page"),
        (b'{"metadata": {}}', "JSON text"),
    ],
)
def test_files_that_are_none(data: bytes, words: str) -> None:
    assert words in refused(data)


def test_a_git_lfs_pointer_is_called_one() -> None:
    pointer = b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"a" * 64 + b"\nsize 4976698672\n"
    text = refused(pointer)
    assert "Git LFS pointer" in text
    assert "4,976,698,672" in text
    assert "git lfs pull" in text


def test_a_header_over_the_shared_limit_is_refused_unread() -> None:
    """A 7 GB file with 1.29 million tensors has a true header of 132,095,296 bytes; no reader takes it."""
    file = Memory(bytes.fromhex("409DDF0700000000"), 7_000_000_000)
    with pytest.raises(CheckpointError, match=r"132,095,296.*100,000,000"):
        read_header(file, "m")
    assert file.furthest <= 200
    assert HEADER_CAP == 100_000_000


@pytest.mark.parametrize(
    ("entry", "words"),
    [
        (5, "not described by an object"),
        ({"shape": [1], "data_offsets": [0, 4]}, "no dtype"),
        ({"dtype": "F32", "data_offsets": [0, 4]}, "shape"),
        ({"dtype": "F32", "shape": [-1], "data_offsets": [0, 4]}, "shape"),
        ({"dtype": "F32", "shape": [True], "data_offsets": [0, 4]}, "shape"),
        ({"dtype": "F32", "shape": [2**64], "data_offsets": [0, 4]}, "shape"),
        ({"dtype": "F32", "shape": [1.0], "data_offsets": [0, 4]}, "shape"),
        ({"dtype": "F32", "shape": [1]}, "data_offsets"),
        ({"dtype": "F32", "shape": [1], "data_offsets": [4]}, "data_offsets"),
        ({"dtype": "F32", "shape": [1], "data_offsets": [8, 4]}, "backwards"),
        ({"dtype": "F32", "shape": [20], "data_offsets": [0, 80]}, "16 bytes past the file's end"),
        ({"dtype": "F4", "shape": [3], "data_offsets": [0, 2]}, "whole number of bytes"),
    ],
)
def test_descriptions_that_cannot_be_true(entry: Any, words: str) -> None:
    assert words in refused(one(entry))


def test_overlapping_tensors() -> None:
    raw = {
        "a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]},
        "b": {"dtype": "F32", "shape": [2], "data_offsets": [4, 12]},
    }
    assert "a and b overlap" in refused(framed(json.dumps(raw).encode()) + bytes(12))


def test_names_never_act_on_the_terminal() -> None:
    evil = "\x1b[2Jw\nnext"
    text = refused(framed(json.dumps({evil: 1}).encode()))
    assert "\x1b" not in text
    assert "\\x1b[2Jw\\nnext" in text
    assert checkpoint({evil: ("F32", (2,))}).parameters == 2


def test_empty_scalar_and_narrow_tensors() -> None:
    raw = {
        "scalar": {"dtype": "I64", "shape": [], "data_offsets": [0, 8]},
        "mask": {"dtype": "BOOL", "shape": [8], "data_offsets": [8, 16]},
        "empty": {"dtype": "F32", "shape": [0, 128], "data_offsets": [16, 16]},
        "fp4": {"dtype": "F4", "shape": [4, 8], "data_offsets": [16, 32]},
        "bad": {"dtype": "F16", "shape": [4], "data_offsets": [32, 36]},
    }
    found = parse_header(json.dumps(raw).encode(), "m", 36)
    assert {t.name: t.nbytes for t in found.tensors} == {"scalar": 8, "mask": 8, "empty": 0, "fp4": 16, "bad": 4}
    (note,) = found.notes
    assert "bad" in note
    assert "4 instead of 8" in note
    held = assemble([("m", found)])
    assert held.parameters == 32 + 4
    assert {t.name for t in held.tensors if t.role is Role.BUFFER} == {"scalar", "mask"}


@pytest.mark.parametrize(
    ("metadata", "parameters", "notes"),
    [({}, 4, 0), (None, 4, 1), ({"step": 0}, 4, 1), ({"format": "pt"}, 4, 0), (["pt"], 4, 1)],
)
def test_metadata_as_people_write_it(metadata: Any, parameters: int, notes: int) -> None:
    raw = {"__metadata__": metadata, **entries({"w": ("BF16", (2, 2))})}
    found = parse_header(json.dumps(raw).encode(), "m", 8)
    assert assemble([("m", found)]).parameters == parameters
    assert len(found.notes) == notes


def test_a_file_with_metadata_only_holds_nothing() -> None:
    assert assemble([("m", parse_header(b'{"__metadata__": {"format": "pt"}}', "m", 0))]).parameters == 0


def test_holes_and_trailing_bytes_are_noted() -> None:
    raw = {"a": {"dtype": "U8", "shape": [4], "data_offsets": [4, 8]}}
    notes = parse_header(json.dumps(raw).encode(), "m", 10).notes
    assert [n.split(": ")[1].split()[0] for n in notes] == ["4", "2"]


def test_the_bits_of_every_dtype() -> None:
    eight = {name for name, bits in BITS.items() if bits == 8}
    assert eight >= {"BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2", "F8_E8M0", "F8_E4M3FNUZ"}
    assert (BITS["F4"], BITS["F6_E2M3"], BITS["F6_E3M2"], BITS["C64"], BITS["U64"]) == (4, 6, 6, 64, 64)


def test_an_unknown_dtype_has_its_bytes_all_the_same() -> None:
    raw = {"a": {"dtype": "F2", "shape": [16], "data_offsets": [0, 4]}}
    found = parse_header(json.dumps(raw).encode(), "m", 4)
    assert found.tensors[0].nbytes == 4
    assert "F2" in found.notes[0]


def test_buffers_take_bytes_and_are_no_parameters() -> None:
    held = checkpoint(
        {
            "wte.weight": ("F32", (10, 4)),
            "h.0.attn.bias": ("F32", (1, 1, 8, 8)),
            "h.0.attn.masked_bias": ("F32", ()),
            "h.0.attn.c_attn.bias": ("F32", (12,)),
            "rotary_emb.inv_freq": ("F32", (4,)),
            "embeddings.position_ids": ("I64", (1, 8)),
            "bn.running_mean": ("F32", (4,)),
            "bn.num_batches_tracked": ("I64", ()),
            "mlp.gate.e_score_correction_bias": ("F32", (16,)),
        }
    )
    assert held.parameters == 40 + 12
    assert held.stored_bytes == 4 * (40 + 64 + 1 + 12 + 4 + 4 + 16) + 8 * 9


names = st.text(max_size=12)
sizes = st.integers(-1, 2**64)
anything = st.recursive(
    st.none() | st.booleans() | sizes | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(names, inner, max_size=3),
    max_leaves=8,
)
described = st.fixed_dictionaries(
    {
        "dtype": st.sampled_from([*BITS, "F2"]),
        "shape": st.lists(st.integers(0, 9), max_size=3),
        "data_offsets": st.tuples(st.integers(0, 99), st.integers(0, 99)).map(list),
    }
)


@settings(max_examples=150, deadline=None)
@given(st.binary(max_size=80))
def test_any_bytes_are_read_or_refused(data: bytes) -> None:
    with suppress(CheckpointError):
        read_header(Memory(data), "m")


@settings(max_examples=150, deadline=None)
@given(st.dictionaries(names, described | anything, max_size=4), st.integers(0, 120))
def test_any_header_is_read_or_refused(raw: dict[str, Any], room: int) -> None:
    try:
        found = parse_header(json.dumps(raw).encode(), "m", room)
    except CheckpointError as problem:
        words = str(problem)
    else:
        words = _consistent(raw, room, found)
    assert words.isprintable()


def _consistent(raw: dict[str, Any], room: int, found: Header) -> str:
    held = assemble([("m", found)])
    assert len(held.tensors) == len(found.tensors) == len(raw) - ("__metadata__" in raw)
    assert 0 <= held.stored_bytes <= room
    assert held.parameters >= 0
    assert held.loaded_bytes(None) == held.stored_bytes
    return "".join(held.notes)


def test_official_reader_agrees() -> None:
    """The reference implementation reads the same names, dtypes and shapes from a file of ours."""
    import safetensors

    deserialize: Any = safetensors.deserialize

    tensors = {**layers(1), "scalar": ("F32", ()), "empty": ("F16", (0, 4)), "f8": ("F8_E4M3", (8, 8))}
    data = header(tensors, {"format": "pt"}) + bytes(data_bytes(tensors))
    official = {name: (entry["dtype"], tuple(entry["shape"])) for name, entry in deserialize(data)}
    ours = {t.name: (t.dtype, t.shape) for t in read_header(Memory(data), "m").tensors}
    assert official == ours == tensors
