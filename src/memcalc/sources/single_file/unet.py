"""UNets of Stable Diffusion before 3 under their original names (`input_blocks`, `middle_block`, `output_blocks`).

Source: diffusers 0.42.1, loaders/single_file_utils.py (convert_ldm_unet_checkpoint); heads are those of the released
models: 8 where projections are convolutions (1.x), else as many of width 64 as fit.
"""

from typing import Any

from memcalc.sources.single_file.shapes import Shapes, Unfit, quotient

PROOF = ("input_blocks.0.0.weight", "middle_block.0.in_layers.2.weight")

_TIME_WIDTH = 256
"""Width of the embedding of each of SDXL's six sizes."""


def unet_config(t: Shapes) -> dict[str, Any]:
    """The config of UNet2DConditionModel. Raises Unfit where levels are built unlike each other."""
    first, channels, *_ = t.of(PROOF[0], 4)
    levels = _levels(t)
    widths = [width for width, *_ in levels]
    attends = [depth > 0 for *_, depth in levels]
    middle = t.count("middle_block.1.transformer_blocks")
    if widths[0] != first or not any(attends) or not middle or len({count for _, count, _ in levels}) != 1:
        raise Unfit("levels")
    linear = len(t.of("middle_block.1.proj_in.weight")) == 2
    depths = [depth or (middle if place == len(levels) - 1 else 1) for place, (*_, depth) in enumerate(levels)]
    config: dict[str, Any] = {
        "in_channels": channels,
        "out_channels": t.of("out.2.weight", 4)[0],
        "block_out_channels": widths,
        "layers_per_block": levels[0][1],
        "transformer_layers_per_block": depths,
        "cross_attention_dim": t.of("middle_block.1.transformer_blocks.0.attn2.to_k.weight", 2)[1],
        "attention_head_dim": [quotient(width, 64) for width in widths] if linear else 8,
        "use_linear_projection": linear,
        "down_block_types": ["CrossAttnDownBlock2D" if attend else "DownBlock2D" for attend in attends],
        "up_block_types": ["CrossAttnUpBlock2D" if attend else "UpBlock2D" for attend in reversed(attends)],
        "sample_size": 96 if linear else 64,
    }
    if "label_emb.0.0.weight" in t:
        config |= {
            "sample_size": 128,
            "addition_embed_type": "text_time",
            "addition_time_embed_dim": _TIME_WIDTH,
            "projection_class_embeddings_input_dim": t.of("label_emb.0.0.weight", 2)[1],
        }
    return config


def _levels(t: Shapes) -> list[tuple[int, int, int]]:
    """Channels, ResNet blocks and transformer layers of each level on the way down."""
    levels: list[tuple[int, int, int]] = []
    width = count = depth = 0
    for place in range(1, t.count("input_blocks")):
        block = f"input_blocks.{place}"
        if f"{block}.0.op.weight" in t:
            levels.append((width, count, depth))
            count = depth = 0
            continue
        width = t.of(f"{block}.0.in_layers.2.weight", 4)[0]
        layers = t.count(f"{block}.1.transformer_blocks")
        if count and layers != depth:
            raise Unfit(block)
        count, depth = count + 1, layers
    return [*levels, (width, count, depth)]
