"""Gemma 4's vision tower: patches with positions in a table a side, pooled to a fixed number of tokens."""

from __future__ import annotations

from memcalc import ops
from memcalc.autograd.tensor import Tensor
from memcalc.config.reader import Config
from memcalc.nn.layers.attention_backends import attend
from memcalc.nn.layers.gemma_shared_kv import PowerRMSNorm, rotated
from memcalc.nn.layers.linear import Linear
from memcalc.nn.layers.masks import bidirectional_mask
from memcalc.nn.layers.mlp import activation
from memcalc.nn.layers.rotary import Rotation
from memcalc.nn.module import Buffer, Module, Parameter
from memcalc.nn.stack import Stack
from memcalc.tables.dtypes import BOOL, FP32, INT64


class ClippableLinear(Module):
    """A linear layer; its input and output may be kept within bounds of the checkpoint (`use_clipped_linears`)."""

    def __init__(self, inputs: int, outputs: int, *, clips: bool, group: str = "other") -> None:
        self.linear = Linear(inputs, outputs, group=group)
        self.clips = clips
        if clips:
            self.input_min, self.input_max = Buffer(dtype=None), Buffer(dtype=None)
            self.output_min, self.output_max = Buffer(dtype=None), Buffer(dtype=None)

    def forward(self, hidden: Tensor) -> Tensor:
        """[..., in] to [..., out]."""
        if self.clips:
            hidden = ops.clamp_tensor(hidden, self.input_min, self.input_max)
        hidden = self.linear(hidden)
        if self.clips:
            hidden = ops.clamp_tensor(hidden, self.output_min, self.output_max)
        return hidden


class Gemma4VisionAttention(Module):
    """Grouped-query attention over patches, with norms of query, key and value, rotated by column and row."""

    scope = "attention"

    def __init__(self, v: Config) -> None:
        hidden, clips = v.integer("hidden_size"), v.flag("use_clipped_linears")
        heads, kv_heads, self.head_dim = v.heads()
        self.repeats, self.dropout = heads // kv_heads, v.probability("attention_dropout")
        self.q_proj = ClippableLinear(hidden, heads * self.head_dim, clips=clips, group="attention")
        self.k_proj = ClippableLinear(hidden, kv_heads * self.head_dim, clips=clips, group="attention")
        self.v_proj = ClippableLinear(hidden, kv_heads * self.head_dim, clips=clips, group="attention")
        self.o_proj = ClippableLinear(heads * self.head_dim, hidden, clips=clips, group="attention")
        self.q_norm = PowerRMSNorm(self.head_dim)
        self.k_norm = PowerRMSNorm(self.head_dim)
        self.v_norm = PowerRMSNorm(self.head_dim, with_scale=False)

    def forward(self, hidden: Tensor, rotation: Rotation, mask: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Patches [b, n, h] to [b, n, h], and the probabilities where they exist."""
        shape = (*hidden.shape[:-1], -1, self.head_dim)
        query = ops.view(self.q_proj(hidden), *shape)
        query = self.q_norm(query)
        query = _rotated_by_side(query, rotation)
        query = ops.transpose(query, 1, 2)
        key = ops.view(self.k_proj(hidden), *shape)
        key = self.k_norm(key)
        key = _rotated_by_side(key, rotation)
        key = ops.transpose(key, 1, 2)
        value = ops.view(self.v_proj(hidden), *shape)
        value = self.v_norm(value)
        value = ops.transpose(value, 1, 2)
        out, weights = attend(query, key, value, mask, self.repeats, self.dropout)
        out = ops.contiguous(ops.reshape(out, *hidden.shape[:-1], -1))
        return self.o_proj(out), weights


def _rotated_by_side(x: Tensor, rotation: Rotation) -> Tensor:
    """Heads [b, n, heads, d], one half of each rotated by the column and the other by the row."""
    size = 2 * (x.shape[-1] // 4)
    x_parts, cos_parts, sin_parts = (ops.split(tensor, [size, size], -1) for tensor in (x, *rotation))
    parts = [rotated(*part[:1], part[1:]) for part in zip(x_parts, cos_parts, sin_parts, strict=True)]
    return ops.cat(parts, -1)


class Gemma4VisionMLP(Module):
    """down(act(gate(x)) * up(x)) of clippable layers."""

    scope = "MLP"

    def __init__(self, v: Config) -> None:
        hidden, width, clips = v.integer("hidden_size"), v.integer("intermediate_size"), v.flag("use_clipped_linears")
        self.gate_proj = ClippableLinear(hidden, width, clips=clips, group="MLP")
        self.up_proj = ClippableLinear(hidden, width, clips=clips, group="MLP")
        self.down_proj = ClippableLinear(width, hidden, clips=clips, group="MLP")
        self.act = activation(v.text("hidden_activation"))

    def forward(self, x: Tensor) -> Tensor:
        """[b, n, h] to [b, n, h]."""
        return self.down_proj(ops.mul(self.act(self.gate_proj(x)), self.up_proj(x)))


class Gemma4VisionBlock(Module):
    """Norms around attention and MLP."""

    scope = "residual stream"

    def __init__(self, v: Config) -> None:
        hidden = v.integer("hidden_size")
        self.self_attn = Gemma4VisionAttention(v)
        self.mlp = Gemma4VisionMLP(v)
        self.input_layernorm = PowerRMSNorm(hidden)
        self.post_attention_layernorm = PowerRMSNorm(hidden)
        self.pre_feedforward_layernorm = PowerRMSNorm(hidden)
        self.post_feedforward_layernorm = PowerRMSNorm(hidden)

    def forward(self, hidden: Tensor, rotation: Rotation, mask: Tensor | None) -> Tensor:
        """[b, n, h] to [b, n, h]."""
        residual = hidden
        hidden = self.input_layernorm(hidden)
        hidden, _weights = self.self_attn(hidden, rotation, mask)
        hidden = self.post_attention_layernorm(hidden)
        hidden = ops.add(residual, hidden)
        residual = hidden
        hidden = self.pre_feedforward_layernorm(hidden)
        hidden = self.mlp(hidden)
        hidden = self.post_feedforward_layernorm(hidden)
        return ops.add(residual, hidden)


class Gemma4PatchEmbedder(Module):
    """A projection of each patch's pixels, and a vector for its column and its row."""

    scope = "embedding"

    def __init__(self, v: Config) -> None:
        hidden = v.integer("hidden_size")
        self.input_proj = Linear(3 * v.integer("patch_size") ** 2, hidden, group="embedding")
        self.position_embedding_table = Parameter(2, v.integer("position_embedding_size"), hidden, group="embedding")

    def forward(self, pixels: Tensor, ids: Tensor, padding: Tensor) -> Tensor:
        """Pixels [b, n, 3 · patch²], columns and rows [b, n, 2] and what is padding [b, n], to patches [b, n, h]."""
        pixels = ops.mul_scalar(ops.add_scalar(pixels))
        hidden = self.input_proj(pixels)
        places = ops.empty_like(ids)
        column = ops.embedding(ops.select(places, -1), ops.select(self.position_embedding_table, 0))
        row = ops.embedding(ops.select(places, -1), ops.select(self.position_embedding_table, 0))
        positions = ops.add(column, row)
        positions = ops.where(ops.unsqueeze(padding, -1), positions)
        del places, column, row
        return ops.add(hidden, positions)


class Gemma4VisionTower(Module):
    """Patches to `tokens` vectors an image; images are padded to so many patches."""

    def __init__(self, v: Config, tokens: int) -> None:
        self.tokens, self.pool = tokens, v.integer("pooling_kernel_size")
        self.patch = v.integer("patch_size")
        self.hidden = v.integer("hidden_size")
        self.patch_embedder = Gemma4PatchEmbedder(v)
        self.inv_freq, self.original_inv_freq = Buffer(v.head_dim() // 4), Buffer(v.head_dim() // 4)
        depth = v.integer("num_hidden_layers")
        self.layers = Stack(["block"] * depth, lambda _: Gemma4VisionBlock(v), name="vision block")
        self.standardizes = v.flag("standardize")
        if self.standardizes:
            self.std_bias, self.std_scale = Buffer(self.hidden, dtype=None), Buffer(self.hidden, dtype=None)

    def _rotation(self, hidden: Tensor, ids: Tensor) -> Rotation:
        with hidden.tape.scoped("rotary embedding"):
            freqs = ops.mul(ops.to(ops.unsqueeze(ids, -1), FP32), self.inv_freq)
            cos = ops.mul_scalar(ops.cos(freqs))
            sin = ops.mul_scalar(ops.sin(freqs))
            cos = ops.cat([ops.select(cos, 2)] * 4, -1)
            sin = ops.cat([ops.select(sin, 2)] * 4, -1)
            return ops.to(cos, hidden.dtype), ops.to(sin, hidden.dtype)

    def forward(self, pixels: Tensor, ids: Tensor) -> Tensor:
        """Pixels [b, n, 3 · patch²] and columns and rows [b, n, 2] to tokens [b · tokens, h]."""
        padding = ops.empty_like(ops.select(ops.empty_like(ids, BOOL), -1))
        embeds = self.patch_embedder(pixels, ids, padding)
        output = self._encode(embeds, ids)
        hidden, kept = self._pooled(output, ids, padding)
        hidden = ops.index_mask(hidden, kept, hidden.shape[0] * self.tokens)
        if self.standardizes:
            bias, scale = ops.to(self.std_bias, FP32), ops.to(self.std_scale, FP32)
            hidden = ops.mul(ops.sub(hidden, bias), scale)
        return ops.to(hidden, embeds.dtype)

    def _encode(self, embeds: Tensor, ids: Tensor) -> Tensor:
        mask = bidirectional_mask(embeds, True)
        rotation = self._rotation(embeds, ids)
        hidden = embeds
        for layer in self.layers:
            hidden = layer(hidden, rotation=rotation, mask=mask)
        return hidden

    def _pooled(self, hidden: Tensor, ids: Tensor, padding: Tensor) -> tuple[Tensor, Tensor]:
        """The mean of each square of patches in fp32 [b, tokens, h], and which are no padding [b, tokens]."""
        hidden = ops.masked_fill(hidden, ops.unsqueeze(padding, -1))
        kept = padding
        if hidden.shape[1] != self.tokens:
            hidden, kept = self._averaged(hidden, ids)
        return ops.mul_scalar(ops.to(hidden, FP32)), kept

    def _averaged(self, hidden: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
        tape, (images, patches, _) = hidden.tape, hidden.shape
        places = ops.empty_like(ids)
        widest = tape.empty((images, 1), INT64)
        squares = ops.empty_like(places)
        squares = tape.empty((images, patches), INT64)
        one_hot = tape.empty((images, patches, self.tokens), INT64)
        weights = ops.to(one_hot, FP32)
        del one_hot
        weights = ops.mul_scalar(weights)
        output = ops.matmul(ops.transpose(weights, 1, 2), ops.to(hidden, FP32))
        empty = tape.empty((images, self.tokens), BOOL)
        kept = ops.empty_like(empty)
        del widest, squares, empty
        return ops.to(output, hidden.dtype), kept


class MultimodalEmbedder(Module):
    """A norm without a weight, and a projection to the decoder's width."""

    def __init__(self, inputs: int, outputs: int) -> None:
        self.embedding_projection = Linear(inputs, outputs)
        self.embedding_pre_projection_norm = PowerRMSNorm(inputs, with_scale=False)

    def forward(self, features: Tensor) -> Tensor:
        """[..., inputs] to [..., outputs]."""
        return self.embedding_projection(self.embedding_pre_projection_norm(features))
