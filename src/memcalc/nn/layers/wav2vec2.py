"""Parts of encoders of sound: convolutions over samples, positions by convolution, layers (wav2vec 2.0, HuBERT)."""

from __future__ import annotations

from memcalc import ops
from memcalc.autograd.tensor import Tensor
from memcalc.config.reader import Config
from memcalc.errors import ConfigError
from memcalc.nn.layers.linear import Linear
from memcalc.nn.layers.mlp import activation
from memcalc.nn.layers.norms import LayerNorm
from memcalc.nn.layers.vision_transformer import VisionAttention
from memcalc.nn.module import Module, Parameter
from memcalc.nn.run_context import run_context
from memcalc.tables.dtypes import BOOL


class Convolution(Module):
    """A convolution over time: weight [out, in / groups, width]."""

    def __init__(self, inputs: int, outputs: int, width: int, stride: int, *, bias: bool) -> None:
        self.weight = Parameter(outputs, inputs, width, group="other")
        self.bias = Parameter(outputs, group="other") if bias else None
        self.stride = stride

    def forward(self, x: Tensor) -> Tensor:
        """[b, in, n] to [b, out, n']."""
        return ops.convolution(x, self.weight, self.bias, stride=self.stride)


class GroupNorm(Module):
    """A norm over time of each channel by itself, or of as many `groups` of channels."""

    def __init__(self, channels: int, groups: int | None = None) -> None:
        self.groups = groups or channels
        self.weight = Parameter(channels, group="norms")
        self.bias = Parameter(channels, group="norms")

    def forward(self, x: Tensor) -> Tensor:
        """[b, c, n] to [b, c, n]."""
        return ops.group_norm(x, self.weight, self.bias, self.groups)


class SampleConvolution(Module):
    """act(norm(convolution)), the norm over time ("group"), over channels ("layer"), or none."""

    scope = "convolutions"

    def __init__(
        self, inputs: int, outputs: int, width: int, stride: int, act: str, *, norm: str | None, bias: bool
    ) -> None:
        self.conv = Convolution(inputs, outputs, width, stride, bias=bias)
        self.layer_norm: Module | None = None
        if norm is not None:
            self.layer_norm = GroupNorm(outputs) if norm == "group" else LayerNorm(outputs)
        self.act = activation(act)
        self.over_channels = norm == "layer"

    def forward(self, hidden: Tensor) -> Tensor:
        """[b, in, n] to [b, out, n']."""
        hidden = self.conv(hidden)
        if self.over_channels:
            hidden = ops.transpose(hidden, 1, 2)
        if self.layer_norm is not None:
            hidden = self.layer_norm(hidden)
        if self.over_channels:
            hidden = ops.transpose(hidden, 1, 2)
        return self.act(hidden)


class NormedConvolution(Module):
    """A convolution whose weight is a direction [out, in / groups, width] times a length for each [1, 1, width]."""

    def __init__(self, hidden: int, width: int, groups: int) -> None:
        if hidden % groups:
            raise ConfigError(f"'num_conv_pos_embedding_groups' {groups} does not divide 'hidden_size' {hidden}.")
        self.bias = Parameter(hidden, group="embedding")
        self.original0 = Parameter(1, 1, width, group="embedding")
        self.original1 = Parameter(hidden, hidden // groups, width, group="embedding")
        self.padding = width // 2

    def forward(self, x: Tensor) -> Tensor:
        """[b, h, s] to [b, h, s'], padded by half the width on either side."""
        weight = ops.weight_norm(self.original1, self.original0)
        return ops.convolution(x, weight, self.bias, padding=self.padding)


class PositionalConvolution(Module):
    """What a wide convolution makes of the states, in place of positions."""

    scope = "embedding"

    def __init__(self, hidden: int, width: int, groups: int, act: str) -> None:
        self.conv = NormedConvolution(hidden, width, groups)
        self.act = activation(act)
        self.even = width % 2 == 0

    def forward(self, hidden: Tensor) -> Tensor:
        """[b, s, h] to [b, s, h]."""
        hidden = ops.transpose(hidden, 1, 2)
        hidden = self.conv(hidden)
        if self.even:
            hidden = ops.narrow(hidden, 2, hidden.shape[2] - 1)
        hidden = self.act(hidden)
        return ops.transpose(hidden, 1, 2)


class SpeechMLP(Module):
    """dropout(dense(dropout(act(dense(x)))))."""

    scope = "MLP"

    def __init__(self, c: Config, hidden: int) -> None:
        width = c.integer("intermediate_size")
        self.intermediate_dense = Linear(hidden, width, bias=True, group="MLP")
        self.output_dense = Linear(width, hidden, bias=True, group="MLP")
        self.act = activation(c.text("hidden_act"))
        self.inner, self.outer = c.probability("activation_dropout"), c.probability("hidden_dropout")

    def forward(self, hidden: Tensor) -> Tensor:
        """[b, s, h] to [b, s, h]."""
        hidden = self.intermediate_dense(hidden)
        hidden = self.act(hidden)
        hidden = ops.dropout(hidden, self.inner)
        hidden = self.output_dense(hidden)
        return ops.dropout(hidden, self.outer)


class LanguageAdapter(Module):
    """Two narrow layers after a norm, which MMS has one of for each language."""

    scope = "MLP"

    def __init__(self, hidden: int, width: int) -> None:
        self.norm = LayerNorm(hidden)
        self.linear_1 = Linear(hidden, width, bias=True, group="MLP")
        self.linear_2 = Linear(width, hidden, bias=True, group="MLP")

    def forward(self, hidden: Tensor) -> Tensor:
        """[b, s, h] to [b, s, h]."""
        hidden = self.norm(hidden)
        hidden = self.linear_1(hidden)
        hidden = ops.relu(hidden)
        return self.linear_2(hidden)


class SpeechLayer(Module):
    """Attention, add, norm, MLP, add, norm; or in the `stable` form norm, attention, add, norm, MLP, add."""

    scope = "residual stream"

    def __init__(self, c: Config, hidden: int, *, stable: bool) -> None:
        self.attention = VisionAttention(
            hidden,
            c.integer("num_attention_heads"),
            names=("q_proj", "k_proj", "v_proj", "out_proj"),
            dropout=c.probability("attention_dropout"),
            own_dtype=True,
        )
        self.layer_norm = LayerNorm(hidden)
        self.feed_forward = SpeechMLP(c, hidden)
        self.final_layer_norm = LayerNorm(hidden)
        adapted = stable and c.get("adapter_attn_dim") is not None
        self.adapter_layer = LanguageAdapter(hidden, c.integer("adapter_attn_dim")) if adapted else None
        self.dropout, self.stable = c.probability("hidden_dropout"), stable

    def forward(self, hidden: Tensor, mask: Tensor | None) -> Tensor:
        """[b, s, h] to [b, s, h]."""
        residual = hidden
        if self.stable:
            hidden = self.layer_norm(hidden)
        hidden, _weights = self.attention(hidden, mask=mask)
        hidden = ops.dropout(hidden, self.dropout)
        hidden = ops.add(residual, hidden)
        if not self.stable:
            hidden = self.layer_norm(hidden)
            hidden = ops.add(hidden, self.feed_forward(hidden))
            return self.final_layer_norm(hidden)
        hidden = ops.add(hidden, self.feed_forward(self.final_layer_norm(hidden)))
        if self.adapter_layer is not None:
            hidden = ops.add(hidden, self.adapter_layer(hidden))
        return hidden


class SpecAugment(Module):
    """In training, a trained vector in place of some stretches of time, and zeros in place of some channels.

    How many vectors are replaced is a matter of chance; as many as the config allows at most are taken.
    """

    scope = "embedding"

    def __init__(self, c: Config, hidden: int) -> None:
        self.share, self.span = c.probability("mask_time_prob"), c.integer("mask_time_length")
        self.channels = c.probability("mask_feature_prob") > 0
        masked = self.share > 0 or self.channels
        self.masked_spec_embed = Parameter(hidden, group="embedding") if masked else None
        self.augments = c.flag("apply_spec_augment")

    def forward(self, hidden: Tensor) -> Tensor:
        """[b, s, h] to [b, s, h], in place."""
        if not run_context(hidden).training or not self.augments:
            return hidden
        batch, length, width = hidden.shape
        if self.share > 0 and self.masked_spec_embed is not None:
            spans = min(int(self.share * length / self.span + 1), length // self.span)
            mask = hidden.tape.empty((batch, length), BOOL)
            hidden = ops.index_put_row_(hidden, mask, self.masked_spec_embed, batch * spans * self.span)
        if self.channels:
            mask = ops.expand(ops.unsqueeze(hidden.tape.empty((batch, width), BOOL), 1), -1, length, -1)
            hidden = ops.masked_fill_(hidden, mask)
        return hidden


def stay(states: list[Tensor] | None) -> None:
    """Say that what each layer made stays, where a layer does not keep what the one before it made for backward.

    `states` are what went into the first layer and what each traced one made.
    """
    if states is None or len(states) < 2 or states[1].storage.allocation.saved:
        return
    for state in states[1:]:
        state.storage.allocation.handed_over = False
