"""Llama and its closest kin: RMSNorm before attention and MLP, rotary embedding, SwiGLU."""

from __future__ import annotations

from collections.abc import Callable

from memcalc.model import ops
from memcalc.model.config import Config
from memcalc.model.families import Family
from memcalc.model.module import Module, Stack
from memcalc.model.network import CausalLM, DecoderModel, Network
from memcalc.model.sublayers.attention import GroupedQueryAttention, Rotation
from memcalc.model.sublayers.linear import Embedding
from memcalc.model.sublayers.mlp import GatedMLP
from memcalc.model.sublayers.norms import RMSNorm
from memcalc.model.sublayers.rotary import RotaryEmbedding
from memcalc.model.tensor import Tensor


class PreNormBlock(Module):
    """A decoder block that normalises what goes into attention and MLP, and adds what comes out."""

    def __init__(self, attention: Module, mlp: Module, norm: Callable[[], Module]) -> None:
        self.self_attn = attention
        self.mlp = mlp
        self.input_layernorm = norm()
        self.post_attention_layernorm = norm()

    scope = "residual stream"

    def forward(self, hidden: Tensor, rotation: Rotation, mask: Tensor | None, position_ids: Tensor) -> Tensor:
        """[b, s, h] to [b, s, h]."""
        residual = hidden
        hidden = self.input_layernorm(hidden)
        hidden, _weights = self.self_attn(hidden, rotation, mask)
        hidden = ops.add(residual, hidden)
        residual = hidden
        hidden = self.post_attention_layernorm(hidden)
        hidden = self.mlp(hidden)
        return ops.add(residual, hidden)


def _build(c: Config, architecture: str | None, *, bias: bool = False, out_bias: bool = False, head_norm: bool = False) -> Network:
    hidden, vocab = c.integer("hidden_size"), c.integer("vocab_size")
    heads, kv_heads, head_dim = c.heads()

    def block(_: int) -> Module:
        attention = GroupedQueryAttention(
            hidden, heads, kv_heads, head_dim, bias=bias, out_bias=out_bias, head_norm=head_norm,
            dropout=c.probability("attention_dropout", 0.0),
        )  # fmt: skip
        mlp = GatedMLP(hidden, c.integer("intermediate_size"), c.text("hidden_act"), bias=c.flag("mlp_bias"))
        return PreNormBlock(attention, mlp, lambda: RMSNorm(hidden))

    model = DecoderModel(
        Embedding(vocab, hidden),
        Stack(["block"] * c.integer("num_hidden_layers"), block),
        RMSNorm(hidden),
        RotaryEmbedding(head_dim),
    )
    return CausalLM(model, hidden, vocab, tied=c.flag("tie_word_embeddings"))


def llama(c: Config, architecture: str | None) -> Network:
    """Llama 1 to 3 and whatever else calls itself llama (Yi, SmolLM, ...)."""
    bias = c.flag("attention_bias")
    return _build(c, architecture, bias=bias, out_bias=bias)


def mistral(c: Config, architecture: str | None) -> Network:
    """Mistral 7B and its successors: Llama's layers; the sliding window changes no shape in training."""
    return _build(c, architecture)


def qwen2(c: Config, architecture: str | None) -> Network:
    """Qwen 2 and 2.5: a bias on query, key and value."""
    return _build(c, architecture, bias=True)


def qwen3(c: Config, architecture: str | None) -> Network:
    """Qwen 3: a norm over each head's query and key."""
    bias = c.flag("attention_bias")
    return _build(c, architecture, bias=bias, out_bias=bias, head_norm=True)


_ROWS = "measured rows, exact counts"
FAMILIES = {
    "llama": Family("llama", llama, {
        "vocab_size": 32000, "hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32,
        "num_attention_heads": 32, "hidden_act": "silu", "max_position_embeddings": 2048, "tie_word_embeddings": False,
    }, verified=_ROWS),
    "mistral": Family("mistral", mistral, {
        "vocab_size": 32000, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
        "num_attention_heads": 32, "num_key_value_heads": 8, "hidden_act": "silu", "max_position_embeddings": 131072,
        "sliding_window": 4096, "tie_word_embeddings": False,
    }, verified=_ROWS),
    "qwen2": Family("qwen2", qwen2, {
        "vocab_size": 151936, "hidden_size": 4096, "intermediate_size": 22016, "num_hidden_layers": 32,
        "num_attention_heads": 32, "num_key_value_heads": 32, "hidden_act": "silu", "max_position_embeddings": 32768,
        "tie_word_embeddings": False,
    }, verified=_ROWS),
    "qwen3": Family("qwen3", qwen3, {
        "vocab_size": 151936, "hidden_size": 4096, "intermediate_size": 22016, "num_hidden_layers": 32,
        "num_attention_heads": 32, "num_key_value_heads": 32, "head_dim": 128, "hidden_act": "silu",
        "max_position_embeddings": 32768, "tie_word_embeddings": False,
    }, verified=_ROWS),
}  # fmt: skip
