"""SegFormer: overlapping patches, attention over fewer keys than queries, and a class for every place of an image."""

from __future__ import annotations

from memcalc import ops
from memcalc.autograd.tape import OVERHEAD
from memcalc.autograd.tensor import Tensor
from memcalc.config.reader import Config
from memcalc.errors import ConfigError
from memcalc.models.common.heads import with_head
from memcalc.models.family import Family, table
from memcalc.nn.layers.batchnorm_conv import BatchNorm, Convolution2d
from memcalc.nn.layers.linear import Linear
from memcalc.nn.layers.losses import class_loss
from memcalc.nn.layers.norms import LayerNorm
from memcalc.nn.layers.segformer import OverlappingPatches, SegformerLayer, as_image, as_row
from memcalc.nn.model import Batch, Network, Outputs
from memcalc.nn.module import Module
from memcalc.nn.stack import Stack
from memcalc.tables.dtypes import INT64


class SegformerStage(Module):
    """Patches, blocks, norm, and the whole as an image."""

    def __init__(self, c: Config, stage: int, depths: list[int]) -> None:
        widths, rate = c.integers("hidden_sizes", minimum=1), c.probability("drop_path_rate")
        inputs = widths[stage - 1] if stage else c.integer("num_channels")
        patch, stride = c.integers("patch_sizes", minimum=1)[stage], c.integers("strides", minimum=1)[stage]
        self.patch_embeddings = OverlappingPatches(inputs, widths[stage], patch, stride)
        before, total = sum(depths[:stage]), sum(depths)
        rates = [rate * (before + index) / max(total - 1, 1) for index in range(depths[stage])]
        self.blocks = Stack(
            [each > 0 for each in rates],
            lambda index: SegformerLayer(c, stage, rates[index]),
            name=f"stage {stage + 1} block",
        )
        self.layer_norm = LayerNorm(widths[stage])

    def forward(self, states: Tensor) -> Tensor:
        """[b, c, height, width] to [b, h, rows, columns]."""
        states, grid = self.patch_embeddings(states)
        for block in self.blocks:
            states = block(states, grid)
        states = self.layer_norm(states)
        image = ops.reshape(states, states.shape[0], *grid, -1)
        return ops.contiguous(ops.permute(image, 0, 3, 1, 2))


class SegformerTower(Module):
    """The stages; what each makes is given where it is wanted."""

    def __init__(self, c: Config) -> None:
        depths = c.integers("depths", minimum=1)
        keys = ("hidden_sizes", "num_attention_heads", "sr_ratios", "mlp_ratios", "patch_sizes", "strides")
        short = [key for key in keys if len(c.integers(key, minimum=1)) < len(depths)]
        if not depths or short:
            raise ConfigError(f"{c.where} has {len(depths)} 'depths' but fewer {', '.join(short) or 'stages'}.")
        if not c.flag("reshape_last_stage"):
            raise ConfigError(f"{c.where} gives 'reshape_last_stage' as false, which memcalc does not describe.")
        self.stages = [SegformerStage(c, stage, depths) for stage in range(len(depths))]

    def forward(self, pixels: Tensor, *, every: bool) -> tuple[Tensor, ...]:
        """Pixels [b, c, height, width] to the images of the stages, or of the last."""
        states, images = pixels, []
        for stage in self.stages:
            states = stage(states)
            if every:
                images.append(states)
        return tuple(images) if every else (states,)


class SegmentationHead(Module):
    """The stages projected to one width and size, put together, and a class for each place."""

    scope = "head and loss"

    def __init__(self, c: Config) -> None:
        width, sizes = c.integer("decoder_hidden_size"), c.integers("hidden_sizes", minimum=1)
        self.linear_projections = [Linear(size, width, bias=True, group="head") for size in sizes]
        self.linear_fuse = Convolution2d(width * len(sizes), width, 1, 1)
        self.batch_norm = BatchNorm(width)
        self.classifier = Convolution2d(width, c.num_labels(), 1, 1, bias=True)
        self.dropout = c.probability("classifier_dropout_prob")

    def forward(self, first: Tensor, others: tuple[Tensor, ...]) -> Tensor:
        """Images of the stages to logits [b, classes, rows, columns] of the first."""
        projected: tuple[Tensor, ...] = ()
        for image, project in zip((first, *others), self.linear_projections, strict=True):
            grid = image.shape[2], image.shape[3]
            row = project(as_row(image))
            same = ops.interpolate(as_image(row, grid), (first.shape[2], first.shape[3]))
            del row
            projected = (*projected, same)
        del image
        hidden = self.linear_fuse(ops.cat(projected[::-1], 1))
        hidden = self.batch_norm(hidden)
        hidden = ops.relu(hidden)
        hidden = ops.dropout(hidden, self.dropout)
        return self.classifier(hidden)


class Segmenter(Network):
    """A class for every pixel: logits of the first stage's places, made as large as the image for the loss."""

    reads_text = False
    resizable_input = True

    def __init__(self, c: Config) -> None:
        self.segformer, self.decode_head = SegformerTower(c), SegmentationHead(c)
        self.config, self.single = c, c.num_labels() == 1
        if self.single:
            raise ConfigError(f"{c.where} has one label; memcalc describes segmentation with more classes.")

    def forward(self, batch: Batch) -> Outputs:
        """Loss and logits [b, classes, rows, columns]."""
        pixels = batch.pixels(self.config, resizable_input=True)
        images = self.segformer(pixels, every=True)
        logits = self.decode_head(images[0], images[1:])
        tape = pixels.tape
        with tape.scoped("head and loss"):
            if batch.labels is None:
                return Outputs(None, (logits,))
            labels = tape.external_tensor((pixels.shape[0], *pixels.shape[2:]), INT64, OVERHEAD, "labels")
            resized = ops.interpolate(logits, (pixels.shape[2], pixels.shape[3]))
            loss = ops.cross_entropy(resized, labels)
        return Outputs(loss, (logits,))


class SegformerClassifier(Network):
    """A class per image, from the mean of the last stage's places."""

    reads_text = False
    resizable_input = True

    def __init__(self, c: Config) -> None:
        self.segformer, self.width = SegformerTower(c), c.integers("hidden_sizes", minimum=1)[-1]
        self.classifier = Linear(self.width, c.num_labels(), bias=True, group="head")
        self.config, self.problem = c, c.problem_type()

    def forward(self, batch: Batch) -> Outputs:
        """Loss and logits [b, classes]."""
        (image,) = outputs = self.segformer(batch.pixels(self.config, resizable_input=True), every=False)
        with batch.ids.tape.scoped("head and loss"):
            states = ops.permute(image, 0, 2, 3, 1)
            states = ops.reshape(states, image.shape[0], -1, self.width)
            states = ops.mean(states, 1, keepdim=False)
            logits = self.classifier(states)
            loss = None if batch.labels is None else class_loss(logits, batch.class_labels(), self.problem)
        del outputs
        return Outputs(loss, (logits,))


def segformer(c: Config, architecture: str | None) -> Network:
    """SegFormer."""
    return with_head(
        c,
        architecture,
        {"ForSemanticSegmentation": lambda: Segmenter(c), "ForImageClassification": lambda: SegformerClassifier(c)},
    )


FAMILIES = table(
    Family(
        "segformer",
        segformer,
        {
            "image_size": 512,
            "num_channels": 3,
            "depths": [2, 2, 2, 2],
            "sr_ratios": [8, 4, 2, 1],
            "hidden_sizes": [32, 64, 160, 256],
            "patch_sizes": [7, 3, 3, 3],
            "strides": [4, 2, 2, 2],
            "num_attention_heads": [1, 2, 5, 8],
            "mlp_ratios": [4, 4, 4, 4],
            "hidden_act": "gelu",
            "hidden_dropout_prob": 0.0,
            "attention_probs_dropout_prob": 0.0,
            "classifier_dropout_prob": 0.1,
            "drop_path_rate": 0.1,
            "decoder_hidden_size": 256,
            "reshape_last_stage": True,
        },
        blocks="encoder",
        verified="measured rows",
    )
)
