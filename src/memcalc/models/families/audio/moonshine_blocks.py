"""Blocks of Moonshine: attention that rotates a part of each head, and a decoder's MLP with its gate second."""

from __future__ import annotations

from memcalc import ops
from memcalc.autograd.tensor import Tensor
from memcalc.config.reader import Config
from memcalc.errors import ConfigError
from memcalc.nn.kv_cache import Cache
from memcalc.nn.layers.attention_backends import attend, split_heads
from memcalc.nn.layers.linear import Linear
from memcalc.nn.layers.mlp import PlainMLP, activation
from memcalc.nn.layers.norms import LayerNorm
from memcalc.nn.layers.rotary import Rotation
from memcalc.nn.layers.rotary_interleaved import rotary_pairs_of_part
from memcalc.nn.module import Module


class MoonshineAttention(Module):
    """Attention over its own input, rotated, or over an encoder's states; heads may be padded for the kernels."""

    scope = "attention"

    def __init__(self, c: Config, side: str) -> None:
        hidden, heads = c.integer("hidden_size"), c.divides(f"{side}_num_attention_heads", "hidden_size")
        if c.integer(f"{side}_num_key_value_heads", heads) != heads:
            raise ConfigError(
                f"{c.where} has fewer key-value heads than heads, which Transformers' Moonshine cannot run; "
                "leave out the number of key-value heads."
            )
        self.head_dim, bias = hidden // heads, c.flag("attention_bias")
        multiple = c.optional("pad_head_dim_to_multiple_of")
        self.padding = -self.head_dim % multiple if multiple else 0
        self.dropout = c.probability("attention_dropout", 0.0)
        self.q_proj = Linear(hidden, hidden, bias=bias, group="attention")
        self.k_proj = Linear(hidden, hidden, bias=bias, group="attention")
        self.v_proj = Linear(hidden, hidden, bias=bias, group="attention")
        self.o_proj = Linear(hidden, hidden, group="attention")

    def forward(
        self,
        hidden: Tensor,
        rotation: Rotation | None,
        mask: Tensor | None = None,
        states: Tensor | None = None,
        cache: Cache | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """[b, s, h] to [b, s, h], and the probabilities where they exist; keys and values from `states` if given."""
        query = split_heads(self.q_proj(hidden), self.head_dim)
        current = hidden if states is None else states
        cached = None if cache is None or states is None else cache.cross_attention_key_values(self)
        if cached is not None:
            key, value = cached
        else:
            key = split_heads(self.k_proj(current), self.head_dim)
            value = split_heads(self.v_proj(current), self.head_dim)
            if rotation is not None:
                query, key = rotary_pairs_of_part(query, key, *rotation)
            if cache is not None:
                key, value = cache.update(self, key, value)
        del cached
        if self.padding:
            query = ops.pad(query, -1, self.padding)
            key = ops.pad(key, -1, self.padding)
            value = ops.pad(value, -1, self.padding)
        out, weights = attend(query, key, value, mask, 1, self.dropout)
        if self.padding:
            out = ops.narrow(out, -1, self.head_dim)
        out = ops.contiguous(ops.reshape(out, *hidden.shape[:-1], -1))
        out = self.o_proj(out)
        return out, weights


class GateSecondMLP(Module):
    """fc2(first half of fc1(x) times the activated second half)."""

    scope = "MLP"

    def __init__(self, hidden: int, width: int, act: str) -> None:
        self.act = activation(act)
        self.fc1 = Linear(hidden, 2 * width, bias=True, group="MLP")
        self.fc2 = Linear(width, hidden, bias=True, group="MLP")

    def forward(self, hidden: Tensor) -> Tensor:
        """[b, s, h] to [b, s, h]."""
        hidden, gate = ops.chunk(self.fc1(hidden), 2, -1)
        hidden = ops.mul(self.act(gate), hidden)
        return self.fc2(hidden)


class EncoderLayer(Module):
    """LayerNorm, attention, add; LayerNorm, MLP, add."""

    scope = "residual stream"

    def __init__(self, c: Config) -> None:
        hidden, width, act = c.integer("hidden_size"), c.integer("intermediate_size"), c.text("encoder_hidden_act")
        self.self_attn = MoonshineAttention(c, "encoder")
        self.mlp: Module = PlainMLP(hidden, width, act, names=("fc1", "fc2"), bias=True)
        self.input_layernorm = LayerNorm(hidden, bias=False)
        self.post_attention_layernorm = LayerNorm(hidden, bias=False)

    def forward(self, hidden: Tensor, rotation: Rotation, position_ids: Tensor) -> Tensor:
        """[b, s, h] to [b, s, h]. Position ids are given, and not used."""
        residual = hidden
        hidden = self.input_layernorm(hidden)
        hidden, _weights = self.self_attn(hidden, rotation)
        hidden = ops.add(residual, hidden)
        residual = hidden
        hidden = self.post_attention_layernorm(hidden)
        hidden = self.mlp(hidden)
        return ops.add(residual, hidden)


class DecoderLayer(Module):
    """The same with attention over the encoder's states in between."""

    scope = "residual stream"

    def __init__(self, c: Config) -> None:
        hidden, width, act = c.integer("hidden_size"), c.integer("intermediate_size"), c.text("decoder_hidden_act")
        self.self_attn, self.encoder_attn = MoonshineAttention(c, "decoder"), MoonshineAttention(c, "decoder")
        self.mlp = GateSecondMLP(hidden, width, act)
        self.input_layernorm = LayerNorm(hidden, bias=False)
        self.post_attention_layernorm = LayerNorm(hidden, bias=False)
        self.final_layernorm = LayerNorm(hidden, bias=False)

    def forward(
        self,
        hidden: Tensor,
        mask: Tensor | None,
        states: Tensor,
        rotation: Rotation,
        position_ids: Tensor,
        cache: Cache | None,
    ) -> Tensor:
        """[b, t, h] to [b, t, h]. Position ids are given, and not used."""
        residual = hidden
        hidden = self.input_layernorm(hidden)
        hidden, _weights = self.self_attn(hidden, rotation, mask, cache=cache)
        hidden = ops.add(residual, hidden)
        residual = hidden
        hidden = self.post_attention_layernorm(hidden)
        hidden, _weights = self.encoder_attn(hidden, None, states=states, cache=cache)
        hidden = ops.add(residual, hidden)
        residual = hidden
        hidden = self.final_layernorm(hidden)
        hidden = self.mlp(hidden)
        return ops.add(residual, hidden)
