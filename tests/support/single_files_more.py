"""The same for HunyuanVideo, Sana and PixArt."""

from support.single_files import Shapes, conv, embedder, linear, norm


def hunyuan_video(double: int = 20, single: int = 40, h: int = 3072) -> Shapes:
    """HunyuanVideo."""
    out = conv("img_in.proj", 16, h, 1, 2, 2) | embedder("vector_in", 768, h) | linear("final_layer.linear", h, 64)
    out |= linear("final_layer.adaLN_modulation.1", h, 2 * h) | linear("txt_in.input_embedder", 4096, h)
    for name in ("time_in", "guidance_in", "txt_in.t_embedder"):
        out |= linear(f"{name}.mlp.0", 256, h) | linear(f"{name}.mlp.2", h, h)
    out |= linear("txt_in.c_embedder.linear_1", 4096, h) | linear("txt_in.c_embedder.linear_2", h, h)
    for block in range(2):
        at = f"txt_in.individual_token_refiner.blocks.{block}"
        out |= norm(f"{at}.norm1", h) | norm(f"{at}.norm2", h) | linear(f"{at}.self_attn_qkv", h, 3 * h)
        out |= linear(f"{at}.self_attn_proj", h, h) | linear(f"{at}.adaLN_modulation.1", h, 2 * h)
        out |= linear(f"{at}.mlp.fc1", h, 4 * h) | linear(f"{at}.mlp.fc2", 4 * h, h)
    for block in range(double):
        for stream in ("img", "txt"):
            at = f"double_blocks.{block}.{stream}"
            out |= linear(f"{at}_mod.linear", h, 6 * h) | linear(f"{at}_attn_qkv", h, 3 * h)
            out |= linear(f"{at}_attn_proj", h, h) | linear(f"{at}_mlp.fc1", h, 4 * h)
            out |= linear(f"{at}_mlp.fc2", 4 * h, h)
            out |= {f"{at}_attn_{side}_norm.weight": (128,) for side in "qk"}
    for block in range(single):
        at = f"single_blocks.{block}"
        out |= linear(f"{at}.linear1", h, 7 * h) | linear(f"{at}.linear2", 5 * h, h)
        out |= linear(f"{at}.modulation.linear", h, 3 * h) | {f"{at}.{side}_norm.weight": (128,) for side in "qk"}
    return out


def sana(layers: int = 20, h: int = 2240) -> Shapes:
    """Sana."""
    out = conv("x_embedder.proj", 32, h, 1, 1) | {"pos_embed": (1, 1024, h)} | {"attention_y_norm.weight": (h,)}
    out |= {"y_embedder.y_embedding": (300, 2304)} | _y_embedder(2304, h) | linear("t_embedder.mlp.0", 256, h)
    out |= linear("t_embedder.mlp.2", h, h) | linear("t_block.1", h, 6 * h)
    out |= linear("final_layer.linear", h, 32) | {"final_layer.scale_shift_table": (2, h)}
    for block in range(layers):
        at, inner = f"blocks.{block}", 5 * h // 2
        out |= {f"{at}.scale_shift_table": (6, h)} | linear(f"{at}.attn.qkv", h, 3 * h, bias=False)
        out |= linear(f"{at}.attn.proj", h, h) | linear(f"{at}.cross_attn.q_linear", h, h)
        out |= linear(f"{at}.cross_attn.kv_linear", h, 2 * h) | linear(f"{at}.cross_attn.proj", h, h)
        out |= conv(f"{at}.mlp.inverted_conv.conv", h, 2 * inner, 1, 1)
        out |= conv(f"{at}.mlp.depth_conv.conv", 1, 2 * inner)
        out |= {f"{at}.mlp.point_conv.conv.weight": (h, inner, 1, 1)}
    return out


def pixart(layers: int = 28, h: int = 1152) -> Shapes:
    """PixArt-Sigma of 1024 pixels."""
    out = conv("x_embedder.proj", 4, h, 2, 2) | {"pos_embed": (1, 4096, h)} | _y_embedder(4096, h)
    out |= {"y_embedder.y_embedding": (300, 4096), "final_layer.scale_shift_table": (2, h)}
    out |= linear("t_embedder.mlp.0", 256, h) | linear("t_embedder.mlp.2", h, h) | linear("t_block.1", h, 6 * h)
    out |= linear("final_layer.linear", h, 32)
    for block in range(layers):
        at = f"blocks.{block}"
        out |= {f"{at}.scale_shift_table": (6, h)} | linear(f"{at}.attn.qkv", h, 3 * h)
        out |= linear(f"{at}.attn.proj", h, h) | linear(f"{at}.cross_attn.q_linear", h, h)
        out |= linear(f"{at}.cross_attn.kv_linear", h, 2 * h) | linear(f"{at}.cross_attn.proj", h, h)
        out |= linear(f"{at}.mlp.fc1", h, 4 * h) | linear(f"{at}.mlp.fc2", 4 * h, h)
    return out


def _y_embedder(text: int, h: int) -> Shapes:
    return linear("y_embedder.y_proj.fc1", text, h) | linear("y_embedder.y_proj.fc2", h, h)
