"""Qwen2.5-Omni and Qwen3-Omni: the thinker, which reads text and images; what it would hear is not computed."""

from __future__ import annotations

from typing import Any

from memcalc.autograd.tensor import Tensor
from memcalc.common.assumption import Assumption
from memcalc.config.reader import Config
from memcalc.models.common.vision_encoder import ImageFeatures
from memcalc.models.common.vision_language import language_model
from memcalc.models.families.audio.whisper import Conv
from memcalc.models.families.vision_language.qwen_vl import (
    QWEN2_VL_TEXT,
    QWEN3_VISION,
    QWEN3_VL_MOE_TEXT,
    QWEN25_VISION,
    Qwen3VL,
    QwenVL,
    deep_encoder,
    windowed_encoder,
)
from memcalc.models.family import MEASURED, Family, sizes, table
from memcalc.nn.layers.bart import BartAttention, BlockStyle, EncoderBlock
from memcalc.nn.layers.linear import Embedding, Linear
from memcalc.nn.layers.norms import LayerNorm
from memcalc.nn.layers.packed_vision import ApartPackedAttention
from memcalc.nn.model import Batch, Network, Outputs
from memcalc.nn.module import Buffer, Module, Parameter
from memcalc.nn.run_context import run_context
from memcalc.nn.stack import Stack
from memcalc.nn.towers import as_tower


class AudioWeights(Module):
    """The weights of an audio encoder, which stand in memory whether it hears anything or not."""

    assumption = Assumption(
        "thinker_without_audio",
        "the thinker alone, without talker and voice, and no recordings: the audio encoder's weights stand in memory, "
        "and nothing that it would compute",
    )

    def __init__(self, a: Config, *, strided: bool) -> None:
        hidden, mels, out = a.integer("d_model"), a.integer("num_mel_bins"), a.integer("output_dim")
        heads, width = a.integer("encoder_attention_heads"), a.integer("encoder_ffn_dim")
        style = BlockStyle(hidden, a.text("activation_function"), 0.0, 0.0, norm_first=True)

        def block(_: int) -> Module:  # Whisper's keys have no bias; those of Qwen3-Omni have one
            return EncoderBlock(style, BartAttention(hidden, heads, 0.0, scale_query=not strided), width)

        self.positional_embedding = Buffer(a.integer("max_source_positions"), hidden)
        self.layers = Stack(["block"] * a.integer("encoder_layers"), block, name="encoder block")
        self.ln_post = LayerNorm(hidden)
        if strided:
            channels = a.integer("downsample_hidden_size")
            for name, inputs in (("conv2d1", 1), ("conv2d2", channels), ("conv2d3", channels)):
                setattr(self, f"{name}_weight", Parameter(channels, inputs, 3, 3))
                setattr(self, f"{name}_bias", Parameter(channels))
            self.conv_out = Linear(channels * ((((mels + 1) // 2 + 1) // 2 + 1) // 2), hidden)
            self.proj1 = Linear(hidden, hidden, bias=True)
            self.proj2 = Linear(hidden, out, bias=True)
        else:
            self.conv1, self.conv2 = Conv(mels, hidden, 1), Conv(hidden, hidden, 2)
            self.audio_bos_eos_token = Embedding(2, out)
            self.proj = Linear(hidden, out, bias=True)


class Thinker(QwenVL):
    """It computes logits of all tokens in generation too, and places of patches only where a mask came with the ids."""

    audio_tower: AudioWeights
    padded = False
    """Whether the batch that it reads has a padding mask."""

    def forward(self, batch: Batch) -> Outputs:
        """Loss and logits."""
        run_context(batch.ids).all_logits = True
        self.padded = batch.padding
        return super().forward(batch)

    def extra_decoder_inputs(self, ids: Tensor, image_features: ImageFeatures, mask: Tensor) -> dict[str, Any]:
        """Positions [3, b, s] where there is a padding mask; else the decoder counts tokens."""
        extra = super().extra_decoder_inputs(ids, image_features, mask)
        return extra if self.padded else {key: value for key, value in extra.items() if key != "position_ids"}


class DeepThinker(Thinker, Qwen3VL):
    """The same, with features from the middle of the vision tower (Qwen3-Omni)."""


def _thinker(c: Config) -> Config:
    """The config of the thinker: that of the whole model, or this one."""
    if c.text("model_type").endswith("_thinker"):
        return c
    return c.nested("thinker_config", {"tie_word_embeddings": False})


def qwen2_5_omni(c: Config, architecture: str | None) -> Network:
    """Qwen2.5-Omni's thinker."""
    c = _thinker(c)
    text = language_model(c, _TEXT_2_5, tied=c.flag("tie_word_embeddings"))
    encoder = windowed_encoder(c.nested("vision_config", QWEN25_VISION), ApartPackedAttention)
    model = Thinker(encoder, text, own_cache=True, videos=True)
    model.audio_tower = as_tower(AudioWeights(c.nested("audio_config", _AUDIO), strided=False), "audio", "audio tower")
    return model


def qwen3_omni_moe(c: Config, architecture: str | None) -> Network:
    """Qwen3-Omni's thinker."""
    c = _thinker(c)
    depths = c.nested("vision_config", QWEN3_VISION).integers("deepstack_visual_indexes")
    given = {"deepstack_layers": len(depths), "passes_position_ids": True}
    text = language_model(c, _TEXT_3, tied=c.flag("tie_word_embeddings"), given=given)
    encoder = deep_encoder(c, depths, ("ln_q", "mlp.0", "mlp.2"))
    model = DeepThinker(encoder, text, own_cache=True, videos=True)
    audio = AudioWeights(c.nested("audio_config", _AUDIO), strided=True)
    model.audio_tower = as_tower(audio, "audio", "audio tower")
    return model


_AUDIO: dict[str, object] = {
    "num_mel_bins": 128,
    "encoder_layers": 32,
    "encoder_attention_heads": 20,
    "encoder_ffn_dim": 5120,
    "d_model": 1280,
    "dropout": 0.0,
    "attention_dropout": 0.0,
    "activation_function": "gelu",
    "activation_dropout": 0.0,
    "max_source_positions": 1500,
    "output_dim": 3584,
    "downsample_hidden_size": 480,
}
_TEXT_2_5 = Family(
    "qwen2_5_omni_text",
    QWEN2_VL_TEXT.build,
    sizes(
        (152064, 3584, 18944, 28, 28, 4, 32768),
        hidden_act="silu",
        sliding_window=32768,
        use_sliding_window=False,
        max_window_layers=28,
    ),
)
_TEXT_3 = Family(
    "qwen3_omni_moe_text",
    QWEN3_VL_MOE_TEXT.build,
    sizes(
        (3584, 2048, 18944, 28, 28, 4, 32768),
        hidden_act="silu",
        decoder_sparse_step=1,
        moe_intermediate_size=768,
        num_experts_per_tok=8,
        num_experts=128,
        norm_topk_prob=True,
    ),
    {"num_local_experts": "num_experts"},
)

_AS_THINKER = "exact counts; tensors of the thinker, which is measured by itself"
FAMILIES = table(
    *(
        Family(name, build, {"tie_word_embeddings": False}, kinds=kinds, verified=verified)
        for prefix, build, kinds in (
            ("qwen2_5_omni", qwen2_5_omni, "vision tower, decoder; thinker alone"),
            ("qwen3_omni_moe", qwen3_omni_moe, "vision tower, decoder, experts; thinker alone"),
        )
        for name, verified in ((prefix, _AS_THINKER), (f"{prefix}_thinker", MEASURED))
    )
)
