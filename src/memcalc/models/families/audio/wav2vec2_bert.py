"""w2v-BERT 2.0: a Conformer over the features of a recording, whose length in frames is the sequence length."""

from __future__ import annotations

from memcalc import ops
from memcalc.autograd.tensor import Tensor
from memcalc.common.assumption import Assumption
from memcalc.config.reader import Config
from memcalc.errors import ConfigError
from memcalc.models.common.speech_models import speech
from memcalc.models.families.audio.wav2vec2 import SPEECH_DEFAULTS, SPEECH_EVIDENCE, FeatureProjection
from memcalc.models.family import Family, table
from memcalc.nn.layers.attention_backends import attend_same_dtype, split_heads
from memcalc.nn.layers.linear import Embedding, Linear
from memcalc.nn.layers.mlp import activation
from memcalc.nn.layers.norms import LayerNorm
from memcalc.nn.layers.wav2vec2 import Convolution, SpecAugment, SpeechMLP, stay
from memcalc.nn.model import Network
from memcalc.nn.module import Module
from memcalc.nn.run_context import run_context
from memcalc.nn.stack import Stack
from memcalc.tables.dtypes import INT64


class DistanceAttention(Module):
    """Attention with a bias on the scores that queries and embeddings of the clipped distance make."""

    scope = "attention"

    def __init__(self, c: Config, hidden: int) -> None:
        self.head_dim = hidden // c.divides("num_attention_heads", "hidden_size")
        self.linear_q = Linear(hidden, hidden, bias=True, group="attention")
        self.linear_k = Linear(hidden, hidden, bias=True, group="attention")
        self.linear_v = Linear(hidden, hidden, bias=True, group="attention")
        self.linear_out = Linear(hidden, hidden, bias=True, group="attention")
        reach = (c.integer(f"{side}_max_position_embeddings", minimum=0) for side in ("left", "right"))
        self.distance_embedding = Embedding(sum(reach) + 1, self.head_dim, group="attention")
        self.dropout = c.probability("attention_dropout")

    def forward(self, hidden: Tensor) -> tuple[Tensor, Tensor | None]:
        """[b, s, h] to [b, s, h], and the probabilities where they exist."""
        query = split_heads(self.linear_q(hidden), self.head_dim)
        key = split_heads(self.linear_k(hidden), self.head_dim)
        value = split_heads(self.linear_v(hidden), self.head_dim)
        bias = self._bias(query)
        mask = bias if run_context(query).attention == "eager" else ops.contiguous(bias)
        out, weights = attend_same_dtype(query, key, value, mask, self.dropout, cast_back=False)
        out = ops.reshape(ops.contiguous(out), *hidden.shape[:-1], -1)
        out = self.linear_out(out)
        return out, weights

    def _bias(self, query: Tensor) -> Tensor:
        length = query.shape[2]
        left = ops.unsqueeze(query.tape.empty((length,), INT64), 1)
        right = ops.unsqueeze(query.tape.empty((length,), INT64), 0)
        distance = ops.sub(right, left)
        distance = ops.empty_like(distance)
        embedded = self.distance_embedding(ops.add_scalar(distance))
        embedded = ops.to(embedded, query.dtype)
        scores = ops.einsum("bhld,lrd->bhlr", query, embedded)
        return ops.mul_scalar(scores)


class ConvolutionModule(Module):
    """Two convolutions over channels with a gate after the first, and one over time, which sees the past, between."""

    scope = "convolutions"

    def __init__(self, c: Config, hidden: int) -> None:
        kernel = c.integer("conv_depthwise_kernel_size")
        if kernel % 2 == 0:
            raise ConfigError(f"{c.where} gives 'conv_depthwise_kernel_size' as {kernel}; it must be odd.")
        self.layer_norm = LayerNorm(hidden)
        self.pointwise_conv1 = Convolution(hidden, 2 * hidden, 1, 1, bias=False)
        self.depthwise_conv = Convolution(1, hidden, kernel, 1, bias=False)
        self.depthwise_layer_norm = LayerNorm(hidden)
        self.act = activation(c.text("hidden_act"))
        self.pointwise_conv2 = Convolution(hidden, hidden, 1, 1, bias=False)
        self.dropout, self.past = c.probability("conformer_conv_dropout"), kernel - 1

    def forward(self, hidden: Tensor) -> Tensor:
        """[b, s, h] to [b, s, h]."""
        hidden = self.layer_norm(hidden)
        hidden = ops.transpose(hidden, 1, 2)
        hidden = self.pointwise_conv1(hidden)
        hidden = ops.glu(hidden, 1)
        hidden = ops.pad(hidden, 2, self.past)
        hidden = self.depthwise_conv(hidden)
        hidden = ops.transpose(self.depthwise_layer_norm(ops.transpose(hidden, 1, 2)), 1, 2)
        hidden = self.act(hidden)
        hidden = self.pointwise_conv2(hidden)
        hidden = ops.dropout(hidden, self.dropout)
        return ops.transpose(hidden, 1, 2)


class ConformerLayer(Module):
    """Half an MLP, attention, convolutions, half an MLP, each with a norm and a residual, and a norm."""

    scope = "residual stream"

    def __init__(self, c: Config, hidden: int) -> None:
        self.ffn1_layer_norm = LayerNorm(hidden)
        self.ffn1 = SpeechMLP(c, hidden)
        self.self_attn_layer_norm = LayerNorm(hidden)
        self.self_attn = DistanceAttention(c, hidden)
        self.conv_module = ConvolutionModule(c, hidden)
        self.ffn2_layer_norm = LayerNorm(hidden)
        self.ffn2 = SpeechMLP(c, hidden)
        self.final_layer_norm = LayerNorm(hidden)
        self.dropout = c.probability("attention_dropout")

    def forward(self, hidden: Tensor) -> Tensor:
        """[b, s, h] to [b, s, h]."""
        residual = hidden
        hidden = self.ffn1_layer_norm(hidden)
        hidden = self.ffn1(hidden)
        hidden = ops.add(ops.mul_scalar(hidden), residual)
        residual = hidden
        hidden = self.self_attn_layer_norm(hidden)
        hidden, _weights = self.self_attn(hidden)
        hidden = ops.dropout(hidden, self.dropout)
        hidden = ops.add(hidden, residual)
        residual = hidden
        hidden = self.conv_module(hidden)
        hidden = ops.add(residual, hidden)
        residual = hidden
        hidden = self.ffn2_layer_norm(hidden)
        hidden = self.ffn2(hidden)
        hidden = ops.add(ops.mul_scalar(hidden), residual)
        return self.final_layer_norm(hidden)


class ConformerEncoder(Module):
    """Dropout and the stack of layers."""

    def __init__(self, c: Config, hidden: int) -> None:
        self.layers = Stack(["layer"] * c.integer("num_hidden_layers"), lambda _: ConformerLayer(c, hidden))
        self.dropout = c.probability("hidden_dropout")

    def forward(self, hidden: Tensor, every: list[Tensor] | None) -> Tensor:
        """[b, s, h] to [b, s, h]; what each layer takes and gives is put into `every` where there is such a list."""
        hidden = ops.dropout(hidden, self.dropout)
        if every is not None:
            every.append(hidden)
        for layer in self.layers:
            hidden = layer(hidden)
            if every is not None:
                every.append(hidden)
        stay(every)
        hidden.tape.allocate(0)  # a sample after the last layer: what this model still holds does not die with it
        return hidden


class ConformerModel(Module):
    """Projection of the features, masks of SpecAugment in training, encoder."""

    assumption = Assumption(
        "recording_length",
        "a recording has as many frames of features as --seq-len says (50 a second), and no layer is skipped",
    )

    def __init__(self, c: Config) -> None:
        hidden, width = c.integer("hidden_size"), c.integer("feature_projection_input_dim")
        if c.flag("add_adapter") or c.flag("use_intermediate_ffn_before_adapter"):
            raise ConfigError(f"{c.where} asks for an adapter, which memcalc does not describe here.")
        if c.text("position_embeddings_type") != "relative_key":
            raise ConfigError(
                f"{c.where} gives 'position_embeddings_type' as {c.text('position_embeddings_type')!r}; memcalc "
                "describes relative_key alone."
            )
        self.augment = SpecAugment(c, hidden)
        self.feature_projection = FeatureProjection(c, width, both=True)
        self.encoder = ConformerEncoder(c, hidden)

    def forward(self, features: Tensor, *, every: bool) -> tuple[Tensor, ...]:
        """Features [b, s, f] to states [b, s, h], features, and the states of every layer where they are asked for."""
        states: list[Tensor] | None = [] if every else None
        hidden, normed = self.feature_projection(features)
        hidden = self.augment(hidden)
        hidden = self.encoder(hidden, states)
        return hidden, normed, *(states or ())


def wav2vec2_bert(c: Config, architecture: str | None) -> Network:
    """w2v-BERT 2.0."""
    return speech(c, architecture, ConformerModel(c), c.integer("feature_projection_input_dim"))


FAMILIES = table(
    Family(
        "wav2vec2-bert",
        wav2vec2_bert,
        SPEECH_DEFAULTS
        | {
            "hidden_size": 1024,
            "num_hidden_layers": 24,
            "num_attention_heads": 16,
            "intermediate_size": 4096,
            "feature_projection_input_dim": 160,
            "hidden_act": "swish",
            "hidden_dropout": 0.0,
            "activation_dropout": 0.0,
            "attention_dropout": 0.0,
            "classifier_proj_size": 768,
            "position_embeddings_type": "relative_key",
            "left_max_position_embeddings": 64,
            "right_max_position_embeddings": 8,
            "conv_depthwise_kernel_size": 31,
            "conformer_conv_dropout": 0.1,
        },
        blocks="encoder",
        attention="eager, sdpa",
        verified="exact counts; " + SPEECH_EVIDENCE,
    )
)
