"""Qwen-VL: a tower that reads images of any size, and Qwen's decoder with positions in time, height and width."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from memcalc import ops
from memcalc.autograd.tensor import Tensor
from memcalc.config.reader import Config
from memcalc.errors import ConfigError
from memcalc.models.common.decoder import biases, dense_decoder, gated_mlp
from memcalc.models.common.vision_encoder import ImageFeatures
from memcalc.models.common.vision_language import VisionLanguage, is_tied, language_model
from memcalc.models.families.decoders.llama import qwen_windows
from memcalc.models.families.moe.mixtral_qwen_olmoe import qwen3_mixture, qwen_mlps
from memcalc.models.family import Family, sizes, table
from memcalc.models.vision_towers.qwen_vl import (
    MERGER_NAMES,
    Qwen2VLVisionEncoder,
    Qwen3VLVisionEncoder,
    Qwen25VLVisionEncoder,
    VisionEncoderParts,
)
from memcalc.nn.layers.mlp import GatedMLP, PlainMLP
from memcalc.nn.layers.multimodal_rotary import MultimodalRotary
from memcalc.nn.layers.norms import LayerNorm, RMSNorm
from memcalc.nn.layers.packed_vision import PackedAttention, PatchMerger
from memcalc.nn.model import Network
from memcalc.nn.module import Module
from memcalc.nn.towers import as_tower
from memcalc.tables.dtypes import INT64


class QwenVL(VisionLanguage):
    """Images have positions in height and width, which the whole model makes for the decoder."""

    def extra_decoder_inputs(self, ids: Tensor, image_features: ImageFeatures, mask: Tensor) -> dict[str, Any]:
        """Positions [3, b, s]."""
        return {"position_ids": ids.tape.empty((3, *ids.shape), INT64)}


class Qwen3VL(QwenVL):
    """Features from the middle of the tower are added to the states after the decoder's first blocks."""

    def extra_decoder_inputs(self, ids: Tensor, image_features: ImageFeatures, mask: Tensor) -> dict[str, Any]:
        """Positions [3, b, s], and what is done after blocks."""
        where = ops.select(mask, -1)
        middle = [ops.cat(pieces, 0) for pieces in image_features.returned[1]]

        def between(position: int, hidden: Tensor) -> Tensor:
            return _added(hidden, where, middle[position]) if position < len(middle) else hidden

        return {**super().extra_decoder_inputs(ids, image_features, mask), "between": between}


def _added(hidden: Tensor, where: Tensor, features: Tensor) -> Tensor:
    """Hidden states [b, s, h] with features [n, h] added where images are."""
    hidden = ops.clone(hidden)
    summed = ops.add(ops.index_mask(hidden, where, features.shape[0]), features)
    return ops.index_put_(hidden, where, summed)


def _qwen2(c: Config, architecture: str | None) -> Network:
    windows = qwen_windows(c)
    return dense_decoder(
        c,
        architecture,
        windows=windows,
        masks=[None, *windows],
        attention={"bias": True},
        rotary=MultimodalRotary(c.head_dim()),
        position_ids="kept",
    )


def _qwen3(c: Config, architecture: str | None) -> Network:
    return _deepstacked(c, architecture, gated_mlp(c))


def _qwen3_moe(c: Config, architecture: str | None) -> Network:
    return _deepstacked(c, architecture, *qwen_mlps(c, qwen3_mixture(c, normalise=True)))


def _deepstacked(c: Config, architecture: str | None, *mlps: Callable[[], Module]) -> Network:
    """Qwen 3's decoder, the MLP the same in all blocks or one for each.

    Blocks after which features are added have kinds of their own, and so has the next, to which the adding counts.
    """
    depth = c.integer("num_hidden_layers")
    first = c.integer("deepstack_layers", 0, minimum=0)
    every = mlps if len(mlps) == depth else mlps * depth
    return dense_decoder(
        c,
        architecture,
        attention={**biases(c), "qk_norm": True},
        mlp=[partial(mlp) if layer <= first else mlp for layer, mlp in enumerate(every)],
        rotary=MultimodalRotary(c.head_dim(), interleaved=True),
        position_ids="passed" if c.flag("passes_position_ids") else "kept",
    )


def qwen2_vl(c: Config, architecture: str | None) -> Network:
    """Qwen2-VL."""
    v = c.nested("vision_config", _TOWER_2)
    width, act = v.integer("embed_dim"), v.text("hidden_act")
    inner = int(width * v.factor("mlp_ratio"))
    parts = VisionEncoderParts(width, LayerNorm, lambda: PlainMLP(width, inner, act, names=("fc1", "fc2"), bias=True))
    merger = PatchMerger(
        LayerNorm(width), width, v.integer("spatial_merge_size"), v.integer("hidden_size"), ("ln_q", "mlp.0", "mlp.2")
    )
    return _seeing(c, Qwen2VLVisionEncoder(v, parts, merger))


def qwen2_5_vl(c: Config, architecture: str | None) -> Network:
    """Qwen2.5-VL."""
    return _seeing(c, windowed_encoder(c.nested("vision_config", QWEN25_VISION)))


def windowed_encoder(
    v: Config, attention: Callable[[int, int], PackedAttention] = PackedAttention
) -> Qwen25VLVisionEncoder:
    """Qwen2.5-VL's vision encoder."""
    width, act = v.integer("hidden_size"), v.text("hidden_act")
    inner = v.integer("intermediate_size")
    parts = VisionEncoderParts(width, RMSNorm, lambda: GatedMLP(width, inner, act, bias=True), attention=attention)
    merger = PatchMerger(
        RMSNorm(width), width, v.integer("spatial_merge_size"), v.integer("out_hidden_size"), ("ln_q", "mlp.0", "mlp.2")
    )
    return as_tower(Qwen25VLVisionEncoder(v, parts, merger, v.integers("fullatt_block_indexes")))


def _seeing(c: Config, vision_encoder: Qwen2VLVisionEncoder) -> Network:
    as_tower(vision_encoder)
    text = language_model(c, QWEN2_VL_TEXT, tied=is_tied(c), flat=True)
    return QwenVL(vision_encoder, text, own_cache=True, videos=True)


def qwen3_vl(c: Config, architecture: str | None) -> Network:
    """Qwen3-VL."""
    return _deep(c, _TEXT_3)


def qwen3_vl_moe(c: Config, architecture: str | None) -> Network:
    """Qwen3-VL with experts."""
    if c.nested("text_config", {}).flag("output_router_logits"):
        raise ConfigError(
            f"{c.where} has 'output_router_logits' in its 'text_config', with which Transformers cannot run this "
            "family; set it to false."
        )
    return _deep(c, QWEN3_VL_MOE_TEXT)


def qwen3_5(c: Config, architecture: str | None) -> Network:
    """Qwen 3.5: Qwen3-VL's tower, of whose middle the decoder sees nothing."""
    text = language_model(c, f"{c.text('model_type')}_text", tied=c.flag("tie_word_embeddings"))
    return QwenVL(deep_encoder(c, ()), text, own_cache=True, videos=True)


def _deep(c: Config, text_family: Family) -> Network:
    depths = c.nested("vision_config", QWEN3_VISION).integers("deepstack_visual_indexes")
    text = language_model(c, text_family, tied=c.flag("tie_word_embeddings"), given={"deepstack_layers": len(depths)})
    return Qwen3VL(deep_encoder(c, depths), text, own_cache=True, videos=True)


def deep_encoder(
    c: Config, depths: Sequence[int], merger_names: tuple[str, str, str] = MERGER_NAMES
) -> Qwen3VLVisionEncoder:
    """Qwen3-VL's vision encoder, and the features of its blocks at `depths`."""
    v = c.nested("vision_config", QWEN3_VISION)
    width, act = v.integer("hidden_size"), v.text("hidden_act")
    inner, side, out = v.integer("intermediate_size"), v.integer("spatial_merge_size"), v.integer("out_hidden_size")
    names = ("linear_fc1", "linear_fc2")
    parts = VisionEncoderParts(width, LayerNorm, lambda: PlainMLP(width, inner, act, names=names, bias=True), bias=True)

    def merger(norm_merged: bool) -> PatchMerger:
        norm = LayerNorm(width * side**2 if norm_merged else width)
        return PatchMerger(norm, width, side, out, merger_names, norm_merged=norm_merged)

    vision_encoder = Qwen3VLVisionEncoder(v, parts, merger, depths)
    as_tower(vision_encoder)
    return vision_encoder


_TOWER_2: dict[str, object] = {
    "depth": 32,
    "embed_dim": 1280,
    "hidden_size": 3584,
    "hidden_act": "quick_gelu",
    "mlp_ratio": 4,
    "num_heads": 16,
    "in_channels": 3,
    "patch_size": 14,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
}
QWEN25_VISION: dict[str, object] = {
    "depth": 32,
    "hidden_size": 3584,
    "hidden_act": "silu",
    "intermediate_size": 3420,
    "num_heads": 16,
    "in_channels": 3,
    "patch_size": 14,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "window_size": 112,
    "out_hidden_size": 3584,
    "fullatt_block_indexes": [7, 15, 23, 31],
}
QWEN3_VISION: dict[str, object] = {
    "depth": 27,
    "hidden_size": 1152,
    "hidden_act": "gelu_pytorch_tanh",
    "intermediate_size": 4304,
    "num_heads": 16,
    "in_channels": 3,
    "patch_size": 16,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "out_hidden_size": 3584,
    "num_position_embeddings": 2304,
    "deepstack_visual_indexes": [8, 16, 24],
}

QWEN2_VL_TEXT = Family(
    "qwen2_vl_text",
    _qwen2,
    sizes(
        (152064, 8192, 29568, 80, 64, 8, 32768),
        hidden_act="silu",
        sliding_window=4096,
        use_sliding_window=False,
        max_window_layers=80,
    ),
)
_TEXT_3 = Family(
    "qwen3_vl_text", _qwen3, sizes((151936, 4096, 22016, 32, 32, 32, 128000), head_dim=128, hidden_act="silu")
)
QWEN3_VL_MOE_TEXT = Family(
    "qwen3_vl_moe_text",
    _qwen3_moe,
    sizes(
        (151936, 2048, 5632, 24, 16, 16, 128000),
        head_dim=128,
        hidden_act="silu",
        decoder_sparse_step=1,
        moe_intermediate_size=1408,
        num_experts_per_tok=4,
        num_experts=60,
    ),
    {"num_local_experts": "num_experts"},
)

FAMILIES = table(
    Family("qwen2_vl", qwen2_vl, {"tie_word_embeddings": False}, kinds="vision tower, decoder"),
    Family("qwen2_5_vl", qwen2_5_vl, {"tie_word_embeddings": False}, kinds="vision tower, decoder"),
    Family("qwen3_vl", qwen3_vl, {"tie_word_embeddings": False}, kinds="vision tower, decoder"),
    Family("qwen3_vl_moe", qwen3_vl_moe, {"tie_word_embeddings": False}, kinds="vision tower, decoder, experts"),
    Family("qwen3_5", qwen3_5, {"tie_word_embeddings": False}, kinds="vision tower, delta net, attention"),
    Family("qwen3_5_moe", qwen3_5, {"tie_word_embeddings": False}, kinds="vision tower, delta net, attention, experts"),
)
