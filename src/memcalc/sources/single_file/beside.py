"""What an all-in-one file holds beside its denoiser: autoencoders and text encoders, with the config of each.

Source: diffusers 0.42.1, loaders/single_file_utils.py; configs of the released models.
"""

from dataclasses import dataclass
from typing import Any

from memcalc.sources.single_file.shapes import Shapes, Unfit, quotient


@dataclass(frozen=True)
class Beside:
    """A model beside the denoiser: its class and library, its config, and the names that are no parameters of it."""

    class_name: str
    library: str
    config: dict[str, Any]
    dropped: tuple[str, ...] = ()


def autoencoder(t: Shapes) -> Beside | None:
    """AutoencoderKL under its original names; None for another autoencoder."""
    if "encoder.down.0.block.0.conv1.weight" not in t or "decoder.conv_in.weight" not in t:
        return None
    try:
        latents = t.of("decoder.conv_in.weight", 4)[1]
        levels = range(t.count("encoder.down"))
        config = {
            "block_out_channels": [t.of(f"encoder.down.{level}.block.0.conv1.weight", 4)[0] for level in levels],
            "down_block_types": ["DownEncoderBlock2D"] * len(levels),
            "up_block_types": ["UpDecoderBlock2D"] * len(levels),
            "layers_per_block": t.count("encoder.down.0.block"),
            "latent_channels": latents,
            "use_quant_conv": "quant_conv.weight" in t,
            "use_post_quant_conv": "post_quant_conv.weight" in t,
            "sample_size": 512 if latents == 4 else 1024,
        }
    except Unfit:
        return None
    return Beside("AutoencoderKL", "diffusers", config)


def text_encoder(t: Shapes, denoiser: str, *, alone: bool) -> Beside | None:
    """CLIP, OpenCLIP or T5; None for another.

    denoiser: the class of what it encodes for: FLUX.1 has no use for CLIP's projection.
    alone: it is the pipeline's only one, of which Stable Diffusion 2 leaves out the last layer.
    """
    try:
        if "text_model.embeddings.token_embedding.weight" in t:
            return _clip(t, projects=not denoiser.startswith("Flux"))
        if "transformer.resblocks.0.attn.in_proj_weight" in t:
            return _open_clip(t, alone=alone)
        if "encoder.block.0.layer.0.SelfAttention.q.weight" in t and "shared.weight" in t:
            return _t5(t)
    except Unfit:
        return None
    return None


def _clip_config(words: int, width: int, inner: int, layers: int) -> dict[str, Any]:
    return {
        "model_type": "clip_text_model",
        "vocab_size": words,
        "hidden_size": width,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": quotient(width, 64),
        "hidden_act": "quick_gelu" if width < 1024 else "gelu",
        "projection_dim": width,
    }


def _clip(t: Shapes, *, projects: bool) -> Beside:
    words, width = t.of("text_model.embeddings.token_embedding.weight", 2)
    inner = t.of("text_model.encoder.layers.0.mlp.fc1.weight", 2)[0]
    config = _clip_config(words, width, inner, t.count("text_model.encoder.layers"))
    dropped = ("logit_scale", "text_model.embeddings.position_ids")
    if projects and "text_projection.weight" in t:
        return Beside("CLIPTextModelWithProjection", "transformers", config, dropped)
    return Beside("CLIPTextModel", "transformers", config, (*dropped, "text_projection.weight"))


def _open_clip(t: Shapes, *, alone: bool) -> Beside:
    words, width = t.of("token_embedding.weight", 2)
    inner, layers = t.of("transformer.resblocks.0.mlp.c_fc.weight", 2)[0], t.count("transformer.resblocks")
    if not alone:
        config = _clip_config(words, width, inner, layers)
        return Beside("CLIPTextModelWithProjection", "transformers", config, ("logit_scale",))
    last = f"transformer.resblocks.{layers - 1}."
    dropped = ("logit_scale", "text_projection", *(name for name in t if name.startswith(last)))
    return Beside("CLIPTextModel", "transformers", _clip_config(words, width, inner, layers - 1), dropped)


def _t5(t: Shapes) -> Beside:
    words, width = t.of("shared.weight", 2)
    heads_width, _ = t.of("encoder.block.0.layer.0.SelfAttention.q.weight", 2)
    gated = "encoder.block.0.layer.1.DenseReluDense.wi_0.weight"
    config = {
        "model_type": "t5",
        "vocab_size": words,
        "d_model": width,
        "d_ff": t.of(gated, 2)[0],
        "d_kv": 64,
        "num_heads": quotient(heads_width, 64),
        "num_layers": t.count("encoder.block"),
        "feed_forward_proj": "gated-gelu",
        "tie_word_embeddings": False,
    }
    return Beside("T5EncoderModel", "transformers", config, ("encoder.embed_tokens.weight", "logit_scale"))
