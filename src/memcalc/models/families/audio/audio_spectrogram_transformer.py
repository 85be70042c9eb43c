"""The audio spectrogram transformer: ViT with two leading tokens over the overlapping patches of a spectrogram."""

from __future__ import annotations

from memcalc import ops
from memcalc.autograd.tape import OVERHEAD
from memcalc.autograd.tensor import Tensor
from memcalc.config.reader import Config
from memcalc.errors import ConfigError
from memcalc.models.common.heads import unknown_head
from memcalc.models.common.image_models import ImageClassifier
from memcalc.models.families.vision.vit import vit_blocks
from memcalc.models.family import Family, table, vit_sizes
from memcalc.nn.layers.linear import Linear
from memcalc.nn.layers.norms import LayerNorm
from memcalc.nn.layers.vision_transformer import PatchEmbedding, VisionTower
from memcalc.nn.model import Batch, Network
from memcalc.nn.module import Module, Parameter
from memcalc.nn.run_context import run_context


class SpectrogramEmbeddings(Module):
    """Overlapping patches after a class token and a distillation token, and a trained position for each."""

    scope = "embedding"

    def __init__(self, c: Config, hidden: int) -> None:
        patch = c.integer("patch_size")
        strides = c.integer("frequency_stride"), c.integer("time_stride")
        mels, length = c.integer("num_mel_bins"), c.integer("max_length")
        if min(mels, length) < patch:
            raise ConfigError(
                f"{c.where} has 'num_mel_bins' {mels} and 'max_length' {length}, which hold no patch of 'patch_size' "
                f"{patch}; correct one."
            )
        rows, columns = (mels - patch) // strides[0] + 1, (length - patch) // strides[1] + 1
        self.cls_token = Parameter(1, 1, hidden, group="embedding")
        self.distillation_token = Parameter(1, 1, hidden, group="embedding")
        self.position_embeddings = Parameter(1, rows * columns + 2, hidden, group="embedding")
        self.patch_embeddings = PatchEmbedding(1, hidden, patch, stride=strides)
        self.dropout = c.probability("hidden_dropout_prob")

    def forward(self, spectrogram: Tensor) -> Tensor:
        """Spectrogram [b, frames, mels] to [b, n, h]."""
        embeddings = self.patch_embeddings(ops.transpose(ops.unsqueeze(spectrogram, 1), 2, 3))
        tokens = (self.cls_token, self.distillation_token)
        embeddings = ops.cat([*(ops.expand(token, spectrogram.shape[0], -1, -1) for token in tokens), embeddings], 1)
        embeddings = ops.add(embeddings, self.position_embeddings)
        return ops.dropout(embeddings, self.dropout)


class MeanOfTwo(Module):
    """The mean of the two leading tokens."""

    scope = "head and loss"

    def forward(self, states: Tensor) -> Tensor:
        """[b, n, h] to [b, h]."""
        return ops.mul_scalar(ops.add(ops.select(states, 1), ops.select(states, 1)))


class NormClassifier(Module):
    """dense(LayerNorm(x))."""

    scope = "head and loss"

    def __init__(self, hidden: int, classes: int) -> None:
        self.layernorm = LayerNorm(hidden)
        self.dense = Linear(hidden, classes, bias=True, group="head")

    def forward(self, pooled: Tensor) -> Tensor:
        """[b, h] to logits [b, classes]."""
        pooled = self.layernorm(pooled)
        return self.dense(pooled)


class SpectrogramClassifier(ImageClassifier):
    """A class per spectrogram, whose length the config decides."""

    input_kind = "spectrograms"

    def inputs(self, batch: Batch) -> Tensor:
        """Spectrograms [b, frames, mels], an input of the step."""
        tape, c = batch.ids.tape, self.config
        shape = (batch.ids.shape[0], c.integer("max_length"), c.integer("num_mel_bins"))
        return tape.external_tensor(shape, run_context(tape).weights_dtype, OVERHEAD, "spectrograms")


def spectrogram(c: Config, architecture: str | None) -> Network:
    """The audio spectrogram transformer."""
    name, hidden = architecture or "ASTForAudioClassification", c.integer("hidden_size")
    if not name.endswith("ForAudioClassification"):
        raise unknown_head(c, name, ("ASTForAudioClassification",))

    tower = VisionTower(SpectrogramEmbeddings(c, hidden), vit_blocks(c), after=LayerNorm(hidden), pool=MeanOfTwo())
    return SpectrogramClassifier(c, tower, None, NormClassifier(hidden, c.num_labels()))


FAMILIES = table(
    Family(
        "audio-spectrogram-transformer",
        spectrogram,
        vit_sizes(
            (768, 3072, 12, 12, 0, 16, 0),
            hidden_act="gelu",
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
            qkv_bias=True,
            frequency_stride=10,
            time_stride=10,
            max_length=1024,
            num_mel_bins=128,
        ),
        blocks="encoder",
    )
)
