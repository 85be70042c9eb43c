"""The weights of Gemma 4's audio tower, which stand in memory whether it hears anything or not."""

from __future__ import annotations

from memcalc.common.assumption import Assumption
from memcalc.config.reader import Config
from memcalc.models.vision_towers.gemma4 import ClippableLinear, MultimodalEmbedder
from memcalc.nn.layers.gemma_shared_kv import PowerRMSNorm
from memcalc.nn.layers.linear import Linear
from memcalc.nn.layers.norms import LayerNorm
from memcalc.nn.module import Buffer, Module, Parameter
from memcalc.nn.stack import Stack


class _FeedForward(Module):
    def __init__(self, hidden: int, *, clips: bool) -> None:
        self.ffw_layer_1 = ClippableLinear(hidden, 4 * hidden, clips=clips)
        self.ffw_layer_2 = ClippableLinear(4 * hidden, hidden, clips=clips)
        self.pre_layer_norm, self.post_layer_norm = PowerRMSNorm(hidden), PowerRMSNorm(hidden)


class _Attention(Module):
    def __init__(self, hidden: int, heads: int, *, clips: bool) -> None:
        for name in ("q_proj", "k_proj", "v_proj", "post"):
            setattr(self, name, ClippableLinear(hidden, hidden, clips=clips, group="attention"))
        self.relative_k_proj = Linear(hidden, hidden, group="attention")
        self.per_dim_scale = Parameter(hidden // heads, group="attention")
        self.softcap = Buffer(dtype=None)


class _Convolution(Module):
    def __init__(self, hidden: int, kernel: int, *, clips: bool) -> None:
        self.linear_start = ClippableLinear(hidden, 2 * hidden, clips=clips)
        self.linear_end = ClippableLinear(hidden, hidden, clips=clips)
        self.depthwise_conv1d = Parameter(hidden, 1, kernel)
        self.pre_layer_norm, self.conv_norm = PowerRMSNorm(hidden), PowerRMSNorm(hidden)


class _Layer(Module):
    def __init__(self, a: Config) -> None:
        hidden, clips = a.integer("hidden_size"), a.flag("use_clipped_linears")
        self.feed_forward1, self.feed_forward2 = (_FeedForward(hidden, clips=clips) for _ in range(2))
        self.self_attn = _Attention(hidden, a.divides("num_attention_heads", "hidden_size"), clips=clips)
        self.lconv1d = _Convolution(hidden, a.integer("conv_kernel_size"), clips=clips)
        self.norm_pre_attn, self.norm_post_attn, self.norm_out = (PowerRMSNorm(hidden) for _ in range(3))


class Gemma4AudioWeights(Module):
    """A conformer after two strided convolutions, and its embedder; it is never run here."""

    assumption = Assumption(
        "audio_not_heard", "no recordings: the audio tower's weights stand in memory, and nothing that it would compute"
    )

    def __init__(self, a: Config, width: int) -> None:
        hidden, channels = a.integer("hidden_size"), a.integers("subsampling_conv_channels", minimum=1)
        self.conv0, self.norm0 = Parameter(channels[0], 1, 3, 3), LayerNorm(channels[0], bias=False)
        self.conv1 = Parameter(channels[1], channels[0], 3, 3)
        self.norm1 = LayerNorm(channels[1], bias=False)
        self.input_proj_linear = Linear(channels[0] // 4 * channels[1], hidden)
        self.inv_timescales = Buffer(hidden // 2)
        self.layers = Stack(["block"] * a.integer("num_hidden_layers"), lambda _: _Layer(a), name="audio block")
        self.output_proj = Linear(hidden, a.integer("output_proj_dims"), bias=True)
        self.embed_audio = MultimodalEmbedder(a.integer("output_proj_dims"), width)
