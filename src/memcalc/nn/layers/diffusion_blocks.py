"""Blocks of UNets and autoencoders: resnets, resampling, and transformers over pixels.

Source: diffusers 0.42.1, models/{resnet,upsampling,downsampling,attention,attention_processor}.py and
models/transformers/transformer_2d.py.
"""

from __future__ import annotations

from typing import Any

from memcalc import ops
from memcalc.autograd.checkpointing import checkpointed
from memcalc.autograd.tensor import Tensor
from memcalc.nn.layers.diffusion import Convolution, NoDropout
from memcalc.nn.layers.linear import Linear
from memcalc.nn.layers.norms import LayerNorm
from memcalc.nn.module import Module, Parameter
from memcalc.nn.run_context import run_context
from memcalc.nn.stack import Stack


def run_checkpointed(module: Module, hidden: Tensor, *args: Any) -> Tensor:
    """Run a module, as a checkpoint of its own where activation checkpointing is on."""
    if run_context(hidden).checkpointing and hidden.tape.grad_enabled:
        out: Tensor = checkpointed(hidden.tape, module, hidden, *args)
        return out
    result: Tensor = module(hidden, *args)
    return result


class GroupNorm(Module):
    """torch.nn.GroupNorm."""

    scope = "norms"

    def __init__(self, channels: int, groups: int) -> None:
        self.weight = Parameter(channels, group="norms")
        self.bias = Parameter(channels, group="norms")
        self.groups = groups

    def forward(self, x: Tensor) -> Tensor:
        """[b, channels, ...] to the same."""
        return ops.group_norm(x, self.weight, self.bias, self.groups)


class ResnetBlock2D(Module):
    """Two convolutions behind norms, the time embedding added between them (where there is one)."""

    scope = "resnets"

    def __init__(self, inputs: int, outputs: int, temb: int | None, groups: int) -> None:
        self.norm1 = GroupNorm(inputs, groups)
        self.conv1 = Convolution(inputs, outputs, 3, 3, padding=1)
        if temb is not None:
            self.time_emb_proj = Linear(temb, outputs, bias=True)
        self.norm2 = GroupNorm(outputs, groups)
        self.conv2 = Convolution(outputs, outputs, 3, 3, padding=1)
        self.shortcut = inputs != outputs
        if self.shortcut:
            self.conv_shortcut = Convolution(inputs, outputs, 1, 1)

    def forward(self, input_tensor: Tensor, temb: Tensor | None) -> Tensor:
        """[b, inputs, h, w] to [b, outputs, h, w]."""
        hidden = input_tensor
        hidden = self.norm1(hidden)
        hidden = ops.silu(hidden)
        hidden = self.conv1(hidden)
        if temb is not None:
            temb = ops.silu(temb)
            temb = ops.unsqueeze(ops.unsqueeze(self.time_emb_proj(temb), -1), -1)
            hidden = ops.add(hidden, temb)
        hidden = self.norm2(hidden)
        hidden = ops.silu(hidden)
        hidden = self.conv2(hidden)
        if self.shortcut:
            if run_context(hidden).training:
                input_tensor = ops.contiguous(input_tensor)
            input_tensor = self.conv_shortcut(input_tensor)
        return ops.mul_scalar(ops.add(input_tensor, hidden))


class Resample(Module):
    """A convolution that halves each side, or doubles it behind nearest-neighbour interpolation."""

    scope = "resampling"

    def __init__(self, channels: int, *, down: bool) -> None:
        self.conv = Convolution(channels, channels, 3, 3, stride=2 if down else 1, padding=1)
        self.down = down

    def forward(self, hidden: Tensor) -> Tensor:
        """[b, c, h, w] to [b, c, h / 2, w / 2] or [b, c, 2h, 2w]."""
        if not self.down:
            height, width = hidden.shape[-2:]
            hidden = ops.upsample_nearest(hidden, (2 * height, 2 * width))
        return self.conv(hidden)


class CrossAttention(Module):
    """Attention of [b, s, h] over itself, or over a text of `text` channels."""

    scope = "attention"

    def __init__(self, width: int, heads: int, text: int | None = None, *, bias: bool = False) -> None:
        self.heads = heads
        self.to_q = Linear(width, width, bias=bias)
        self.to_k = Linear(text or width, width, bias=bias)
        self.to_v = Linear(text or width, width, bias=bias)
        self.to_out = [Linear(width, width, bias=True), NoDropout()]
        self.norm_q: Module = NoDropout()
        self.norm_k: Module = NoDropout()

    def forward(self, hidden: Tensor, encoder: Tensor | None = None, mask: Tensor | None = None) -> Tensor:
        """[b, s, h] to the same; `mask` [b, 1, t] (or [b, 1, s, t]) is for the scores of every head."""
        residual = hidden
        batch = hidden.shape[0]
        if mask is not None:
            mask = mask.tape.empty((batch, self.heads, *mask.shape[-2:]), mask.dtype)  # repeat_interleave
        query = self.to_q(hidden)
        if encoder is None:
            encoder = hidden
        key = self.to_k(encoder)
        value = self.to_v(encoder)
        query = self.norm_q(query)
        key = self.norm_k(key)
        query, key, value = (
            ops.transpose(ops.view(x, batch, -1, self.heads, x.shape[-1] // self.heads), 1, 2)
            for x in (query, key, value)
        )
        hidden = ops.scaled_dot_product_attention(query, key, value, mask)
        hidden = ops.reshape(ops.transpose(hidden, 1, 2), batch, -1, hidden.shape[1] * hidden.shape[3])
        hidden = ops.to(hidden, query.dtype)
        hidden = self.to_out[0](hidden)
        del residual
        return ops.mul_scalar(hidden)


class GatedProjection(Module):
    """diffusers' GEGLU: one projection of which half gates the other."""

    def __init__(self, inputs: int, outputs: int) -> None:
        self.proj = Linear(inputs, 2 * outputs, bias=True)

    def forward(self, hidden: Tensor) -> Tensor:
        """[..., inputs] to [..., outputs]."""
        hidden = self.proj(hidden)
        hidden, gate = ops.chunk(hidden, 2, -1)
        return ops.mul(hidden, ops.gelu(gate))


class GatedFeedForward(Module):
    """diffusers' FeedForward with GEGLU."""

    scope = "MLP"

    def __init__(self, width: int) -> None:
        self.net = [GatedProjection(width, 4 * width), NoDropout(), Linear(4 * width, width, bias=True)]

    def forward(self, hidden: Tensor) -> Tensor:
        """[..., width] to [..., width]."""
        for module in self.net:
            hidden = module(hidden)
        return hidden


class BasicTransformerBlock(Module):
    """Self-attention, cross-attention over the text, and a gated MLP."""

    scope = "residual stream"

    def __init__(self, width: int, heads: int, text: int) -> None:
        self.norm1 = LayerNorm(width)
        self.attn1 = CrossAttention(width, heads)
        self.norm2 = LayerNorm(width)
        self.attn2 = CrossAttention(width, heads, text)
        self.norm3 = LayerNorm(width)
        self.ff = GatedFeedForward(width)

    def forward(self, hidden: Tensor, encoder: Tensor) -> Tensor:
        """[b, s, h] to the same."""
        norm_hidden = self.norm1(hidden)
        attn_output = self.attn1(norm_hidden)
        hidden = ops.add(attn_output, hidden)
        norm_hidden = self.norm2(hidden)
        attn_output = self.attn2(norm_hidden, encoder)
        hidden = ops.add(attn_output, hidden)
        norm_hidden = self.norm3(hidden)
        ff_output = self.ff(norm_hidden)
        return ops.add(ff_output, hidden)


class SpatialTransformer(Module):
    """Transformer2DModel over the pixels of [b, c, h, w]: projections are convolutions or, with `linear`, layers."""

    scope = "residual stream"

    def __init__(
        self, channels: int, heads: int, text: int, depth: int, groups: int, *, linear: bool, name: str
    ) -> None:
        self.linear = linear
        self.norm = GroupNorm(channels, groups)
        self.proj_in = Linear(channels, channels, bias=True) if linear else Convolution(channels, channels, 1, 1)
        self.transformer_blocks = Stack(
            ["block"] * depth, lambda _: BasicTransformerBlock(channels, heads, text), name=name
        )
        self.proj_out = Linear(channels, channels, bias=True) if linear else Convolution(channels, channels, 1, 1)

    def forward(self, hidden: Tensor, encoder: Tensor) -> Tensor:
        """[b, c, h, w] to the same."""
        batch, channels, height, width = hidden.shape
        residual = hidden
        hidden = self._tokens(hidden)
        for block in self.transformer_blocks:
            hidden = block(hidden, encoder)
        return self._pixels(hidden, residual, (batch, height, width, channels))

    def _tokens(self, hidden: Tensor) -> Tensor:
        batch, channels = hidden.shape[:2]
        hidden = self.norm(hidden)
        if not self.linear:
            hidden = self.proj_in(hidden)
            return ops.reshape(ops.permute(hidden, 0, 2, 3, 1), batch, -1, channels)
        hidden = ops.reshape(ops.permute(hidden, 0, 2, 3, 1), batch, -1, channels)
        out: Tensor = self.proj_in(hidden)
        return out

    def _pixels(self, hidden: Tensor, residual: Tensor, shape: tuple[int, ...]) -> Tensor:
        if not self.linear:
            hidden = ops.contiguous(ops.permute(ops.reshape(hidden, *shape), 0, 3, 1, 2))
            hidden = self.proj_out(hidden)
        else:
            hidden = self.proj_out(hidden)
            hidden = ops.contiguous(ops.permute(ops.reshape(hidden, *shape), 0, 3, 1, 2))
        return ops.add(hidden, residual)
