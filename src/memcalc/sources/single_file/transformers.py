"""Diffusion transformers under the names of their original repositories, which ComfyUI keeps: the config of each.

The names and what they stand for are those that diffusers 0.42.1 converts (loaders/single_file_utils.py); what the
shapes do not tell (heads of a fixed width) is what the released models have.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

from memcalc.sources.single_file.shapes import Shapes, quotient

Config = dict[str, Any]


@dataclass(frozen=True)
class Recognised:
    """A denoiser that some names prove.

    class_name: its class in diffusers.
    proof: all of these names are there.
    config: the values of its config.json, read off shapes.
    dropped: tensors of the file that are no parameters in diffusers.
    """

    class_name: str
    proof: tuple[str, ...]
    config: Callable[[Shapes], Config]
    dropped: tuple[str, ...] = ()


def _flux(t: Shapes) -> Config:
    """FLUX.1, its Fill, Depth, Canny and Kontext variants, and those with fewer blocks."""
    width, channels = t.of("img_in.weight", 2)
    dim = t.first(*_scales("double_blocks.0.img_attn.norm.key_norm"))[0]
    return {
        "in_channels": channels,
        "out_channels": t.of("final_layer.linear.weight", 2)[0],
        "num_layers": t.count("double_blocks"),
        "num_single_layers": t.count("single_blocks"),
        "attention_head_dim": dim,
        "num_attention_heads": quotient(width, dim),
        "joint_attention_dim": t.of("txt_in.weight", 2)[1],
        "pooled_projection_dim": t.of("vector_in.in_layer.weight", 2)[1],
        "guidance_embeds": "guidance_in.in_layer.weight" in t,
    }


def _scales(norm: str) -> tuple[str, str]:
    return f"{norm}.scale", f"{norm}.weight"


def _chroma(t: Shapes) -> Config:
    width, channels = t.of("img_in.weight", 2)
    dim = t.first(*_scales("double_blocks.0.img_attn.norm.key_norm"))[0]
    hidden, places = t.of("distilled_guidance_layer.in_proj.weight", 2)
    return {
        "in_channels": channels,
        "out_channels": t.of("final_layer.linear.weight", 2)[0],
        "num_layers": t.count("double_blocks"),
        "num_single_layers": t.count("single_blocks"),
        "attention_head_dim": dim,
        "num_attention_heads": quotient(width, dim),
        "joint_attention_dim": t.of("txt_in.weight", 2)[1],
        "approximator_num_channels": places,
        "approximator_hidden_dim": hidden,
        "approximator_layers": t.count("distilled_guidance_layer.layers"),
    }


def _flux2(t: Shapes) -> Config:
    width, channels = t.of("img_in.weight", 2)
    dim = t.first(*_scales("double_blocks.0.img_attn.norm.key_norm"))[0]
    return {
        "in_channels": channels,
        "out_channels": t.of("final_layer.linear.weight", 2)[0],
        "num_layers": t.count("double_blocks"),
        "num_single_layers": t.count("single_blocks"),
        "attention_head_dim": dim,
        "num_attention_heads": quotient(width, dim),
        "joint_attention_dim": t.of("txt_in.weight", 2)[1],
        "timestep_guidance_channels": t.of("time_in.in_layer.weight", 2)[1],
        "mlp_ratio": t.of("double_blocks.0.img_mlp.2.weight", 2)[1] / width,
        "guidance_embeds": "guidance_in.in_layer.weight" in t,
        "axes_dims_rope": [32, 32, 32, 32],
    }


def _hunyuan_video(t: Shapes) -> Config:
    width, channels, *patch = t.of("img_in.proj.weight", 5)
    dim = t.first("double_blocks.0.img_attn_q_norm.weight", *_scales("double_blocks.0.img_attn.norm.query_norm"))[0]
    return {
        "in_channels": channels,
        "out_channels": quotient(t.of("final_layer.linear.weight", 2)[0], prod(patch)),
        "num_layers": t.count("double_blocks"),
        "num_single_layers": t.count("single_blocks"),
        "num_refiner_layers": t.count("txt_in.individual_token_refiner.blocks"),
        "attention_head_dim": dim,
        "num_attention_heads": quotient(width, dim),
        "patch_size_t": patch[0],
        "patch_size": patch[1],
        "text_embed_dim": t.of("txt_in.input_embedder.weight", 2)[1],
        "pooled_projection_dim": t.of("vector_in.in_layer.weight", 2)[1],
        "guidance_embeds": t.has_any(("guidance_in.mlp.0.weight", "guidance_in.in_layer.weight")),
    }


def _sd3(t: Shapes) -> Config:
    width, channels, patch, _ = t.of("x_embedder.proj.weight", 4)
    places, depth = t.of("pos_embed")[-2], t.count("joint_blocks")
    side, norm = round(places**0.5), "joint_blocks.0.x_block.attn.ln_q.weight"
    return {
        "sample_size": 128,
        "patch_size": patch,
        "in_channels": channels,
        "out_channels": quotient(t.of("final_layer.linear.weight", 2)[0], patch**2),
        "num_layers": depth,
        "attention_head_dim": 64,
        "num_attention_heads": quotient(width, 64),
        "joint_attention_dim": t.of("context_embedder.weight", 2)[1],
        "caption_projection_dim": t.of("context_embedder.weight", 2)[0],
        "pooled_projection_dim": t.of("y_embedder.mlp.0.weight", 2)[1],
        "pos_embed_max_size": quotient(places, side) if side else 0,
        "qk_norm": "rms_norm" if norm in t else None,
        "dual_attention_layers": [
            place for place in range(depth) if f"joint_blocks.{place}.x_block.attn2.qkv.weight" in t
        ],
    }


def _wan(t: Shapes) -> Config:
    width, channels, *patch = t.of("patch_embedding.weight", 5)
    config: Config = {
        "patch_size": patch,
        "in_channels": channels,
        "out_channels": quotient(t.of("head.head.weight", 2)[0], prod(patch)),
        "attention_head_dim": 128,
        "num_attention_heads": quotient(width, 128),
        "text_dim": t.of("text_embedding.0.weight", 2)[1],
        "freq_dim": t.of("time_embedding.0.weight", 2)[1],
        "ffn_dim": t.of("blocks.0.ffn.0.weight", 2)[0],
        "num_layers": t.count("blocks"),
        "cross_attn_norm": "blocks.0.norm3.weight" in t,
        "qk_norm": "rms_norm_across_heads",
    }
    if "img_emb.proj.1.weight" in t:
        config |= {"image_dim": t.of("img_emb.proj.1.weight", 2)[1], "added_kv_proj_dim": width}
    return config


def _qwen_image(t: Shapes) -> Config:
    width, channels = t.of("img_in.weight", 2)
    dim = t.of("transformer_blocks.0.attn.norm_q.weight", 1)[0]
    return {
        "patch_size": 2,
        "in_channels": channels,
        "out_channels": quotient(t.of("proj_out.weight", 2)[0], 4),
        "num_layers": t.count("transformer_blocks"),
        "attention_head_dim": dim,
        "num_attention_heads": quotient(width, dim),
        "joint_attention_dim": t.of("txt_in.weight", 2)[1],
    }


def _ltx(t: Shapes) -> Config:
    width, channels = t.of("patchify_proj.weight", 2)
    return {
        "in_channels": channels,
        "out_channels": t.of("proj_out.weight", 2)[0],
        "num_layers": t.count("transformer_blocks"),
        "num_attention_heads": 32,
        "attention_head_dim": quotient(width, 32),
        "cross_attention_dim": t.of("transformer_blocks.0.attn2.to_k.weight", 2)[1],
        "caption_channels": t.of("caption_projection.linear_1.weight", 2)[1],
    }


def _lumina2(t: Shapes) -> Config:
    width, patches = t.of("x_embedder.weight", 2)
    dim = t.of("layers.0.attention.k_norm.weight", 1)[0]
    heads = quotient(width, dim)
    return {
        "sample_size": 128,
        "in_channels": quotient(patches, 4),
        "hidden_size": width,
        "num_layers": t.count("layers"),
        "num_refiner_layers": t.count("noise_refiner"),
        "num_attention_heads": heads,
        "num_kv_heads": quotient(quotient(t.of("layers.0.attention.qkv.weight", 2)[0], dim) - heads, 2),
        "multiple_of": 1,
        "ffn_dim_multiplier": t.of("layers.0.feed_forward.w1.weight", 2)[0] / (4 * width),
        "cap_feat_dim": t.of("cap_embedder.1.weight", 2)[1],
    }


def _z_image(t: Shapes) -> Config:
    width, patches = t.first("x_embedder.weight", "all_x_embedder.2-1.weight")
    dim = t.first("layers.0.attention.k_norm.weight", "layers.0.attention.norm_k.weight")[0]
    return {
        "in_channels": quotient(patches, 4),
        "dim": width,
        "n_layers": t.count("layers"),
        "n_refiner_layers": t.count("noise_refiner"),
        "n_heads": quotient(width, dim),
        "n_kv_heads": quotient(width, dim),
        "cap_feat_dim": t.of("cap_embedder.1.weight", 2)[1],
    }


def _pixart(t: Shapes) -> Config:
    width, channels, patch, _ = t.of("x_embedder.proj.weight", 4)
    side = round(t.of("pos_embed")[-2] ** 0.5) * patch if "pos_embed" in t else 128
    return {
        "sample_size": side,
        "patch_size": patch,
        "in_channels": channels,
        "out_channels": quotient(t.of("final_layer.linear.weight", 2)[0], patch**2),
        "num_layers": t.count("blocks"),
        "attention_head_dim": 72,
        "num_attention_heads": quotient(width, 72),
        "cross_attention_dim": width,
        "caption_channels": t.of("y_embedder.y_proj.fc1.weight", 2)[1],
        "norm_type": "ada_norm_single",
        "use_additional_conditions": "csize_embedder.mlp.0.weight" in t,
    }


def _sana(t: Shapes) -> Config:
    width, channels, patch, _ = t.of("x_embedder.proj.weight", 4)
    return {
        "sample_size": 32,
        "patch_size": patch,
        "in_channels": channels,
        "out_channels": quotient(t.of("final_layer.linear.weight", 2)[0], patch**2),
        "num_layers": t.count("blocks"),
        "attention_head_dim": 32,
        "num_attention_heads": quotient(width, 32),
        "num_cross_attention_heads": quotient(width, 112),
        "cross_attention_head_dim": 112,
        "cross_attention_dim": width,
        "caption_channels": t.of("y_embedder.y_proj.fc1.weight", 2)[1],
        "mlp_ratio": t.of("blocks.0.mlp.point_conv.conv.weight", 4)[1] / width,
    }


_PLACES = ("pos_embed", "y_embedder.y_embedding")

RECOGNISED: tuple[Recognised, ...] = (
    Recognised("ChromaTransformer2DModel", ("distilled_guidance_layer.in_proj.weight", "img_in.weight"), _chroma),
    Recognised("Flux2Transformer2DModel", ("double_stream_modulation_img.lin.weight",), _flux2),
    Recognised(
        "HunyuanVideoTransformer3DModel", ("txt_in.input_embedder.weight", "img_in.proj.weight"), _hunyuan_video
    ),
    Recognised("FluxTransformer2DModel", ("double_blocks.0.img_attn.qkv.weight", "img_in.weight"), _flux),
    Recognised("SD3Transformer2DModel", ("joint_blocks.0.context_block.adaLN_modulation.1.weight",), _sd3, _PLACES),
    Recognised("WanTransformer3DModel", ("head.modulation", "patch_embedding.weight"), _wan),
    Recognised(
        "QwenImageTransformer2DModel", ("txt_norm.weight", "transformer_blocks.0.img_mod.1.weight"), _qwen_image
    ),
    Recognised("LTXVideoTransformer3DModel", ("patchify_proj.weight", "proj_out.weight"), _ltx),
    Recognised("ZImageTransformer2DModel", ("layers.0.adaLN_modulation.0.weight", "cap_pad_token"), _z_image),
    Recognised("Lumina2Transformer2DModel", ("layers.0.adaLN_modulation.1.weight", "cap_embedder.0.weight"), _lumina2),
    Recognised("SanaTransformer2DModel", ("blocks.0.mlp.inverted_conv.conv.weight",), _sana, _PLACES),
    Recognised("PixArtTransformer2DModel", ("blocks.0.cross_attn.kv_linear.weight",), _pixart, _PLACES),
)
"""The families, the more special before the more general."""

UNKNOWN: Mapping[str, str] = {
    "double_stream_blocks.0.block.adaLN_modulation.1.bias": "HiDream",
    "double_layers.0.attn.w2q.weight": "AuraFlow",
    "blocks.0.attn.qkv_x.weight": "Mochi",
    "clip_txt_mapper.weight": "Stable Cascade",
    "x_embedder.proj.1.weight": "Cosmos",
    "early_stream_modulations.image.lin.weight": "FLUX.3",
    "txtfusion.projector.weight": "Krea 2",
    "txt_in.text_norm.weight": "Qwen-Image 2.1",
    "extra_embedder.weight": "Hunyuan-DiT",
}
"""Names that prove a family which memcalc does not describe."""
