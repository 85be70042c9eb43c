"""wav2vec 2.0 and HuBERT: convolutions over the samples of a recording, and an encoder of what they make of it.

The sequence length is the number of samples (16,000 a second).
"""

from __future__ import annotations

from memcalc import ops
from memcalc.autograd.graph import require_gradient
from memcalc.autograd.tensor import Tensor
from memcalc.common.assumption import Assumption
from memcalc.config.reader import Config
from memcalc.errors import ConfigError, TooShortError
from memcalc.models.common.speech_models import speech
from memcalc.models.family import Family, sizes, table
from memcalc.nn.layers.linear import Linear
from memcalc.nn.layers.norms import LayerNorm
from memcalc.nn.layers.wav2vec2 import PositionalConvolution, SampleConvolution, SpecAugment, SpeechLayer, stay
from memcalc.nn.model import Network
from memcalc.nn.module import Module
from memcalc.nn.run_context import run_context
from memcalc.nn.stack import Stack


class FeatureEncoder(Module):
    """The convolutions. Training makes the samples need a gradient, so that the first one can be checkpointed."""

    def __init__(self, c: Config) -> None:
        widths, kernels, strides = (c.integers(key, minimum=1) for key in ("conv_dim", "conv_kernel", "conv_stride"))
        if not len(widths) == len(kernels) == len(strides) > 0:
            raise ConfigError(
                f"{c.where} has 'conv_dim', 'conv_kernel' and 'conv_stride' of different lengths; correct one."
            )
        kind, bias, act = c.text("feat_extract_norm"), c.flag("conv_bias"), c.text("feat_extract_activation")
        if kind not in ("group", "layer"):
            raise ConfigError(f"{c.where} gives 'feat_extract_norm' as {kind!r}; it must be group or layer.")

        def layer(index: int) -> Module:
            inputs = widths[index - 1] if index else 1
            norm = kind if kind == "layer" or index == 0 else None
            return SampleConvolution(inputs, widths[index], kernels[index], strides[index], act, norm=norm, bias=bias)

        self.conv_layers = Stack(list(range(len(widths))), layer, name="convolution")
        self.kernels, self.strides = kernels, strides

    def frames(self, samples: int) -> int:
        """How many vectors the convolutions make of so many samples. Raises TooShortError where there are none."""
        left = samples
        for kernel, stride in zip(self.kernels, self.strides, strict=True):
            left = (left - kernel) // stride + 1
            if left < 1:
                raise TooShortError(
                    f"{samples:,} samples are too few for the convolutions; --seq-len is the number of samples, "
                    "16,000 for a second."
                )
        return left

    def forward(self, samples: Tensor) -> Tensor:
        """Samples [b, n] to features [b, c, s]."""
        hidden = ops.unsqueeze(samples, 1)
        if run_context(samples).training:
            require_gradient(hidden)
            hidden.tape.leaves.append(hidden)
        for layer in self.conv_layers:
            hidden = layer(hidden)
        return hidden


class FeatureProjection(Module):
    """LayerNorm and the projection to the encoder's width; wav2vec 2.0 gives what the norm made as well."""

    scope = "embedding"

    def __init__(self, c: Config, width: int, *, both: bool) -> None:
        self.layer_norm = LayerNorm(width) if c.flag("feat_proj_layer_norm") else None
        self.projection = Linear(width, c.integer("hidden_size"), bias=True, group="embedding")
        self.dropout, self.both = c.probability("feat_proj_dropout"), both

    def forward(self, features: Tensor) -> tuple[Tensor, Tensor | None]:
        """[b, s, c] to [b, s, h]."""
        if self.layer_norm is not None:
            features = self.layer_norm(features)
        hidden = self.projection(features)
        if not self.both:
            del features
            return ops.dropout(hidden, self.dropout), None
        hidden = ops.dropout(hidden, self.dropout)
        return hidden, features


class SpeechEncoder(Module):
    """Positions by convolution, LayerNorm before the layers or, in the `stable` form, after them.

    What a layer returns besides its states goes to the next one (WavLM's bias).
    """

    def __init__(self, c: Config, hidden: int, layers: Stack | None = None) -> None:
        self.stable = c.flag("do_stable_layer_norm")
        self.pos_conv_embed = PositionalConvolution(
            hidden,
            c.integer("num_conv_pos_embeddings"),
            c.integer("num_conv_pos_embedding_groups"),
            c.text("feat_extract_activation"),
        )
        self.layer_norm = LayerNorm(hidden)
        depth = c.integer("num_hidden_layers")
        self.carries = layers is not None
        self.layers = layers or Stack(["layer"] * depth, lambda _: SpeechLayer(c, hidden, stable=self.stable))
        self.dropout = c.probability("hidden_dropout")

    def forward(self, hidden: Tensor, every: list[Tensor] | None) -> Tensor:
        """[b, s, h] to [b, s, h]; what each layer takes and gives is put into `every` where there is such a list."""
        positions = self.pos_conv_embed(hidden)
        hidden = ops.add(hidden, positions)
        if not self.stable:
            hidden = self.layer_norm(hidden)
        hidden = ops.dropout(hidden, self.dropout)
        if every is not None:
            every.append(hidden)
        carried: Tensor | None = None
        for layer in self.layers:
            if self.carries:
                hidden, carried = layer(hidden, bias=carried)
                if carried is not None:
                    carried.storage.allocation.handed_over = False  # several layers pass on what the first made
            else:
                hidden = layer(hidden, mask=None)
            if every is not None:
                every.append(hidden)
        stay(every)
        hidden.tape.allocate(0)  # a sample after the last layer: what this model still holds does not die with it
        return self.layer_norm(hidden) if self.stable else hidden


class SpeechModel(Module):
    """Convolutions, projection, masks of SpecAugment in training, encoder."""

    assumption = Assumption(
        "recording_length",
        "a recording has as many samples as --seq-len says (16,000 a second), and no layer of the encoder is skipped",
    )

    def __init__(self, c: Config, *, both: bool, layers: Stack | None = None) -> None:
        hidden = c.integer("hidden_size")
        if c.flag("add_adapter") or c.flag("conv_pos_batch_norm"):
            raise ConfigError(
                f"{c.where} asks for 'add_adapter' or 'conv_pos_batch_norm', which memcalc does not describe."
            )
        self.augment = SpecAugment(c, hidden)
        self.feature_extractor = FeatureEncoder(c)
        width = c.integers("conv_dim", minimum=1)[-1]
        self.feature_projection = FeatureProjection(c, width, both=both)
        self.encoder = SpeechEncoder(c, hidden, layers)

    def forward(self, samples: Tensor, *, every: bool) -> tuple[Tensor, ...]:
        """Samples [b, n] to states [b, s, h], features, and the states of every layer where they are asked for.

        Transformers asks for them wherever a head could weigh them, whether it does or not.
        """
        states: list[Tensor] | None = [] if every else None
        self.feature_extractor.frames(samples.shape[1])
        features = ops.transpose(self.feature_extractor(samples), 1, 2)
        hidden, normed = self.feature_projection(features)
        if normed is not None:
            features = normed
        hidden = self.augment(hidden)
        hidden = self.encoder(hidden, states)
        given = () if normed is None else (features,)
        return hidden, *given, *(states or ())


def wav2vec2(c: Config, architecture: str | None) -> Network:
    """wav2vec 2.0, XLS-R and MMS."""
    return speech(c, architecture, SpeechModel(c, both=True))


def hubert(c: Config, architecture: str | None) -> Network:
    """HuBERT."""
    return speech(c, architecture, SpeechModel(c, both=False))


SPEECH_DEFAULTS = sizes(
    (32, 768, 3072, 12, 12, 0, 0),
    hidden_act="gelu",
    hidden_dropout=0.1,
    activation_dropout=0.1,
    attention_dropout=0.1,
    feat_proj_dropout=0.0,
    final_dropout=0.1,
    feat_extract_norm="group",
    feat_extract_activation="gelu",
    conv_dim=[512] * 7,
    conv_stride=[5, 2, 2, 2, 2, 2, 2],
    conv_kernel=[10, 3, 3, 3, 3, 2, 2],
    num_conv_pos_embeddings=128,
    num_conv_pos_embedding_groups=16,
    apply_spec_augment=True,
    mask_time_prob=0.05,
    mask_time_length=10,
    mask_feature_prob=0.0,
    classifier_proj_size=256,
    feat_proj_layer_norm=True,
)
SPEECH_EVIDENCE = "classification measured, the masks of SpecAugment and the CTC loss read from source"

FAMILIES = table(
    Family("wav2vec2", wav2vec2, SPEECH_DEFAULTS, blocks="encoder", verified=SPEECH_EVIDENCE),
    Family("hubert", hubert, SPEECH_DEFAULTS, blocks="encoder", verified="exact counts; " + SPEECH_EVIDENCE),
)
