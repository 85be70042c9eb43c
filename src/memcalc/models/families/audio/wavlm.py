"""WavLM: HuBERT with a gated bias on the scores for the distance of two vectors, which all layers share."""

from __future__ import annotations

from typing import Any

from memcalc import ops
from memcalc.autograd.tensor import Tensor
from memcalc.config.reader import Config
from memcalc.models.common.speech_models import speech
from memcalc.models.families.audio.wav2vec2 import SPEECH_DEFAULTS, SPEECH_EVIDENCE, SpeechModel
from memcalc.models.family import Family, table
from memcalc.nn.layers.linear import Embedding, Linear
from memcalc.nn.layers.norms import LayerNorm
from memcalc.nn.layers.relative_attention import buckets_of
from memcalc.nn.layers.wav2vec2 import SpeechMLP
from memcalc.nn.model import Network
from memcalc.nn.module import Module, Parameter
from memcalc.nn.stack import Stack
from memcalc.tables.dtypes import INT64


def _bias(layer: Any) -> Tensor:
    """The bias of a linear layer, or of an adapter around one."""
    bias: Tensor = layer.bias
    return bias


class GatedBiasAttention(Module):
    """PyTorch's own multi-head attention with a bias that each layer weighs by gates of its input."""

    scope = "attention"
    q_proj: Linear
    k_proj: Linear
    v_proj: Linear
    out_proj: Linear

    def __init__(self, c: Config, hidden: int, *, first: bool) -> None:
        self.heads = c.divides("num_attention_heads", "hidden_size")
        self.head_dim = hidden // self.heads
        self.gru_rel_pos_const = Parameter(1, self.heads, 1, 1, group="attention")
        for name in ("k_proj", "v_proj", "q_proj", "out_proj"):
            setattr(self, name, Linear(hidden, hidden, bias=True, group="attention"))
        self.gru_rel_pos_linear = Linear(self.head_dim, 8, bias=True, group="attention")
        buckets = c.integer("num_buckets")
        self.rel_attn_embed = Embedding(buckets, self.heads, group="attention") if first else None
        self.dropout = c.probability("attention_dropout")

    def forward(self, hidden: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """[b, s, h] to [b, s, h], mean probabilities, and the bias [b · heads, s, s], made where there is none."""
        batch, length, _ = hidden.shape
        if bias is None:
            bias = self._bias(length)
            bias = ops.view(ops.repeat(ops.unsqueeze(bias, 0), batch), batch * self.heads, length, length)
        gated = ops.permute(ops.view(hidden, batch, length, self.heads, -1), 0, 2, 1, 3)
        projected = self.gru_rel_pos_linear(gated)
        projected = ops.sum(ops.view(projected, *projected.shape[:-1], 2, 4))
        gate_a, gate_b = ops.chunk(ops.sigmoid(projected), 2, -1)
        gate = ops.add_scalar(ops.mul(gate_a, ops.add_scalar(ops.mul(gate_b, self.gru_rel_pos_const))))
        gated_bias = ops.mul(ops.view(gate, batch * self.heads, -1, 1), bias)
        gated_bias = ops.view(gated_bias, -1, length, length)
        out, weights = self._attend(hidden, gated_bias)
        return out, weights, bias

    def _attend(self, hidden: Tensor, gated_bias: Tensor) -> tuple[Tensor, Tensor]:
        sequence_first = ops.transpose(hidden, 0, 1)
        biases = ops.cat([_bias(layer) for layer in (self.q_proj, self.k_proj, self.v_proj)], 0)
        out, weights = self._multi_head(sequence_first, gated_bias, biases)
        return ops.transpose(out, 0, 1), ops.unsqueeze(weights, 1)

    def _multi_head(self, x: Tensor, gated_bias: Tensor, biases: Tensor) -> tuple[Tensor, Tensor]:
        length, batch, hidden = x.shape
        parts = ops.chunk(biases, 3, 0)
        layers = (self.q_proj, self.k_proj, self.v_proj)
        query, key, value = (ops.linear(x, layer.weight, part) for layer, part in zip(layers, parts, strict=True))
        query = self._split(query)
        key = self._split(key)
        value = self._split(value)
        scaled = ops.mul_scalar(query)
        scores = ops.baddbmm(gated_bias, scaled, ops.transpose(key, -2, -1))
        del scaled, key
        scores = ops.softmax(scores)
        scores = ops.dropout(scores, self.dropout)
        out = ops.bmm(scores, value)
        del value
        out = ops.reshape(ops.transpose(out, 0, 1), length * batch, hidden)
        out = ops.linear(out, self.out_proj.weight, self.out_proj.bias)
        out = ops.view(out, length, batch, -1)
        scores = ops.view(scores, batch, self.heads, length, length)
        scores = ops.mean(scores, 1, keepdim=False)
        return out, scores

    def _split(self, x: Tensor) -> Tensor:
        """[s, b, h] to [b · heads, s, d]."""
        return ops.transpose(ops.view(x, x.shape[0], x.shape[1] * self.heads, self.head_dim), 0, 1)

    def _bias(self, length: int) -> Tensor:
        assert self.rel_attn_embed is not None
        tape = self.rel_attn_embed.weight.tape
        context = ops.unsqueeze(tape.empty((length,), INT64), 1)
        memory = ops.unsqueeze(tape.empty((length,), INT64), 0)
        distance = ops.sub(memory, context)
        bucket = buckets_of(distance, bidirectional=True, keeps_logarithm=False)
        return ops.permute(self.rel_attn_embed(bucket), 2, 0, 1)


class BiasedLayer(Module):
    """Attention, add, norm, MLP, add, norm; or in the `stable` form norm, attention, add, norm, MLP, add."""

    scope = "residual stream"

    def __init__(self, c: Config, hidden: int, *, first: bool, stable: bool) -> None:
        self.attention = GatedBiasAttention(c, hidden, first=first)
        self.layer_norm = LayerNorm(hidden)
        self.feed_forward = SpeechMLP(c, hidden)
        self.final_layer_norm = LayerNorm(hidden)
        self.dropout, self.stable = c.probability("hidden_dropout"), stable

    def forward(self, hidden: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
        """[b, s, h] to [b, s, h], and the bias."""
        residual = hidden
        if self.stable:
            hidden = self.layer_norm(hidden)
        hidden, _weights, bias = self.attention(hidden, bias=bias)
        hidden = ops.dropout(hidden, self.dropout)
        hidden = ops.add(residual, hidden)
        if self.stable:
            hidden = ops.add(hidden, self.feed_forward(self.final_layer_norm(hidden)))
            return hidden, bias
        hidden = self.layer_norm(hidden)
        hidden = ops.add(hidden, self.feed_forward(hidden))
        hidden = self.final_layer_norm(hidden)
        return hidden, bias


def wavlm(c: Config, architecture: str | None) -> Network:
    """WavLM."""
    hidden, depth, stable = c.integer("hidden_size"), c.integer("num_hidden_layers"), c.flag("do_stable_layer_norm")
    layers = Stack(["layer"] * depth, lambda index: BiasedLayer(c, hidden, first=index == 0, stable=stable))
    return speech(c, architecture, SpeechModel(c, both=True, layers=layers))


FAMILIES = table(
    Family(
        "wavlm",
        wavlm,
        SPEECH_DEFAULTS | {"num_buckets": 320},
        blocks="encoder",
        attention="eager",
        verified="exact counts; " + SPEECH_EVIDENCE,
    )
)
