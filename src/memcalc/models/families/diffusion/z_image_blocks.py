"""Blocks of Z-Image, and the embedding of its time step.

Source: diffusers 0.42.1, models/transformers/transformer_z_image.py.
"""

from __future__ import annotations

from memcalc import ops
from memcalc.autograd.tensor import Tensor
from memcalc.nn.layers.complex_rotary import complex_rotated
from memcalc.nn.layers.diffusion import NoDropout, native_attention
from memcalc.nn.layers.diffusion_norms import EagerRMSNorm
from memcalc.nn.layers.linear import Linear
from memcalc.nn.layers.norms import LayerNorm
from memcalc.nn.module import Module
from memcalc.tables.dtypes import FP32

CONDITIONING, _TIME = 256, 1024
"""Channels of the conditioning and of the time embedding's middle."""
"""Channels of the conditioning and of the time embedding's middle; what lengths are padded to a multiple of."""


class TimestepEmbedder(Module):
    """Sinusoids of the time step through two linear layers."""

    def __init__(self, width: int) -> None:
        self.mlp = [Linear(256, _TIME, bias=True), NoDropout(), Linear(_TIME, width, bias=True)]

    def forward(self, t: Tensor) -> Tensor:
        """[b] to [b, width]."""
        freqs = t.tape.empty((128,), FP32)
        args = ops.mul(ops.unsqueeze(t, 1), ops.unsqueeze(freqs, 0))
        embedding = ops.cat([ops.cos(args), ops.sin(args)], -1)
        del freqs, args
        first = self.mlp[0]
        assert isinstance(first, Linear)
        t_freq = ops.to(embedding, first.weight.dtype)
        return self.mlp[2](ops.silu(first(t_freq)))  # type: ignore[no-any-return]


class ZAttention(Module):
    """Self-attention with norms of each head and complex rotary positions."""

    scope = "attention"

    def __init__(self, width: int, heads: int, *, qk_norm: bool) -> None:
        self.heads, self.dim = heads, width // heads
        self.norm_q = EagerRMSNorm(self.dim) if qk_norm else NoDropout()
        self.norm_k = EagerRMSNorm(self.dim) if qk_norm else NoDropout()
        self.to_q = Linear(width, width)
        self.to_k = Linear(width, width)
        self.to_v = Linear(width, width)
        self.to_out = [Linear(width, width), NoDropout()]

    def forward(self, hidden: Tensor, freqs: Tensor) -> Tensor:
        """[b, s, h] to the same."""
        query, key, value = self.to_q(hidden), self.to_k(hidden), self.to_v(hidden)
        query = ops.view(query, *query.shape[:2], self.heads, self.dim)
        key = ops.view(key, *key.shape[:2], self.heads, self.dim)
        value = ops.view(value, *value.shape[:2], self.heads, self.dim)
        query = self.norm_q(query)
        key = self.norm_k(key)
        query = complex_rotated(query, freqs)
        key = complex_rotated(key, freqs)
        hidden = native_attention(query, key, value)
        hidden = ops.reshape(hidden, *hidden.shape[:2], -1)
        hidden = ops.to(hidden, query.dtype)
        return self.to_out[0](hidden)  # type: ignore[no-any-return]


class ZFeedForward(Module):
    """A gated MLP."""

    scope = "MLP"

    def __init__(self, width: int, inner: int) -> None:
        self.w1 = Linear(width, inner)
        self.w2 = Linear(inner, width)
        self.w3 = Linear(width, inner)

    def forward(self, x: Tensor) -> Tensor:
        """[..., width] to the same."""
        return self.w2(_gated(self.w1(x), self.w3(x)))


def _gated(x1: Tensor, x3: Tensor) -> Tensor:
    return ops.mul(ops.silu(x1), x3)


class ZImageTransformerBlock(Module):
    """Attention and MLP, each between two norms; `modulated` scales and gates them by the conditioning."""

    scope = "residual stream"

    def __init__(self, width: int, heads: int, *, qk_norm: bool, modulated: bool) -> None:
        self.attention = ZAttention(width, heads, qk_norm=qk_norm)
        self.feed_forward = ZFeedForward(width, int(width / 3 * 8))
        self.attention_norm1 = EagerRMSNorm(width)
        self.ffn_norm1 = EagerRMSNorm(width)
        self.attention_norm2 = EagerRMSNorm(width)
        self.ffn_norm2 = EagerRMSNorm(width)
        self.modulated = modulated
        if modulated:
            self.adaLN_modulation = [Linear(min(width, CONDITIONING), 4 * width, bias=True)]

    def forward(self, x: Tensor, freqs: Tensor, adaln_input: Tensor | None = None) -> Tensor:
        """[b, s, h] to the same."""
        if not self.modulated:
            attn_out = self.attention(self.attention_norm1(x), freqs)
            x = ops.add(x, self.attention_norm2(attn_out))
            return ops.add(x, self.ffn_norm2(self.feed_forward(self.ffn_norm1(x))))
        assert adaln_input is not None
        mod = self.adaLN_modulation[0](adaln_input)
        scale_msa, gate_msa, scale_mlp, gate_mlp = ops.chunk(ops.unsqueeze(mod, 1), 4, 2)
        gate_msa, gate_mlp = ops.tanh(gate_msa), ops.tanh(gate_mlp)
        scale_msa, scale_mlp = ops.add_scalar(scale_msa), ops.add_scalar(scale_mlp)
        attn_out = self.attention(ops.mul(self.attention_norm1(x), scale_msa), freqs)
        x = ops.add(x, ops.mul(gate_msa, self.attention_norm2(attn_out)))
        ff_output = self.feed_forward(ops.mul(self.ffn_norm1(x), scale_mlp))
        return ops.add(x, ops.mul(gate_mlp, self.ffn_norm2(ff_output)))


class FinalLayer(Module):
    """A norm scaled by the conditioning, and the projection to patches."""

    scope = "head"

    def __init__(self, width: int, outputs: int) -> None:
        self.norm_final = LayerNorm(width, affine=False)
        self.linear = Linear(width, outputs, bias=True)
        self.adaLN_modulation = [NoDropout(), Linear(min(width, CONDITIONING), width, bias=True)]

    def forward(self, x: Tensor, conditioning: Tensor) -> Tensor:
        """[b, s, h] to [b, s, outputs]."""
        scale = ops.add_scalar(self.adaLN_modulation[1](ops.silu(conditioning)))
        scale = ops.unsqueeze(scale, 1)
        x = ops.mul(self.norm_final(x), scale)
        return self.linear(x)


class OfPatchSize(Module):
    """A layer in a `torch.nn.ModuleDict` under the size of its patches."""

    def __init__(self, name: str, layer: Module) -> None:
        setattr(self, name, layer)
        self.name = name

    def forward(self, x: Tensor, *args: Tensor) -> Tensor:
        """What the layer makes of x."""
        return getattr(self, self.name)(x, *args)  # type: ignore[no-any-return]
