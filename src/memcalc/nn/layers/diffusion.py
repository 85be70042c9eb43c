"""Parts that denoisers share: embeddings of time steps, adaptive norms, feed-forward layers, rotary embeddings.

Source: diffusers 0.42.1, models/{embeddings,normalization,attention,activations,attention_dispatch}.py.
"""

from __future__ import annotations

from collections.abc import Sequence

from memcalc import ops
from memcalc.autograd.tensor import Tensor
from memcalc.nn.layers.linear import Linear
from memcalc.nn.module import Module, Parameter
from memcalc.tables.dtypes import FP32, FP64


def timestep_embedding(timesteps: Tensor, width: int) -> Tensor:
    """Sinusoids [b, width] in fp32 of time steps [b], cosines first (flip_sin_to_cos)."""
    tape, half = timesteps.tape, width // 2
    exponent = ops.mul_scalar(tape.empty((half,), FP32))
    exponent = ops.mul_scalar(exponent)
    emb = ops.exp(exponent)
    emb = ops.mul(ops.to(ops.unsqueeze(timesteps, 1), FP32), ops.unsqueeze(emb, 0))
    emb = ops.mul_scalar(emb)
    emb = ops.cat([ops.sin(emb), ops.cos(emb)], -1)
    return ops.cat([ops.narrow(emb, -1, half), ops.narrow(emb, -1, half)], -1)


class TimestepEmbedding(Module):
    """Two linear layers around SiLU."""

    def __init__(self, inputs: int, width: int, *, bias: bool = True) -> None:
        self.linear_1 = Linear(inputs, width, bias=bias)
        self.linear_2 = Linear(width, width, bias=bias)

    def forward(self, sample: Tensor) -> Tensor:
        """[b, inputs] to [b, width]."""
        sample = self.linear_1(sample)
        sample = ops.silu(sample)
        return self.linear_2(sample)


class TextProjection(TimestepEmbedding):
    """PixArtAlphaTextProjection with SiLU: the same layers on a pooled text."""


class CombinedTimestepTextEmbedding(Module):
    """Time step, pooled text, and guidance where the model is distilled for it: their sum [b, width]."""

    def __init__(self, width: int, pooled: int, *, guidance: bool = False) -> None:
        self.timestep_embedder = TimestepEmbedding(256, width)
        if guidance:
            self.guidance_embedder = TimestepEmbedding(256, width)
        self.text_embedder = TextProjection(pooled, width)
        self.guidance = guidance

    def forward(self, timestep: Tensor, guidance: Tensor | None, pooled: Tensor) -> Tensor:
        """[b], [b] or None, [b, pooled] to [b, width]."""
        timesteps_proj = timestep_embedding(timestep, 256)
        timesteps_emb = self.timestep_embedder(ops.to(timesteps_proj, pooled.dtype))
        if guidance is not None:
            guidance_proj = timestep_embedding(guidance, 256)
            guidance_emb = self.guidance_embedder(ops.to(guidance_proj, pooled.dtype))
            timesteps_emb = ops.add(timesteps_emb, guidance_emb)
        pooled_projections = self.text_embedder(pooled)
        return ops.add(timesteps_emb, pooled_projections)


class CaptionProjection(Module):
    """PixArtAlphaTextProjection: two linear layers around GELU."""

    scope = "embedding"

    def __init__(self, inputs: int, width: int) -> None:
        self.linear_1 = Linear(inputs, width, bias=True)
        self.linear_2 = Linear(width, width, bias=True)

    def forward(self, caption: Tensor) -> Tensor:
        """[b, s, inputs] to [b, s, width]."""
        hidden = self.linear_1(caption)
        hidden = ops.gelu(hidden)
        return self.linear_2(hidden)


def keep_in_fp32(*modules: Module) -> None:
    """Let the weights of modules be fp32 whatever the others are (`_keep_in_fp32_modules`)."""
    for module in modules:
        for _, parameter in module.tensors():
            parameter.fixed_dtype = FP32


def modulated(x: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
    """x [b, s, h] times one plus scale [b, h], plus shift [b, h]."""
    return ops.add(ops.mul(x, ops.add_scalar(ops.unsqueeze(scale, 1))), ops.unsqueeze(shift, 1))


class GeluProjection(Module):
    """diffusers' GELU: a linear layer and the activation."""

    def __init__(self, inputs: int, outputs: int) -> None:
        self.proj = Linear(inputs, outputs, bias=True)

    def forward(self, hidden: Tensor) -> Tensor:
        """[..., inputs] to [..., outputs]."""
        hidden = self.proj(hidden)
        return ops.gelu(hidden)


class NoDropout(Module):
    """A dropout layer with probability 0: it has a place among the layers and does nothing."""

    def forward(self, x: Tensor) -> Tensor:
        """x itself."""
        return x


class FeedForward(Module):
    """diffusers' FeedForward with GELU: the projected states stay until the activation is there."""

    scope = "MLP"

    def __init__(self, width: int, inner: int | None = None, outputs: int | None = None) -> None:
        inner = 4 * width if inner is None else inner
        self.net = [GeluProjection(width, inner), NoDropout(), Linear(inner, outputs or width, bias=True)]

    def forward(self, hidden: Tensor) -> Tensor:
        """[..., width] to [..., outputs], which are as many where nothing is said."""
        for module in self.net:
            hidden = module(hidden)
        return hidden


def rotary_tables(ids: Tensor, axes: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Cosines and sines [s, sum of axes] in fp32 of positions [s, axes], computed in fp64 (FluxPosEmbed)."""
    tape, length = ids.tape, ids.shape[0]
    positions = ops.to(ids, FP32)
    cosines, sines = [], []
    for width in axes:
        frequencies = tape.empty((width // 2,), FP64)
        table = tape.empty((length, width // 2), FP64)
        del frequencies
        cosines.append(ops.to(_interleaved(ops.cos(table)), FP32))
        sines.append(ops.to(_interleaved(ops.sin(table)), FP32))
        del table
    del positions
    return ops.cat(cosines, -1), ops.cat(sines, -1)


def _interleaved(x: Tensor) -> Tensor:
    """x [s, d] with every element twice: [s, 2d]."""
    return x.tape.empty((x.shape[0], 2 * x.shape[1]), x.dtype)


def apply_rotary_emb(x: Tensor, tables: tuple[Tensor, Tensor], sequence_dim: int = 1) -> Tensor:
    """x [b, s, heads, d], or [b, heads, s, d], turned by pairs, in fp32, and cast back."""
    cos, sin = (ops.unsqueeze(ops.unsqueeze(table, 2 - sequence_dim), 0) for table in tables)
    real, imaginary = ops.unbind(ops.reshape(x, *x.shape[:-1], -1, 2), -1)
    rotated = ops.reshape(ops.stack([ops.neg(imaginary), real], -1), *x.shape)
    out = ops.add(ops.mul(ops.to(x, FP32), cos), ops.mul(ops.to(rotated, FP32), sin))
    return ops.to(out, x.dtype)


def native_attention(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None) -> Tensor:
    """`F.scaled_dot_product_attention` of [b, s, heads, d]: [b, s, heads, d]."""
    query, key, value = (ops.transpose(x, 1, 2) for x in (query, key, value))
    out = ops.scaled_dot_product_attention(query, key, value, mask)
    return ops.transpose(out, 1, 2)


class Convolution(Module):
    """torch.nn.Conv2d or Conv3d."""

    def __init__(
        self,
        inputs: int,
        outputs: int,
        *kernel: int,
        stride: int | tuple[int, ...] = 1,
        padding: int | tuple[int, ...] = 0,
        bias: bool = True,
    ) -> None:
        self.weight = Parameter(outputs, inputs, *kernel)
        self.bias = Parameter(outputs) if bias else None
        self.stride, self.padding = stride, padding

    def forward(self, x: Tensor) -> Tensor:
        """[b, inputs, ...] to [b, outputs, ...]."""
        return ops.convolution(x, self.weight, self.bias, stride=self.stride, padding=self.padding)


class PatchProjection(Module):
    """Squares of latents projected to tokens (the convolution of PatchEmbed)."""

    scope = "embedding"

    def __init__(self, channels: int, width: int, patch: int) -> None:
        self.patch = patch
        self.proj = Convolution(channels, width, patch, patch, stride=patch)

    def patches(self, latent: Tensor) -> Tensor:
        """[b, c, h, w] to [b, patches, width], a view."""
        latent = self.proj(latent)
        return ops.transpose(ops.view(latent, *latent.shape[:2], -1), 1, 2)


def unpatchified(hidden: Tensor, height: int, width: int, patch: int, channels: int) -> Tensor:
    """Tokens [b, patches, patch² · c] to [b, c, height, width]: a copy in the order of pixels."""
    rows, columns = height // patch, width // patch
    hidden = ops.reshape(hidden, hidden.shape[0], rows, columns, patch, patch, channels)
    hidden = ops.permute(hidden, 0, 5, 1, 3, 2, 4)
    return ops.reshape(hidden, hidden.shape[0], channels, height, width)
