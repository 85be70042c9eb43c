"""Safetensors and GGUF files for tests: true headers, and data that takes no room."""

import json
import struct
from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import Any

from memcalc.config.quantization import find_quantization
from memcalc.sources.checkpoint.checkpoint import Checkpoint, assemble
from memcalc.sources.checkpoint.safetensors import BITS, parse_header

Tensors = Mapping[str, tuple[str, tuple[int, ...]]]


def entries(tensors: Tensors) -> dict[str, Any]:
    """Header entries of tensors (dtype, shape), one behind the other."""
    found, at = {}, 0
    for name, (dtype, shape) in tensors.items():
        nbytes = prod(shape) * BITS[dtype] // 8
        found[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [at, at + nbytes]}
        at += nbytes
    return found


def header(tensors: Tensors, metadata: Mapping[str, Any] | None = None) -> bytes:
    """Length and JSON; the data is not there."""
    raw: dict[str, Any] = entries(tensors)
    if metadata is not None:
        raw = {"__metadata__": metadata, **raw}
    return framed(json.dumps(raw).encode())


def framed(text: bytes) -> bytes:
    return struct.pack("<Q", len(text)) + text


def data_bytes(tensors: Tensors) -> int:
    return sum(prod(shape) * BITS[dtype] // 8 for dtype, shape in tensors.values())


def write(path: Path, tensors: Tensors, metadata: Mapping[str, Any] | None = None) -> Path:
    """A file of true size whose data is a hole."""
    path.parent.mkdir(parents=True, exist_ok=True)
    start = header(tensors, metadata)
    with path.open("wb") as file:
        file.write(start)
        file.truncate(len(start) + data_bytes(tensors))
    return path


def write_json(path: Path, value: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(value))
    return path


def checkpoint(
    tensors: Tensors,
    config: Mapping[str, Any] | None = None,
    metadata: Mapping[str, Any] | None = None,
    hf_quant: Mapping[str, Any] | None = None,
) -> Checkpoint:
    """The checkpoint of one file with these tensors."""
    text = header(tensors, metadata)[8:]
    return assemble(
        [("model.safetensors", parse_header(text, "m", data_bytes(tensors)))], find_quantization(config, hf_quant)
    )


def layers(count: int, hidden: int = 64, dtype: str = "BF16", start: int = 0) -> dict[str, tuple[str, tuple[int, ...]]]:
    """A small Llama's layers under their usual names."""
    return {
        f"model.layers.{i}.{name}.weight": (dtype, shape)
        for i in range(start, start + count)
        for name, shape in (
            ("self_attn.q_proj", (hidden, hidden)),
            ("self_attn.k_proj", (hidden // 2, hidden)),
            ("self_attn.v_proj", (hidden // 2, hidden)),
            ("self_attn.o_proj", (hidden, hidden)),
            ("mlp.gate_proj", (hidden * 3, hidden)),
            ("mlp.up_proj", (hidden * 3, hidden)),
            ("mlp.down_proj", (hidden, hidden * 3)),
            ("input_layernorm", (hidden,)),
            ("post_attention_layernorm", (hidden,)),
        )
    }
