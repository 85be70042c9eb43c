"""Swin: attention inside windows that shift from block to block, and patches that merge from stage to stage."""

from __future__ import annotations

from memcalc import ops
from memcalc.autograd.tensor import Tensor
from memcalc.config.reader import Config
from memcalc.errors import ConfigError
from memcalc.models.common.image_models import image_network
from memcalc.models.family import Family, table
from memcalc.nn.layers.linear import Linear
from memcalc.nn.layers.norms import LayerNorm
from memcalc.nn.layers.swin import Grid, ShiftedLayer
from memcalc.nn.layers.vision_transformer import PatchEmbedding, Seen, VisionTower, grid_of
from memcalc.nn.model import Network
from memcalc.nn.module import Module, Parameter
from memcalc.nn.stack import Stack


class SwinEmbeddings(Module):
    """Patches, normalised, with a trained position for each where the config asks for them."""

    scope = "embedding"

    def __init__(self, c: Config, hidden: int, grid: Grid) -> None:
        placed = c.flag("use_absolute_embeddings")
        self.position_embeddings = Parameter(1, grid[0] * grid[1], hidden, group="embedding") if placed else None
        self.patch_embeddings = PatchEmbedding(c.integer("num_channels"), hidden, c.integer("patch_size"))
        self.norm = LayerNorm(hidden)
        self.dropout = c.probability("hidden_dropout_prob")

    def forward(self, pixels: Tensor) -> Tensor:
        """Pixels [b, c, height, width] to [b, n, h]."""
        embeddings = self.patch_embeddings(pixels)
        embeddings = self.norm(embeddings)
        if self.position_embeddings is not None:
            embeddings = ops.add(embeddings, self.position_embeddings)
        return ops.dropout(embeddings, self.dropout)


class PatchMerging(Module):
    """Squares of two by two patches side by side, normalised, and made half as wide."""

    scope = "patch merging"

    def __init__(self, hidden: int) -> None:
        self.reduction = Linear(4 * hidden, 2 * hidden)
        self.norm = LayerNorm(4 * hidden)

    def forward(self, states: Tensor, grid: Grid) -> Tensor:
        """[b, n, h] of a grid to [b, n / 4, 2 h]."""
        batch, _, hidden = states.shape
        states = ops.view(states, batch, *grid, hidden)
        if grid[0] % 2 or grid[1] % 2:
            states = ops.pad(states, 1, grid[0] % 2, (2, grid[1] % 2))
        states = ops.cat([ops.slice(ops.slice(states, 1, 2), 2, 2) for _ in range(4)], -1)
        states = ops.view(states, batch, -1, 4 * hidden)
        states = self.norm(states)
        return self.reduction(states)


class SwinStage(Module):
    """Blocks over one grid of patches, and the merging after them."""

    def __init__(self, c: Config, stage: int, grid: Grid, depths: list[int]) -> None:
        hidden, before, depth = c.integer("embed_dim") * 2**stage, sum(depths[:stage]), depths[stage]
        heads, rate = c.integers("num_heads", minimum=1)[stage], c.probability("drop_path_rate")
        window = c.integer("window_size")
        if min(grid) < window:
            raise ConfigError(
                f"{c.where} has 'window_size' {window}, but stage {stage + 1} has {grid[0]} by {grid[1]} patches; "
                "Transformers needs a window of them: give a larger 'image_size'."
            )
        shift = 0 if min(grid) == window else window // 2

        def dropped(position: int) -> float:
            return rate * (before + position) / max(sum(depths) - 1, 1)

        def block(position: int) -> Module:
            return ShiftedLayer(c, hidden, heads, grid, position % 2 * shift, dropped(position))

        kinds = [(position % 2 * shift > 0, dropped(position) > 0) for position in range(depth)]
        self.blocks = Stack(kinds, block, name=f"stage {stage + 1} block")
        self.downsample = PatchMerging(hidden) if stage + 1 < len(depths) else None
        self.grid = grid

    def forward(self, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        """[b, n, h] to the states of the next stage, a copy of them as an image, and the last probabilities."""
        weights: Tensor | None = None
        for layer in self.blocks:
            hidden, weights = layer(hidden)
        before = hidden
        grid = self.grid
        if self.downsample is not None:
            hidden = self.downsample(before, grid)
            grid = ((grid[0] + 1) // 2, (grid[1] + 1) // 2)
        batch, _, width = hidden.shape
        image = ops.contiguous(ops.permute(ops.view(hidden, batch, *grid, width), 0, 3, 1, 2))
        return hidden, image, weights


class SwinTower(VisionTower):
    """Embeddings, stages, norm, and the mean of all patches."""

    def __init__(self, c: Config) -> None:
        depths, hidden = c.integers("depths", minimum=1), c.integer("embed_dim")
        if len(depths) != len(c.integers("num_heads", minimum=1)) or not depths:
            raise ConfigError(f"{c.where} has 'depths' and 'num_heads' of different lengths, or none; correct one.")
        grid = grid_of(c)
        self.embeddings = SwinEmbeddings(c, hidden, grid)
        self.stages: list[SwinStage] = []
        for stage in range(len(depths)):
            self.stages.append(SwinStage(c, stage, grid, depths))
            grid = ((grid[0] + 1) // 2, (grid[1] + 1) // 2)
        self.width = hidden * 2 ** (len(depths) - 1)
        self.layernorm = LayerNorm(self.width)

    def forward(self, pixels: Tensor) -> Seen:
        """Pixels [b, c, height, width] to hidden states and their mean."""
        embedded = self.embeddings(pixels)
        hidden = self._stages(embedded)
        states = self.layernorm(hidden)
        pooled = ops.mean(ops.unsqueeze(ops.transpose(states, 1, 2), 2))
        pooled = ops.view(pooled, pooled.shape[0], -1)
        return states, pooled, ()

    def _stages(self, hidden: Tensor) -> Tensor:
        for stage in self.stages:
            hidden, _image, _weights = stage(hidden)
        return hidden


def swin(c: Config, architecture: str | None) -> Network:
    """Swin."""
    tower = SwinTower(c)
    return image_network(c, architecture, lambda _: tower, None, tower.width)


FAMILIES = table(
    Family(
        "swin",
        swin,
        {
            "image_size": 224,
            "patch_size": 4,
            "num_channels": 3,
            "embed_dim": 96,
            "depths": [2, 2, 6, 2],
            "num_heads": [3, 6, 12, 24],
            "window_size": 7,
            "mlp_ratio": 4.0,
            "qkv_bias": True,
            "hidden_dropout_prob": 0.0,
            "attention_probs_dropout_prob": 0.0,
            "drop_path_rate": 0.1,
            "hidden_act": "gelu",
        },
        blocks="encoder",
        attention="eager, sdpa",
    )
)
