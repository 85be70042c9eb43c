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


def _decoder(
    c: Config, windows: list[int | None], *, bias: bool = False, out_bias: bool = False, head_norm: bool = False
) -> Network:
    """A Llama-like causal LM whose layer i has the sliding window `windows[i]` (None: full attention)."""
    hidden, vocab = c.integer("hidden_size"), c.integer("vocab_size")
    heads, kv_heads, head_dim = c.heads()

    def block(layer: int) -> Module:
        attention = GroupedQueryAttention(
            hidden, heads, kv_heads, head_dim, bias=bias, out_bias=out_bias, head_norm=head_norm,
            dropout=c.probability("attention_dropout", 0.0), window=windows[layer],
        )  # fmt: skip
        mlp = GatedMLP(hidden, c.integer("intermediate_size"), c.text("hidden_act"), bias=c.flag("mlp_bias"))
        return PreNormBlock(attention, mlp, lambda: RMSNorm(hidden))

    embedding = Embedding(vocab, hidden)
    model = DecoderModel(embedding, Stack(windows, block), RMSNorm(hidden), RotaryEmbedding(head_dim), set(windows))
    return CausalLM(model, hidden, vocab, tied_to=embedding if c.flag("tie_word_embeddings") else None)


def _full(c: Config) -> list[int | None]:
    return [None] * c.integer("num_hidden_layers")


def _qwen_windows(c: Config) -> list[int | None]:
    """Qwen's layers from `max_window_layers` on have the window, if it is switched on at all."""
    depth = c.integer("num_hidden_layers")
    window = c.optional("sliding_window") if c.flag("use_sliding_window") else None
    first = c.integer("max_window_layers", 28, minimum=0)
    types = c.layer_types(["sliding_attention" if window and i >= first else "full_attention" for i in range(depth)])
    return [window if kind == "sliding_attention" else None for kind in types]


def llama(c: Config, architecture: str | None) -> Network:
    """Llama 1 to 3 and whatever else calls itself llama (Yi, SmolLM, ...)."""
    bias = c.flag("attention_bias")
    return _decoder(c, _full(c), bias=bias, out_bias=bias)


def mistral(c: Config, architecture: str | None) -> Network:
    """Mistral 7B and its successors: Llama's layers, all with the sliding window where the config has one."""
    return _decoder(c, [c.optional("sliding_window")] * c.integer("num_hidden_layers"))


def qwen2(c: Config, architecture: str | None) -> Network:
    """Qwen 2 and 2.5: a bias on query, key and value."""
    return _decoder(c, _qwen_windows(c), bias=True)


def qwen3(c: Config, architecture: str | None) -> Network:
    """Qwen 3: a norm over each head's query and key."""
    bias = c.flag("attention_bias")
    return _decoder(c, _qwen_windows(c), bias=bias, out_bias=bias, head_norm=True)


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
        "num_attention_heads": 32, "num_key_value_heads": 32, "hidden_act": "silu", "max_position_embeddings": 32768, "sliding_window": 4096,
        "tie_word_embeddings": False,
    }, verified=_ROWS),
    "qwen3": Family("qwen3", qwen3, {
        "vocab_size": 151936, "hidden_size": 4096, "intermediate_size": 22016, "num_hidden_layers": 32,
        "num_attention_heads": 32, "num_key_value_heads": 32, "head_dim": 128, "hidden_act": "silu",
        "max_position_embeddings": 32768, "tie_word_embeddings": False,
    }, verified=_ROWS),
}  # fmt: skip
