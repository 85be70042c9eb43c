"""SegFormer's blocks: attention over fewer keys than queries, and an MLP with a convolution in the middle."""

from __future__ import annotations

from memcalc import ops
from memcalc.autograd.tensor import Tensor
from memcalc.config.reader import Config
from memcalc.errors import ConfigError
from memcalc.nn.layers.attention_backends import attend, split_heads
from memcalc.nn.layers.batchnorm_conv import Convolution2d
from memcalc.nn.layers.linear import Linear
from memcalc.nn.layers.mlp import activation
from memcalc.nn.layers.norms import LayerNorm
from memcalc.nn.layers.swin import Grid
from memcalc.nn.layers.vision_transformer import drop_path
from memcalc.nn.module import Module


def as_image(states: Tensor, grid: Grid) -> Tensor:
    """[b, n, h] as an image [b, h, rows, columns] with the channels innermost."""
    return ops.reshape(ops.transpose(states, 1, 2), states.shape[0], states.shape[2], *grid)


def as_row(image: Tensor) -> Tensor:
    """An image [b, h, rows, columns] as [b, n, h]."""
    return ops.transpose(ops.reshape(image, *image.shape[:2], -1), 1, 2)


class OverlappingPatches(Module):
    """A convolution that strides less far than it is wide, and LayerNorm."""

    scope = "embedding"

    def __init__(self, inputs: int, hidden: int, patch: int, stride: int) -> None:
        self.proj = Convolution2d(inputs, hidden, patch, stride, bias=True)
        self.layer_norm = LayerNorm(hidden)

    def forward(self, image: Tensor) -> tuple[Tensor, Grid]:
        """[b, c, height, width] to [b, n, h] and its grid."""
        embeddings = self.proj(image)
        grid = embeddings.shape[2], embeddings.shape[3]
        embeddings = as_row(embeddings)
        embeddings = self.layer_norm(embeddings)
        return embeddings, grid


class SequenceReduction(Module):
    """One vector for a square of places, normalised."""

    scope = "attention"

    def __init__(self, hidden: int, ratio: int) -> None:
        self.sequence_reduction = Convolution2d(hidden, hidden, ratio, ratio, bias=True, padding=0)
        self.layer_norm = LayerNorm(hidden)

    def forward(self, states: Tensor, grid: Grid) -> Tensor:
        """[b, n, h] to [b, n / ratio², h]."""
        states = as_image(states, grid)
        states = self.sequence_reduction(states)
        states = as_row(states)
        return self.layer_norm(states)


class ReducedAttention(Module):
    """Attention whose keys and values come from fewer vectors."""

    scope = "attention"

    def __init__(self, c: Config, hidden: int, heads: int, ratio: int) -> None:
        if hidden % heads:
            raise ConfigError(f"{c.where} has a stage of width {hidden}, which its {heads} heads do not divide.")
        self.head_dim = hidden // heads
        self.q_proj = Linear(hidden, hidden, bias=True, group="attention")
        self.k_proj = Linear(hidden, hidden, bias=True, group="attention")
        self.v_proj = Linear(hidden, hidden, bias=True, group="attention")
        self.o_proj = Linear(hidden, hidden, bias=True, group="attention")
        self.sequence_reduction = SequenceReduction(hidden, ratio) if ratio > 1 else None
        self.dropout = c.probability("attention_probs_dropout_prob")

    def forward(self, hidden: Tensor, grid: Grid) -> tuple[Tensor, Tensor | None]:
        """[b, n, h] to [b, n, h], and the probabilities where they exist."""
        query = split_heads(self.q_proj(hidden), self.head_dim)
        fewer = hidden if self.sequence_reduction is None else self.sequence_reduction(hidden, grid)
        key = split_heads(self.k_proj(fewer), self.head_dim)
        value = split_heads(self.v_proj(fewer), self.head_dim)
        out, weights = attend(query, key, value, None, 1, self.dropout)
        out = ops.contiguous(ops.reshape(out, *hidden.shape[:-1], -1))
        out = self.o_proj(out)
        return out, weights


class MixMLP(Module):
    """An MLP with a convolution of each channel by itself in the middle."""

    scope = "MLP"

    def __init__(self, c: Config, hidden: int, width: int) -> None:
        self.fc1 = Linear(hidden, width, bias=True, group="MLP")
        self.dwconv = Convolution2d(width, width, 3, 1, groups=width, bias=True)
        self.act = activation(c.text("hidden_act"))
        self.fc2 = Linear(width, hidden, bias=True, group="MLP")
        self.dropout = c.probability("hidden_dropout_prob")

    def forward(self, hidden: Tensor, grid: Grid) -> Tensor:
        """[b, n, h] to [b, n, h]."""
        hidden = self.fc1(hidden)
        hidden = self._mixed(hidden, grid)
        hidden = self.act(hidden)
        hidden = ops.dropout(hidden, self.dropout)
        hidden = self.fc2(hidden)
        return ops.dropout(hidden, self.dropout)

    def _mixed(self, hidden: Tensor, grid: Grid) -> Tensor:
        hidden = as_image(hidden, grid)
        hidden = self.dwconv(hidden)
        return as_row(hidden)


class SegformerLayer(Module):
    """Norm, attention, add; norm, MLP, add."""

    scope = "residual stream"

    def __init__(self, c: Config, stage: int, dropped: float) -> None:
        hidden, heads, ratio, widening = (
            c.integers(key, minimum=1)[stage]
            for key in ("hidden_sizes", "num_attention_heads", "sr_ratios", "mlp_ratios")
        )
        self.layernorm_before = LayerNorm(hidden)
        self.attention = ReducedAttention(c, hidden, heads, ratio)
        self.layernorm_after = LayerNorm(hidden)
        self.mlp = MixMLP(c, hidden, hidden * widening)
        self.dropout, self.dropped = c.probability("hidden_dropout_prob"), dropped

    def forward(self, hidden: Tensor, grid: Grid) -> Tensor:
        """[b, n, h] to [b, n, h]."""
        residual = hidden
        hidden = self.layernorm_before(hidden)
        hidden, _weights = self.attention(hidden, grid)
        hidden = ops.dropout(hidden, self.dropout)
        hidden = ops.add(drop_path(hidden, self.dropped), residual)
        residual = hidden
        hidden = self.layernorm_after(hidden)
        hidden = self.mlp(hidden, grid)
        return ops.add(drop_path(hidden, self.dropped), residual)
