"""GGUF headers for tests, written by the format's description."""

import struct
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

from memcalc.sources.gguf.ggml_types import GGML_TYPES

_NUMBERS = {name: (number, kind) for number, kind in GGML_TYPES.items() for name in (kind.name,)}


@dataclass(frozen=True)
class Typed:
    """A metadata value with its type's number, where Python's own type does not tell it."""

    kind: int
    value: Any


def gguf(
    tensors: Mapping[str, tuple[str, tuple[int, ...]]],
    metadata: Mapping[str, Any] | None = None,
    *,
    version: int = 3,
    order: str = "<",
) -> tuple[bytes, int]:
    """(header, size of the whole file). Shapes are PyTorch's, rows first."""
    pack = _Packer(order)
    out = b"GGUF" + pack.number("I", version) + pack.number("Q", len(tensors)) + pack.number("Q", len(metadata or {}))
    for key, value in (metadata or {}).items():
        out += pack.text(key) + pack.value(value)
    at = 0
    for name, (kind, shape) in tensors.items():
        number, ggml = _NUMBERS[kind]
        sizes = b"".join(pack.number("Q", size) for size in reversed(shape))
        out += pack.text(name) + pack.number("I", len(shape)) + sizes + pack.number("I", number) + pack.number("Q", at)
        at += -(-prod(shape) // ggml.block * ggml.nbytes // 32) * 32
    return out, -(-len(out) // 32) * 32 + at


class _Packer:
    def __init__(self, order: str) -> None:
        self.order = order

    def number(self, code: str, value: Any) -> bytes:
        return struct.pack(self.order + code, value)

    def text(self, value: str) -> bytes:
        data = value.encode()
        return self.number("Q", len(data)) + data

    def value(self, value: Any) -> bytes:
        if isinstance(value, Typed):
            code = {0: "B", 4: "I", 6: "f", 10: "Q", 12: "d"}[value.kind]
            return self.number("I", value.kind) + self.number(code, value.value)
        if isinstance(value, bool):
            return self.number("I", 7) + self.number("?", value)
        if isinstance(value, int):
            return self.number("I", 4) + self.number("I", value)
        if isinstance(value, float):
            return self.number("I", 6) + self.number("f", value)
        if isinstance(value, str):
            return self.number("I", 8) + self.text(value)
        kind = 8 if isinstance(value[0], str) else 4
        items = [self.text(item) if kind == 8 else self.number("I", item) for item in value]
        return self.number("I", 9) + self.number("I", kind) + self.number("Q", len(value)) + b"".join(items)


Shapes = dict[str, tuple[str, tuple[int, ...]]]


_MATRICES = {
    "attn_q": (512, 512),
    "attn_k": (128, 512),
    "attn_v": (128, 512),
    "attn_output": (512, 512),
    "ffn_gate": (1024, 512),
    "ffn_up": (1024, 512),
    "ffn_down": (512, 1024),
}


def llama_gguf(
    depth: int = 2, tied: bool = False, more: Mapping[str, Any] | None = None
) -> tuple[Shapes, dict[str, Any]]:
    """Tensors and metadata of a small model: Q4_K matrices, Q6_K head, F32 norms."""
    tensors: Shapes = {"token_embd.weight": ("Q4_K", (1000, 512))}
    for i in range(depth):
        for name, shape in _MATRICES.items():
            tensors[f"blk.{i}.{name}.weight"] = ("Q4_K", shape)
        tensors[f"blk.{i}.attn_norm.weight"] = ("F32", (512,))
        tensors[f"blk.{i}.ffn_norm.weight"] = ("F32", (512,))
    tensors["output_norm.weight"] = ("F32", (512,))
    tensors["rope_freqs.weight"] = ("F32", (32,))
    if not tied:
        tensors["output.weight"] = ("Q6_K", (1000, 512))
    metadata = {
        "general.architecture": "llama",
        "general.file_type": 15,
        "llama.block_count": depth,
        "llama.embedding_length": 512,
        "llama.feed_forward_length": 1024,
        "llama.attention.head_count": 8,
        "llama.attention.head_count_kv": 2,
        "llama.context_length": 8192,
        "llama.rope.freq_base": 500000.0,
        "tokenizer.ggml.tokens": [f"word{i}" for i in range(5000)],
        **(more or {}),
    }
    return tensors, metadata
