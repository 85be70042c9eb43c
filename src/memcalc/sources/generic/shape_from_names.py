"""The shape of a decoder read off its weights' names, for `--generic` only.

Whoever names its matrices q, k, v, gate, up and down like the Llama family can be estimated as one of that family. What
names and shapes do not tell (how many heads a matrix is cut into) has to come from elsewhere, or is reported missing.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

# What a matrix does, by the last words of its module's name. Sources: Transformers, the original Llama release, GGUF.
_ROLES: Mapping[str, tuple[str, ...]] = {
    "q": ("q_proj", "wq", "attn_q", "query", "q_lin", "to_q"),
    "k": ("k_proj", "wk", "attn_k", "key", "k_lin", "to_k"),
    "v": ("v_proj", "wv", "attn_v", "value", "v_lin", "to_v"),
    "qkv": ("qkv_proj", "query_key_value", "Wqkv", "attn_qkv", "qkv", "W_pack", "c_attn"),
    "o": ("o_proj", "wo", "attn_output", "out_proj", "dense", "to_out"),
    "gate": ("gate_proj", "w1", "ffn_gate", "linear_1"),
    "up": ("up_proj", "w3", "ffn_up", "linear_v"),
    "gate_up": ("gate_up_proj", "dense_h_to_4h", "w13"),
    "down": ("down_proj", "w2", "ffn_down", "dense_4h_to_h"),
    "embedding": ("embed_tokens", "wte", "tok_embeddings", "token_embd", "word_embeddings", "embedding", "embed_in"),
    "head": ("lm_head", "output", "embed_out", "head"),
    "q_norm": ("q_norm", "attn_q_norm", "q_layernorm"),
}
_BY_NAME = {name: role for role, names in _ROLES.items() for name in names}
_LAYER = re.compile(r"(?:^|\.)(?:layers|layer|h|blocks|block|blk)\.(\d+)\.")
_EXPERT = re.compile(r"\.experts\.(\d+)\.")


@dataclass(frozen=True)
class GenericShape:
    """A llama-like config's keys as far as they could be read, and the keys that are still missing."""

    config: dict[str, Any]
    missing: tuple[str, ...]


def generic_shape(shapes: Mapping[str, tuple[int, ...]], known: Mapping[str, Any] | None = None) -> GenericShape:
    """The config of a decoder whose unpacked weights have these names and shapes (rows out, columns in).

    Args:
        shapes: `Checkpoint.shapes`.
        known: keys that a config.json or the user gives; they win, and help where shapes do not tell (head_dim).
    """
    given = {key: value for key, value in (known or {}).items() if value is not None}
    first, layers, experts = _first_of_each(shapes)
    config: dict[str, Any] = {"num_hidden_layers": layers} if layers else {}
    embedding = first.get("embedding")
    if embedding and len(embedding) == 2:
        config.update(vocab_size=embedding[0], hidden_size=embedding[1], tie_word_embeddings="head" not in first)
    config.update(_feed_forward(first, experts))
    config.update(_attention(first, {**config, **given}))
    config.update({key: given[key] for key in given if key in NEEDED or key in config})
    return GenericShape(config, tuple(key for key in NEEDED if key not in config))


NEEDED = (
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "intermediate_size",
    "vocab_size",
)


def _first_of_each(shapes: Mapping[str, tuple[int, ...]]) -> tuple[dict[str, tuple[int, ...]], int, int]:
    """The first shape of every role, the number of layers, and of routed experts."""
    first: dict[str, tuple[int, ...]] = {}
    layers, experts = 0, 0
    for name, shape in shapes.items():
        layer, expert = _LAYER.search(name), _EXPERT.search(name)
        layers = max(layers, int(layer[1]) + 1 if layer else 0)
        experts = max(experts, int(expert[1]) + 1 if expert else 0)
        role = _role(name)
        if role and (layer is not None) == (role not in ("embedding", "head")):
            first.setdefault(f"expert {role}" if expert else role, shape)
    return first, layers, experts


def _role(name: str) -> str | None:
    parts = name.removesuffix(".weight").split(".")
    return _BY_NAME.get(parts[-1]) if name.endswith(".weight") or parts[-1] in _BY_NAME else None


def _feed_forward(first: Mapping[str, tuple[int, ...]], experts: int) -> Iterable[tuple[str, Any]]:
    up = first.get("up") or first.get("gate")
    if up and len(up) == 2:
        yield "intermediate_size", up[0]
    elif (fused := first.get("gate_up")) and len(fused) == 2:
        yield "intermediate_size", fused[0] // 2
    if experts:
        yield "num_experts", experts
        inner = first.get("expert up") or first.get("expert gate")
        if inner and len(inner) == 2:
            yield "moe_intermediate_size", inner[0]
            if not up:
                yield "intermediate_size", inner[0]


def _attention(first: Mapping[str, tuple[int, ...]], known: Mapping[str, Any]) -> Iterable[tuple[str, Any]]:
    """Heads follow from head_dim alone: stated, or told by a norm over each head, or by the stated number of heads."""
    rows = {role: first[role][0] for role in ("q", "k", "v") if len(first.get(role, ())) == 2}
    dim = known.get("head_dim")
    heads = known.get("num_attention_heads")
    norm = first.get("q_norm")
    if not dim and norm and len(norm) == 1 and rows.get("q", 0) > norm[0]:
        dim = norm[0]
    if not dim and heads and rows.get("q"):
        dim = rows["q"] // int(heads)
    if not dim:
        return
    yield "head_dim", dim
    if rows.get("q"):
        yield "num_attention_heads", rows["q"] // dim
        yield "num_key_value_heads", rows.get("k", rows["q"]) // dim
    elif heads and len(first.get("qkv", ())) == 2:
        yield "num_attention_heads", int(heads)
        yield "num_key_value_heads", (first["qkv"][0] - int(heads) * dim) // (2 * dim)
