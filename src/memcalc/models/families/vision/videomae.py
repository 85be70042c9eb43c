"""VideoMAE: a vision transformer over blocks of several frames each."""

from __future__ import annotations

from memcalc import ops
from memcalc.autograd.tape import OVERHEAD
from memcalc.autograd.tensor import Tensor
from memcalc.config.reader import Config
from memcalc.errors import ConfigError
from memcalc.models.common.heads import unknown_head
from memcalc.models.common.image_models import ImageClassifier
from memcalc.models.family import Family, table, vit_sizes
from memcalc.nn.layers.attention_backends import attend_same_dtype, split_heads
from memcalc.nn.layers.bert import DenseActivation, DenseAdd
from memcalc.nn.layers.linear import Linear
from memcalc.nn.layers.norms import LayerNorm
from memcalc.nn.layers.vision_transformer import VisionTower, grid_of
from memcalc.nn.model import IMAGES, Batch, Network
from memcalc.nn.module import Module, Parameter
from memcalc.nn.run_context import run_context
from memcalc.nn.stack import Stack


class TubeletEmbeddings(Module):
    """A vector for each block of a video, and sinusoids that come from host memory in every step."""

    scope = "embedding"

    def __init__(self, c: Config, hidden: int) -> None:
        patch, depth, frames = c.integer("patch_size"), c.integer("tubelet_size"), c.integer("num_frames")
        if frames < depth:
            raise ConfigError(f"{c.where} has 'num_frames' {frames}, fewer than 'tubelet_size' {depth}; correct one.")
        rows, columns = grid_of(c)
        self.count = rows * columns * (frames // depth)
        self.weight = Parameter(hidden, c.integer("num_channels"), depth, patch, patch, group="embedding")
        self.bias = Parameter(hidden, group="embedding")

    def forward(self, pixels: Tensor) -> Tensor:
        """Pixels [b, frames, c, height, width] to [b, n, h]."""
        embeddings = self._patches(pixels)
        return ops.add(embeddings, ops.empty_like(embeddings.tape.empty((1, *embeddings.shape[1:]), embeddings.dtype)))

    def _patches(self, pixels: Tensor) -> Tensor:
        pixels = ops.permute(pixels, 0, 2, 1, 3, 4)
        grid = ops.convolution(pixels, self.weight, self.bias, stride=self.weight.shape[2:])
        return ops.transpose(ops.view(grid, *grid.shape[:2], -1), 1, 2)


class VideoMaeOutput(Module):
    """dropout(dense(x)); what the attention saw is handed over and not used."""

    def __init__(self, hidden: int, dropout: float) -> None:
        self.dense = Linear(hidden, hidden, bias=True, group="attention")
        self.dropout = dropout

    def forward(self, attended: Tensor, _seen: Tensor) -> Tensor:
        """[b, n, h] to [b, n, h]."""
        out = self.dense(attended)
        return ops.dropout(out, self.dropout)


class VideoMaeAttention(Module):
    """Attention without a bias on the keys, and its output."""

    scope = "attention"

    def __init__(self, c: Config, hidden: int) -> None:
        self.head_dim = hidden // c.divides("num_attention_heads", "hidden_size")
        bias = c.flag("qv_bias")
        self.query = Linear(hidden, hidden, bias=bias, group="attention")
        self.key = Linear(hidden, hidden, group="attention")
        self.value = Linear(hidden, hidden, bias=bias, group="attention")
        self.output = VideoMaeOutput(hidden, c.probability("hidden_dropout_prob"))
        self.dropout = c.probability("attention_probs_dropout_prob")

    def forward(self, hidden: Tensor) -> Tensor:
        """[b, n, h] to [b, n, h]."""
        attended, _weights = self._attended(hidden)
        return self.output(attended, hidden)

    def _attended(self, hidden: Tensor) -> tuple[Tensor, Tensor | None]:
        key = split_heads(self.key(hidden), self.head_dim)
        value = split_heads(self.value(hidden), self.head_dim)
        query = split_heads(self.query(hidden), self.head_dim)
        out, weights = attend_same_dtype(query, key, value, None, self.dropout, cast_back=False)
        return ops.reshape(ops.contiguous(out), *hidden.shape[:-1], -1), weights


class VideoMaeLayer(Module):
    """Norm, attention, add; norm, MLP, add."""

    scope = "residual stream"

    def __init__(self, c: Config, hidden: int) -> None:
        width = c.integer("intermediate_size")
        self.attention = VideoMaeAttention(c, hidden)
        self.intermediate = DenseActivation(hidden, width, c.text("hidden_act"), "MLP")
        self.output = DenseAdd(width, hidden, c.probability("hidden_dropout_prob"), "MLP")
        self.layernorm_before = LayerNorm(hidden)
        self.layernorm_after = LayerNorm(hidden)

    def forward(self, hidden: Tensor, mask: None = None) -> Tensor:
        """[b, n, h] to [b, n, h]."""
        normed = self.layernorm_before(hidden)
        attended = self.attention(normed)
        hidden = ops.add(attended, hidden)
        fed = self.layernorm_after(hidden)
        fed = self.intermediate(fed)
        return self.output(fed, hidden)


class MeanPoolClassifier(Module):
    """Classes of the normalised mean of all blocks, or of the first one."""

    scope = "head and loss"

    def __init__(self, hidden: int, classes: int, *, mean: bool) -> None:
        self.fc_norm = LayerNorm(hidden) if mean else None
        self.classifier = Linear(hidden, classes, bias=True, group="head")

    def forward(self, states: Tensor) -> Tensor:
        """[b, n, h] to logits [b, classes]."""
        if self.fc_norm is None:
            out = ops.select(states, 1)
        else:
            out = ops.mean(states, 1, keepdim=False)
            out = self.fc_norm(out)
        return self.classifier(out)


class VideoClassifier(ImageClassifier):
    """A class per video, whose length the config decides."""

    input_kind = "videos"

    def inputs(self, batch: Batch) -> Tensor:
        """Pixels [b, frames, c, height, width], an input of the step."""
        tape, c = batch.ids.tape, self.config
        shape = (batch.ids.shape[0], c.integer("num_frames"), c.integer("num_channels"), *c.sides("image_size"))
        return tape.external_tensor(shape, run_context(tape).weights_dtype, OVERHEAD, IMAGES)


def videomae(c: Config, architecture: str | None) -> Network:
    """VideoMAE, fine-tuned."""
    name, hidden = architecture or "VideoMAEForVideoClassification", c.integer("hidden_size")
    if not name.endswith("ForVideoClassification"):
        raise unknown_head(c, name, ("VideoMAEForVideoClassification",))
    mean = c.flag("use_mean_pooling")
    tower = VisionTower(
        TubeletEmbeddings(c, hidden),
        Stack(["layer"] * c.integer("num_hidden_layers"), lambda _: VideoMaeLayer(c, hidden)),
        after=None if mean else LayerNorm(hidden),
    )
    return VideoClassifier(c, tower, lambda states: states, MeanPoolClassifier(hidden, c.num_labels(), mean=mean))


FAMILIES = table(
    Family(
        "videomae",
        videomae,
        vit_sizes(
            (768, 3072, 12, 12, 224, 16, 3),
            num_frames=16,
            tubelet_size=2,
            hidden_act="gelu",
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
            qv_bias=True,
            use_mean_pooling=True,
        ),
        blocks="encoder",
        verified="measured rows",
    )
)
