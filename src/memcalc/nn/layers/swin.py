"""Attention inside windows of a grid of patches, which every other block shifts by half a window (Swin)."""

from __future__ import annotations

from memcalc import ops
from memcalc.autograd.tensor import Tensor
from memcalc.config.reader import Config
from memcalc.errors import ConfigError
from memcalc.nn.layers.attention_backends import attend, split_heads
from memcalc.nn.layers.linear import Linear
from memcalc.nn.layers.mlp import PlainMLP
from memcalc.nn.layers.norms import LayerNorm
from memcalc.nn.layers.vision_transformer import drop_path
from memcalc.nn.module import Buffer, Module, Parameter
from memcalc.tables.dtypes import INT64, DType

Grid = tuple[int, int]
"""Rows and columns of patches."""


def partition(states: Tensor, window: int) -> Tensor:
    """[b, rows, columns, h] to windows [b · windows, w, w, h], a copy."""
    batch, rows, columns, hidden = states.shape
    states = ops.view(states, batch, rows // window, window, columns // window, window, hidden)
    return ops.view(ops.contiguous(ops.transpose(states, 2, 3)), -1, window, window, hidden)


def reverse(windows: Tensor, window: int, grid: Grid) -> Tensor:
    """Windows [b · windows, w, w, h] back to [b, rows, columns, h], a copy."""
    hidden = windows.shape[-1]
    windows = ops.view(windows, -1, grid[0] // window, grid[1] // window, window, window, hidden)
    return ops.view(ops.contiguous(ops.transpose(windows, 2, 3)), -1, *grid, hidden)


class WindowBias(Module):
    """A trained bias on the scores [1, heads, w², w²] for the relative place of two patches of a window."""

    def __init__(self, heads: int, window: int) -> None:
        self.area = window**2
        self.relative_position_bias_table = Parameter((2 * window - 1) ** 2, heads, group="attention")
        self.relative_position_index = Buffer(self.area**2, dtype=INT64)

    def forward(self, _states: Tensor) -> Tensor:
        """The bias; the states only give their tape."""
        bias = ops.index_select(self.relative_position_bias_table, self.relative_position_index)
        bias = ops.view(bias, self.area, self.area, -1)
        return ops.unsqueeze(ops.contiguous(ops.permute(bias, 2, 0, 1)), 0)


class WindowAttention(Module):
    """Attention of the patches of one window."""

    scope = "attention"

    def __init__(self, c: Config, hidden: int, heads: int, window: int) -> None:
        if hidden % heads:
            raise ConfigError(f"{c.where} has 'num_heads' {heads} in a stage of width {hidden}; correct one.")
        self.head_dim, bias = hidden // heads, c.flag("qkv_bias")
        self.q_proj = Linear(hidden, hidden, bias=bias, group="attention")
        self.k_proj = Linear(hidden, hidden, bias=bias, group="attention")
        self.v_proj = Linear(hidden, hidden, bias=bias, group="attention")
        self.o_proj = Linear(hidden, hidden, bias=True, group="attention")
        self.relative_position_bias = WindowBias(heads, window)
        self.dropout = c.probability("attention_probs_dropout_prob")

    def forward(self, windows: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Windows [b · windows, w², h] to the same, and the probabilities; the mask is [windows, w², w²]."""
        query = split_heads(self.q_proj(windows), self.head_dim)
        key = split_heads(self.k_proj(windows), self.head_dim)
        value = split_heads(self.v_proj(windows), self.head_dim)
        bias = self.relative_position_bias(windows)
        combined = bias
        if mask is not None:
            batch, length = windows.shape[0] // mask.shape[0], windows.shape[1]
            mask = ops.expand(ops.unsqueeze(ops.unsqueeze(mask, 1), 0), batch, -1, -1, -1, -1)
            mask = ops.reshape(mask, -1, 1, length, length)
            combined = ops.add(bias, mask)
        out, weights = attend(query, key, value, combined, 1, self.dropout)
        out = ops.contiguous(ops.reshape(out, *windows.shape[:-1], -1))
        out = self.o_proj(out)
        return out, weights


class ShiftedLayer(Module):
    """Norm, attention in windows shifted by `shift`, add; norm, MLP, add. Windows that stick out are padded."""

    scope = "residual stream"
    supports_checkpointing = False
    no_checkpointing_reason = (
        "Transformers checkpoints the stages of this family and the blocks in them, one inside the other, which "
        "memcalc does not describe"
    )

    def __init__(self, c: Config, hidden: int, heads: int, grid: Grid, shift: int, dropped: float) -> None:
        self.window, self.grid, self.shift = c.integer("window_size"), grid, shift
        self.attention = WindowAttention(c, hidden, heads, self.window)
        self.layernorm_before = LayerNorm(hidden)
        self.layernorm_after = LayerNorm(hidden)
        width = int(c.factor("mlp_ratio") * hidden)
        self.mlp = PlainMLP(hidden, width, c.text("hidden_act"), names=("fc1", "fc2"), bias=True)
        self.dropout, self.path_dropout = c.probability("hidden_dropout_prob"), dropped

    def forward(self, hidden: Tensor) -> tuple[Tensor, Tensor | None]:
        """[b, n, h] to [b, n, h], and the probabilities where they exist."""
        (rows, columns), window, (batch, _, width) = self.grid, self.window, hidden.shape
        shortcut = hidden
        hidden = self.layernorm_before(hidden)
        hidden = ops.view(hidden, batch, rows, columns, width)
        hidden = ops.pad(hidden, 1, -rows % window, (2, -columns % window))
        padded = hidden.shape[1], hidden.shape[2]
        windows = partition(self._shifted(hidden), window)
        windows = ops.view(windows, -1, window**2, width)
        mask = self._mask(windows, padded, hidden.dtype) if self.shift else None
        attended, weights = self.attention(windows, mask)
        attended = ops.dropout(attended, self.dropout)
        image = ops.view(attended, -1, window, window, width)
        image = self._shifted(reverse(image, window, padded))
        if padded != self.grid:
            image = ops.narrow(image, 1, rows) if padded[0] > rows else image
            image = ops.narrow(image, 2, columns) if padded[1] > columns else image
            image = ops.contiguous(image)
        image = ops.view(image, batch, rows * columns, width)
        hidden = ops.add(shortcut, drop_path(image, self.path_dropout))
        residual = hidden
        hidden = self.layernorm_after(hidden)
        hidden = self.mlp(hidden)
        hidden = ops.add(ops.dropout(hidden, self.dropout), residual)
        return hidden, weights

    def _shifted(self, image: Tensor) -> Tensor:
        return ops.roll(image) if self.shift else image

    def _mask(self, windows: Tensor, grid: Grid, dtype: DType) -> Tensor:
        """Which patches of a window [windows, w², w²] were neighbours before the shift."""
        tape, area = windows.tape, self.window**2
        with tape.scoped("attention mask"):
            regions = tape.empty((1, *grid, 1), dtype)
            inside = ops.view(partition(regions, self.window), -1, area)
            mask = ops.sub(ops.unsqueeze(inside, 1), ops.unsqueeze(inside, 2))
            mask = ops.masked_fill(mask, ops.compare(mask))
            return ops.masked_fill(mask, ops.compare(mask))
