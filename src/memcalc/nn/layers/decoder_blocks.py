"""Decoder blocks: how attention, MLP, norms and the residual stream are put together."""

from __future__ import annotations

from collections.abc import Callable

from memcalc import ops
from memcalc.autograd.tensor import Tensor
from memcalc.nn.layers.rotary import Rotation
from memcalc.nn.module import Module
from memcalc.tables.dtypes import FP32

NormNames = tuple[str | None, str | None, str | None, str | None]
"""Names of the norms before and after attention, before and after the MLP; None where there is none."""

PRE_NORM: NormNames = ("input_layernorm", None, "post_attention_layernorm", None)
POST_NORM: NormNames = (None, "post_attention_layernorm", None, "post_feedforward_layernorm")
PRE_AND_POST_NORM: NormNames = (
    "input_layernorm",
    "post_attention_layernorm",
    "pre_feedforward_layernorm",
    "post_feedforward_layernorm",
)


class DecoderBlock(Module):
    """Attention, then MLP, each added to the residual stream, with the norms that `names` lists.

    attention, mlp: the sublayers; `norm` makes a norm.
    names: attribute names of the norms before and after attention and MLP.
    dropout: probability of dropout on what is added to the residual stream.
    residual_multiplier: multiply what is added by a number (Granite).
    order: the order in which sublayers and norms are registered.
    returns_weights: return the attention's probabilities too (Bamba).
    """

    scope = "residual stream"

    def __init__(
        self,
        attention: Module,
        mlp: Module,
        norm: Callable[[], Module],
        names: NormNames = PRE_NORM,
        *,
        dropout: float = 0.0,
        residual_multiplier: bool = False,
        order: str = "self_attn mlp norms",
        returns_weights: bool = False,
    ) -> None:
        norms = {name: norm() for name in names if name is not None}
        for part in order.split():
            vars(self).update(norms if part == "norms" else {part: attention if part == "self_attn" else mlp})
        self.names = names
        self.dropout = dropout
        self.residual_multiplier = residual_multiplier
        self.returns_weights = returns_weights

    def _norm(self, index: int) -> Module | None:
        name = self.names[index]
        return None if name is None else vars(self)[name]

    self_attn: Module
    mlp: Module

    def forward(
        self, hidden: Tensor, rotation: Rotation, mask: Tensor | None, position_ids: Tensor
    ) -> Tensor | tuple[Tensor, Tensor | None]:
        """[b, s, h] to [b, s, h]."""
        before_attention, after_attention, before_mlp, after_mlp = map(self._norm, range(4))
        residual = hidden
        if before_attention is not None:
            hidden = before_attention(hidden)
        hidden, _weights = self.self_attn(hidden, rotation, mask)
        if after_attention is not None:
            hidden = after_attention(hidden)
        hidden = ops.add(residual, self._branch(hidden))
        residual = hidden
        if before_mlp is not None:
            hidden = before_mlp(hidden)
        fed = self.mlp(hidden)
        hidden, _weights = fed if isinstance(fed, tuple) else (fed, _weights)
        del fed
        if after_mlp is not None:
            hidden = after_mlp(hidden)
        hidden = ops.add(residual, self._branch(hidden))
        return (hidden, _weights) if self.returns_weights else hidden

    def _branch(self, x: Tensor) -> Tensor:
        x = ops.dropout(x, self.dropout)
        return ops.mul_scalar(x) if self.residual_multiplier else x


class MixerBlock(Module):
    """One norm and one mixer of tokens.

    fp32: add in fp32 (`residual_in_fp32`, Mamba).
    alone: the mixer takes nothing but the hidden states (Nemotron H: an MLP, experts).
    """

    scope = "residual stream"

    def __init__(self, mixer: Module, norm: Module, *, fp32: bool = False, alone: bool = False) -> None:
        self.norm = norm
        self.mixer = mixer
        self.fp32 = fp32
        self.alone = alone

    def forward(
        self, hidden: Tensor, rotation: Rotation | None, mask: Tensor | None, position_ids: Tensor | None
    ) -> Tensor:
        """[b, s, h] to [b, s, h]."""
        residual = hidden
        hidden = self.norm(ops.to(hidden, self.norm.weight.dtype))  # type: ignore[attr-defined]
        if self.fp32:
            residual = ops.to(residual, FP32)
        if self.alone:
            hidden = self.mixer(hidden)
        else:
            hidden, _weights = self.mixer(hidden, rotation, mask)
        return ops.add(residual, hidden)


class ParallelBlock(Module):
    """One norm, attention and MLP both from it, and both added to the residual stream (Cohere, StableLM)."""

    scope = "residual stream"

    def __init__(self, attention: Module, mlp: Module, norm: Callable[[], Module], *, dropout: float = 0.0) -> None:
        self.self_attn = attention
        self.mlp = mlp
        self.input_layernorm = norm()
        self.dropout = dropout

    def forward(self, hidden: Tensor, rotation: Rotation, mask: Tensor | None, position_ids: Tensor) -> Tensor:
        """[b, s, h] to [b, s, h]."""
        residual = hidden
        hidden = self.input_layernorm(hidden)
        attended, _weights = self.self_attn(hidden, rotation, mask)
        fed = self.mlp(hidden)
        fed = ops.dropout(fed, self.dropout)
        return ops.add(ops.add(residual, attended), fed)
