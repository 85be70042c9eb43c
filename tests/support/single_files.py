"""Shapes of checkpoints of one file, under the names that the original repositories gave their tensors.

What they hold was converted by diffusers 0.42.1 (loaders/single_file_utils.py) into the state dict of its class, with
no name left over and none missing.
"""

Shapes = dict[str, tuple[int, ...]]


def linear(name: str, inputs: int, outputs: int, *, bias: bool = True) -> Shapes:
    """A linear layer."""
    return {f"{name}.weight": (outputs, inputs)} | ({f"{name}.bias": (outputs,)} if bias else {})


def conv(name: str, inputs: int, outputs: int, *kernel: int) -> Shapes:
    """A convolution."""
    return {f"{name}.weight": (outputs, inputs, *(kernel or (3, 3))), f"{name}.bias": (outputs,)}


def norm(name: str, width: int) -> Shapes:
    """A norm with weight and bias."""
    return {f"{name}.weight": (width,), f"{name}.bias": (width,)}


def under(prefix: str, shapes: Shapes) -> Shapes:
    """The same tensors behind a prefix."""
    return {prefix + name: shape for name, shape in shapes.items()}


def embedder(name: str, inputs: int, width: int, *, bias: bool = True) -> Shapes:
    return linear(f"{name}.in_layer", inputs, width, bias=bias) | linear(f"{name}.out_layer", width, width, bias=bias)


def flux(double: int = 19, single: int = 38, h: int = 3072, *, guidance: bool = True) -> Shapes:
    """FLUX.1."""
    out = linear("img_in", 64, h) | linear("txt_in", 4096, h) | embedder("time_in", 256, h)
    out |= embedder("vector_in", 768, h) | (embedder("guidance_in", 256, h) if guidance else {})
    out |= linear("final_layer.linear", h, 64) | linear("final_layer.adaLN_modulation.1", h, 2 * h)
    return out | _flux_blocks(double, single, h, modulated=True)


def _flux_blocks(double: int, single: int, h: int, *, modulated: bool) -> Shapes:
    out: Shapes = {}
    for block in range(double):
        for stream in ("img", "txt"):
            at = f"double_blocks.{block}.{stream}"
            out |= linear(f"{at}_mod.lin", h, 6 * h) if modulated else {}
            out |= linear(f"{at}_attn.qkv", h, 3 * h) | linear(f"{at}_attn.proj", h, h)
            out |= {f"{at}_attn.norm.{side}_norm.scale": (128,) for side in ("query", "key")}
            out |= linear(f"{at}_mlp.0", h, 4 * h) | linear(f"{at}_mlp.2", 4 * h, h)
    for block in range(single):
        at = f"single_blocks.{block}"
        out |= linear(f"{at}.linear1", h, 7 * h) | linear(f"{at}.linear2", 5 * h, h)
        out |= linear(f"{at}.modulation.lin", h, 3 * h) if modulated else {}
        out |= {f"{at}.norm.{side}_norm.scale": (128,) for side in ("query", "key")}
    return out


def chroma(double: int = 19, single: int = 38, h: int = 3072, hidden: int = 5120) -> Shapes:
    """Chroma."""
    out = linear("img_in", 64, h) | linear("txt_in", 4096, h) | linear("final_layer.linear", h, 64)
    out |= linear("distilled_guidance_layer.in_proj", 64, hidden) | linear(
        "distilled_guidance_layer.out_proj", hidden, h
    )
    for layer in range(5):
        at = f"distilled_guidance_layer.layers.{layer}"
        out |= linear(f"{at}.in_layer", hidden, hidden) | linear(f"{at}.out_layer", hidden, hidden)
        out |= {f"distilled_guidance_layer.norms.{layer}.scale": (hidden,)}
    return out | _flux_blocks(double, single, h, modulated=False)


def flux2(double: int = 8, single: int = 48, h: int = 6144, text: int = 15360, *, guidance: bool = True) -> Shapes:
    """FLUX.2."""
    inner = 3 * h
    out = linear("img_in", 128, h, bias=False) | linear("txt_in", text, h, bias=False)
    out |= embedder("time_in", 256, h, bias=False) | (embedder("guidance_in", 256, h, bias=False) if guidance else {})
    for name, sets in (("double_stream_modulation_img", 6), ("double_stream_modulation_txt", 6)):
        out |= linear(f"{name}.lin", h, sets * h, bias=False)
    out |= linear("single_stream_modulation.lin", h, 3 * h, bias=False)
    out |= linear("final_layer.linear", h, 128, bias=False)
    out |= linear("final_layer.adaLN_modulation.1", h, 2 * h, bias=False)
    for block in range(double):
        for stream in ("img", "txt"):
            at = f"double_blocks.{block}.{stream}"
            out |= linear(f"{at}_attn.qkv", h, 3 * h, bias=False) | linear(f"{at}_attn.proj", h, h, bias=False)
            out |= {f"{at}_attn.norm.{side}_norm.scale": (128,) for side in ("query", "key")}
            out |= linear(f"{at}_mlp.0", h, 2 * inner, bias=False) | linear(f"{at}_mlp.2", inner, h, bias=False)
    for block in range(single):
        at = f"single_blocks.{block}"
        out |= linear(f"{at}.linear1", h, 3 * h + 2 * inner, bias=False)
        out |= linear(f"{at}.linear2", h + inner, h, bias=False)
        out |= {f"{at}.norm.{side}_norm.scale": (128,) for side in ("query", "key")}
    return out


def sd3(depth: int = 24, *, side: int = 192, qk_norm: bool = False, dual: int = 0) -> Shapes:
    """Stable Diffusion 3 and 3.5."""
    h = 64 * depth
    out = (
        conv("x_embedder.proj", 16, h, 2, 2) | {"pos_embed": (1, side * side, h)} | linear("context_embedder", 4096, h)
    )
    for name, inputs in (("t_embedder", 256), ("y_embedder", 2048)):
        out |= linear(f"{name}.mlp.0", inputs, h) | linear(f"{name}.mlp.2", h, h)
    out |= linear("final_layer.linear", h, 64) | linear("final_layer.adaLN_modulation.1", h, 2 * h)
    for block in range(depth):
        for stream in ("x_block", "context_block"):
            at, last = f"joint_blocks.{block}.{stream}", block == depth - 1 and stream == "context_block"
            twice = block < dual and stream == "x_block"
            for attention in ("attn", "attn2")[: 1 + twice]:
                out |= linear(f"{at}.{attention}.qkv", h, 3 * h)
                out |= {f"{at}.{attention}.{name}.weight": (64,) for name in ("ln_q", "ln_k") if qk_norm}
                out |= {} if last else linear(f"{at}.{attention}.proj", h, h)
            out |= linear(f"{at}.adaLN_modulation.1", h, (2 if last else 9 if twice else 6) * h)
            out |= {} if last else linear(f"{at}.mlp.fc1", h, 4 * h) | linear(f"{at}.mlp.fc2", 4 * h, h)
    return out


def wan(h: int = 5120, layers: int = 40, inner: int = 13824, channels: int = 16, *, image: int = 0) -> Shapes:
    """Wan 2.1 and 2.2; with `image` the width of a picture's embedding."""
    outputs = 16
    out = conv("patch_embedding", channels, h, 1, 2, 2) | linear("head.head", h, 4 * outputs)
    out |= {"head.modulation": (1, 2, h)} | linear("time_projection.1", h, 6 * h)
    if image:
        out |= norm("img_emb.proj.0", image) | linear("img_emb.proj.1", image, image)
        out |= linear("img_emb.proj.3", image, h) | norm("img_emb.proj.4", h)
    for name, inputs in (("text_embedding", 4096), ("time_embedding", 256)):
        out |= linear(f"{name}.0", inputs, h) | linear(f"{name}.2", h, h)
    for block in range(layers):
        at = f"blocks.{block}"
        for attention in ("self_attn", "cross_attn"):
            for name in "qkvo":
                out |= linear(f"{at}.{attention}.{name}", h, h)
            out |= {f"{at}.{attention}.norm_{name}.weight": (h,) for name in "qk"}
        if image:
            out |= linear(f"{at}.cross_attn.k_img", h, h) | linear(f"{at}.cross_attn.v_img", h, h)
            out |= {f"{at}.cross_attn.norm_k_img.weight": (h,)}
        out |= linear(f"{at}.ffn.0", h, inner) | linear(f"{at}.ffn.2", inner, h) | norm(f"{at}.norm3", h)
        out |= {f"{at}.modulation": (1, 6, h)}
    return out


def qwen_image(layers: int = 60, h: int = 3072) -> Shapes:
    """Qwen-Image, whose names are diffusers' own."""
    out = linear("img_in", 64, h) | linear("txt_in", 3584, h) | {"txt_norm.weight": (3584,)}
    out |= linear("time_text_embed.timestep_embedder.linear_1", 256, h)
    out |= linear("time_text_embed.timestep_embedder.linear_2", h, h)
    out |= linear("norm_out.linear", h, 2 * h) | linear("proj_out", h, 64)
    for block in range(layers):
        at = f"transformer_blocks.{block}"
        for name in ("to_q", "to_k", "to_v", "to_out.0", "add_q_proj", "add_k_proj", "add_v_proj", "to_add_out"):
            out |= linear(f"{at}.attn.{name}", h, h)
        out |= {f"{at}.attn.{name}.weight": (128,) for name in ("norm_q", "norm_k", "norm_added_q", "norm_added_k")}
        for stream in ("img", "txt"):
            out |= linear(f"{at}.{stream}_mod.1", h, 6 * h)
            out |= linear(f"{at}.{stream}_mlp.net.0.proj", h, 4 * h) | linear(f"{at}.{stream}_mlp.net.2", 4 * h, h)
    return out


def ltx(layers: int = 28, h: int = 2048) -> Shapes:
    """LTX-Video."""
    out = linear("patchify_proj", 128, h) | linear("proj_out", h, 128) | {"scale_shift_table": (2, h)}
    out |= linear("caption_projection.linear_1", 4096, h) | linear("caption_projection.linear_2", h, h)
    out |= linear("adaln_single.emb.timestep_embedder.linear_1", 256, h)
    out |= linear("adaln_single.emb.timestep_embedder.linear_2", h, h) | linear("adaln_single.linear", h, 6 * h)
    for block in range(layers):
        at = f"transformer_blocks.{block}"
        for attention in ("attn1", "attn2"):
            for name in ("to_q", "to_k", "to_v", "to_out.0"):
                out |= linear(f"{at}.{attention}.{name}", h, h)
            out |= {f"{at}.{attention}.{name}.weight": (h,) for name in ("q_norm", "k_norm")}
        out |= linear(f"{at}.ff.net.0.proj", h, 4 * h) | linear(f"{at}.ff.net.2", 4 * h, h)
        out |= {f"{at}.scale_shift_table": (6, h)}
    return out


def _lumina_blocks(h: int, inner: int, qkv: int, dim: int, conditioning: int, place: int) -> "dict[str, Shapes]":
    def block(*, modulated: bool) -> Shapes:
        out = linear("attention.qkv", h, qkv, bias=False) | linear("attention.out", h, h, bias=False)
        out |= {f"attention.{name}.weight": (dim,) for name in ("q_norm", "k_norm")}
        out |= linear("feed_forward.w1", h, inner, bias=False) | linear("feed_forward.w3", h, inner, bias=False)
        out |= linear("feed_forward.w2", inner, h, bias=False)
        out |= {f"{name}.weight": (h,) for name in ("attention_norm1", "attention_norm2", "ffn_norm1", "ffn_norm2")}
        return out | (linear(f"adaLN_modulation.{place}", conditioning, 4 * h) if modulated else {})

    return {"layers": block(modulated=True), "context_refiner": block(modulated=False)}


def lumina2(layers: int = 26, h: int = 2304) -> Shapes:
    """Lumina-Image 2.0."""
    out = linear("x_embedder", 64, h) | linear("t_embedder.mlp.0", 256, 1024) | linear("t_embedder.mlp.2", 1024, 1024)
    out |= {"cap_embedder.0.weight": (2304,)} | linear("cap_embedder.1", 2304, h)
    out |= linear("final_layer.linear", h, 64) | linear("final_layer.adaLN_modulation.1", 1024, h)
    kinds = _lumina_blocks(h, 9216, 96 * 40, 96, 1024, 1)
    for stack, count, kind in (
        ("layers", layers, "layers"),
        ("noise_refiner", 2, "layers"),
        ("context_refiner", 2, ""),
    ):
        for block in range(count):
            out |= under(f"{stack}.{block}.", kinds[kind or "context_refiner"])
    return out


def z_image(layers: int = 30, h: int = 3840) -> Shapes:
    """Z-Image."""
    out = linear("x_embedder", 64, h) | linear("t_embedder.mlp.0", 256, 1024) | linear("t_embedder.mlp.2", 1024, 256)
    out |= {"cap_embedder.0.weight": (2560,)} | linear("cap_embedder.1", 2560, h)
    out |= {"x_pad_token": (1, h), "cap_pad_token": (1, h)}
    out |= linear("final_layer.linear", h, 64) | linear("final_layer.adaLN_modulation.1", 256, h)
    kinds = _lumina_blocks(h, 10240, 3 * h, 128, 256, 0)
    for stack, count, kind in (
        ("layers", layers, "layers"),
        ("noise_refiner", 2, "layers"),
        ("context_refiner", 2, ""),
    ):
        for block in range(count):
            out |= under(f"{stack}.{block}.", kinds[kind or "context_refiner"])
    return out
