"""Blocks of encoders and decoders in BART's manner: attention that can look at encoder states, and a plain MLP."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from memcalc import ops
from memcalc.autograd.tensor import Tensor
from memcalc.errors import ConfigError
from memcalc.nn.kv_cache import Cache
from memcalc.nn.layers.attention_backends import attend_same_dtype, split_heads
from memcalc.nn.layers.linear import Linear
from memcalc.nn.layers.mlp import activation
from memcalc.nn.layers.norms import LayerNorm
from memcalc.nn.module import Module
from memcalc.tables.dtypes import FP16


class BartAttention(Module):
    """Attention over its own input, or over an encoder's states.

    Whisper (`scaled`) has no bias on keys, scales the queries itself and copies all three to head-major order.
    """

    scope = "attention"

    def __init__(self, hidden: int, heads: int, dropout: float, *, scale_query: bool = False) -> None:
        if hidden % heads:
            raise ConfigError(f"'d_model' is {hidden}, which the {heads} attention heads do not divide; correct one.")
        self.head_dim, self.dropout, self.scale_query = hidden // heads, dropout, scale_query
        self.k_proj = Linear(hidden, hidden, bias=not scale_query, group="attention")
        self.v_proj = Linear(hidden, hidden, bias=True, group="attention")
        self.q_proj = Linear(hidden, hidden, bias=True, group="attention")
        self.out_proj = Linear(hidden, hidden, bias=True, group="attention")

    def forward(
        self, hidden: Tensor, mask: Tensor | None = None, states: Tensor | None = None, cache: Cache | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """[b, s, h] to [b, s, h], and the probabilities where they exist; keys and values from `states` if given."""
        if self.scale_query:
            query = ops.contiguous(split_heads(ops.mul_scalar(self.q_proj(hidden)), self.head_dim))
        else:
            query = split_heads(self.q_proj(hidden), self.head_dim)
        current = hidden if states is None else states
        cached = None if cache is None or states is None else cache.cross_attention_key_values(self)
        if cached is not None:
            key, value = cached
        else:
            if self.scale_query:
                key = ops.contiguous(split_heads(self.k_proj(current), self.head_dim))
                value = ops.contiguous(split_heads(self.v_proj(current), self.head_dim))
            else:
                key = self.k_proj(current)
                value = self.v_proj(current)
                key = split_heads(key, self.head_dim)
                value = split_heads(value, self.head_dim)
            if cache is not None:
                key, value = cache.update(self, key, value)
        out, weights = attend_same_dtype(query, key, value, mask, self.dropout, cast_back=False)
        out = ops.contiguous(ops.reshape(out, *hidden.shape[:-1], -1))
        return self.out_proj(out), weights


@dataclass(frozen=True)
class BlockStyle:
    """What the blocks of a stack share.

    hidden, act, dropout, act_dropout: width, activation, dropout on the branches and after the activation.
    norm_first: norms stand before the sublayers.
    clamp: what an encoder block does against overflow in pure fp16: clamp always, or look whether it must.
    act_apart: the MLP frees its input before the activation.
    """

    hidden: int
    act: str
    dropout: float
    act_dropout: float
    norm_first: bool
    clamp: Literal["always", "if infinite"] = "always"
    act_apart: bool = False


class _Block(Module):
    """What encoder and decoder blocks do alike."""

    scope = "residual stream"

    def __init__(self, style: BlockStyle) -> None:
        self.style = style
        self.act = activation(style.act)

    def _add_mlp(self, width: int) -> None:
        self.fc1 = Linear(self.style.hidden, width, bias=True, group="MLP")
        self.fc2 = Linear(width, self.style.hidden, bias=True, group="MLP")
        self.final_layer_norm = LayerNorm(self.style.hidden)

    def _attended(self, norm: Module, attention: Module, hidden: Tensor, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
        residual = hidden
        if self.style.norm_first:
            hidden = norm(hidden)
        hidden, weights = attention(hidden, **kwargs)
        hidden = ops.dropout(hidden, self.style.dropout)
        hidden = ops.add(residual, hidden)
        if not self.style.norm_first:
            hidden = norm(hidden)
        return hidden, weights

    def _fed(self, hidden: Tensor) -> Tensor:
        residual = hidden
        if self.style.norm_first:
            hidden = self.final_layer_norm(hidden)
        with hidden.tape.scoped("MLP"):
            if self.style.act_apart:
                hidden = self.fc1(hidden)
                hidden = self.act(hidden)
            else:
                hidden = self.act(self.fc1(hidden))
            hidden = ops.dropout(hidden, self.style.act_dropout)
            hidden = self.fc2(hidden)
            hidden = ops.dropout(hidden, self.style.dropout)
        hidden = ops.add(residual, hidden)
        if not self.style.norm_first:
            hidden = self.final_layer_norm(hidden)
        return hidden


class EncoderBlock(_Block):
    """Self-attention and MLP, each with a LayerNorm and a residual."""

    def __init__(self, style: BlockStyle, attention: BartAttention, width: int) -> None:
        super().__init__(style)
        self.self_attn = attention
        self.self_attn_layer_norm = LayerNorm(style.hidden)
        self._add_mlp(width)

    def forward(self, hidden: Tensor, mask: Tensor | None) -> Tensor:
        """[b, s, h] to [b, s, h]."""
        hidden, _weights = self._attended(self.self_attn_layer_norm, self.self_attn, hidden, mask=mask)
        hidden = self._fed(hidden)
        if hidden.dtype is not FP16:
            return hidden
        return ops.clamp(hidden) if self.style.clamp == "always" else ops.check_finite(hidden)


class DecoderBlock(_Block):
    """Self-attention, attention over encoder states if there are any, and MLP, each with LayerNorm and residual."""

    def __init__(self, style: BlockStyle, attention: Module, cross: Module | None, width: int) -> None:
        super().__init__(style)
        self.self_attn = attention
        self.self_attn_layer_norm = LayerNorm(style.hidden)
        if cross is not None:
            self.encoder_attn = cross
            self.encoder_attn_layer_norm = LayerNorm(style.hidden)
        self._add_mlp(width)

    def forward(
        self,
        hidden: Tensor,
        mask: Tensor | None,
        states: Tensor | None = None,
        states_mask: Tensor | None = None,
        cache: Cache | None = None,
        position_ids: Tensor | None = None,
    ) -> Tensor:
        """[b, s, h] to [b, s, h]. Position ids are given by some, and used by none."""
        hidden, _weights = self._attended(self.self_attn_layer_norm, self.self_attn, hidden, mask=mask, cache=cache)
        if states is not None:
            hidden, _weights = self._attended(
                self.encoder_attn_layer_norm, self.encoder_attn, hidden, mask=states_mask, states=states, cache=cache
            )
        return self._fed(hidden)
