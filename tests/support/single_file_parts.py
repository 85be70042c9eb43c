"""The same for Stable Diffusion before 3: its UNet, autoencoder and text encoders."""

from support.single_files import Shapes, conv, linear, norm, under


def _resnet(at: str, inputs: int, outputs: int, time: int) -> Shapes:
    out = norm(f"{at}.in_layers.0", inputs) | conv(f"{at}.in_layers.2", inputs, outputs)
    out |= linear(f"{at}.emb_layers.1", time, outputs)
    out |= norm(f"{at}.out_layers.0", outputs) | conv(f"{at}.out_layers.3", outputs, outputs)
    return out | (conv(f"{at}.skip_connection", inputs, outputs, 1, 1) if inputs != outputs else {})


def _transformer(at: str, width: int, layers: int, text: int, *, by_linear: bool) -> Shapes:
    out = norm(f"{at}.norm", width)
    for name in ("proj_in", "proj_out"):
        out |= linear(f"{at}.{name}", width, width) if by_linear else conv(f"{at}.{name}", width, width, 1, 1)
    for layer in range(layers):
        block = f"{at}.transformer_blocks.{layer}"
        for attention, inputs in (("attn1", width), ("attn2", text)):
            out |= linear(f"{block}.{attention}.to_q", width, width, bias=False)
            for name in ("to_k", "to_v"):
                out |= linear(f"{block}.{attention}.{name}", inputs, width, bias=False)
            out |= linear(f"{block}.{attention}.to_out.0", width, width)
        out |= linear(f"{block}.ff.net.0.proj", width, 8 * width) | linear(f"{block}.ff.net.2", 4 * width, width)
        for name in ("norm1", "norm2", "norm3"):
            out |= norm(f"{block}.{name}", width)
    return out


def unet(
    widths: tuple[int, ...] = (320, 640, 1280, 1280),
    depths: tuple[int, ...] = (1, 1, 1, 0),
    *,
    middle: int = 1,
    text: int = 768,
    channels: int = 4,
    added: int = 0,
    by_linear: bool = False,
) -> Shapes:
    """A UNet of two ResNet blocks a level; by default that of Stable Diffusion 1."""
    first, time = widths[0], 4 * widths[0]
    out = conv("input_blocks.0.0", channels, first) | norm("out.0", first) | conv("out.2", first, 4)
    out |= linear("time_embed.0", first, time) | linear("time_embed.2", time, time)
    out |= linear("label_emb.0.0", added, time) | linear("label_emb.0.2", time, time) if added else {}
    skips, place, width = [first], 1, first
    for level, (own, depth) in enumerate(zip(widths, depths, strict=True)):
        for _ in range(2):
            out |= _resnet(f"input_blocks.{place}.0", width, own, time)
            if depth:
                out |= _transformer(f"input_blocks.{place}.1", own, depth, text, by_linear=by_linear)
            width, place = own, place + 1
            skips.append(width)
        if level < len(widths) - 1:
            out |= conv(f"input_blocks.{place}.0.op", width, width)
            skips.append(width)
            place += 1
    out |= _resnet("middle_block.0", width, width, time) | _resnet("middle_block.2", width, width, time)
    out |= _transformer("middle_block.1", width, middle, text, by_linear=by_linear)
    place = 0
    for level, (own, depth) in reversed(list(enumerate(zip(widths, depths, strict=True)))):
        for turn in range(3):
            out |= _resnet(f"output_blocks.{place}.0", width + skips.pop(), own, time)
            width = own
            if depth:
                out |= _transformer(f"output_blocks.{place}.1", own, depth, text, by_linear=by_linear)
            if level and turn == 2:
                out |= conv(f"output_blocks.{place}.{2 if depth else 1}.conv", own, own)
            place += 1
    return out


def sdxl_unet() -> Shapes:
    """The UNet of Stable Diffusion XL."""
    return unet((320, 640, 1280), (0, 2, 10), middle=10, text=2048, added=2816, by_linear=True)


def sd2_unet() -> Shapes:
    """The UNet of Stable Diffusion 2."""
    return unet(text=1024, by_linear=True)


def _vae_resnet(at: str, inputs: int, outputs: int) -> Shapes:
    out = norm(f"{at}.norm1", inputs) | conv(f"{at}.conv1", inputs, outputs)
    out |= norm(f"{at}.norm2", outputs) | conv(f"{at}.conv2", outputs, outputs)
    return out | (conv(f"{at}.nin_shortcut", inputs, outputs, 1, 1) if inputs != outputs else {})


def _vae_middle(at: str, width: int) -> Shapes:
    out = _vae_resnet(f"{at}.block_1", width, width) | _vae_resnet(f"{at}.block_2", width, width)
    out |= norm(f"{at}.attn_1.norm", width)
    for name in ("q", "k", "v", "proj_out"):
        out |= conv(f"{at}.attn_1.{name}", width, width, 1, 1)
    return out


def vae(latents: int = 4, *, quant_conv: bool = True) -> Shapes:
    """AutoencoderKL."""
    widths = (128, 256, 512, 512)
    out = conv("encoder.conv_in", 3, 128) | conv("decoder.conv_in", latents, 512) | conv("decoder.conv_out", 128, 3)
    out |= norm("encoder.norm_out", 512) | conv("encoder.conv_out", 512, 2 * latents) | norm("decoder.norm_out", 128)
    out |= _vae_middle("encoder.mid", 512) | _vae_middle("decoder.mid", 512)
    width = 128
    for level, own in enumerate(widths):
        for block in range(2):
            out |= _vae_resnet(f"encoder.down.{level}.block.{block}", width, own)
            width = own
        out |= conv(f"encoder.down.{level}.downsample.conv", own, own) if level < 3 else {}
    for level, own in reversed(list(enumerate(widths))):
        for block in range(3):
            out |= _vae_resnet(f"decoder.up.{level}.block.{block}", width, own)
            width = own
        out |= conv(f"decoder.up.{level}.upsample.conv", own, own) if level else {}
    if quant_conv:
        out |= conv("quant_conv", 2 * latents, 2 * latents, 1, 1) | conv("post_quant_conv", latents, latents, 1, 1)
    return out


def clip(h: int = 768, layers: int = 12, *, projection: bool = False) -> Shapes:
    """CLIP's text encoder under Transformers' names."""
    at = "text_model.embeddings"
    out: Shapes = {f"{at}.token_embedding.weight": (49408, h), f"{at}.position_embedding.weight": (77, h)}
    out |= norm("text_model.final_layer_norm", h)
    for layer in range(layers):
        at = f"text_model.encoder.layers.{layer}"
        for name in ("q_proj", "k_proj", "v_proj", "out_proj"):
            out |= linear(f"{at}.self_attn.{name}", h, h)
        out |= linear(f"{at}.mlp.fc1", h, 4 * h) | linear(f"{at}.mlp.fc2", 4 * h, h)
        out |= norm(f"{at}.layer_norm1", h) | norm(f"{at}.layer_norm2", h)
    return out | ({"text_projection.weight": (h, h)} if projection else {})


def open_clip(h: int = 1280, layers: int = 32) -> Shapes:
    """CLIP's text encoder under OpenCLIP's names."""
    out: Shapes = {"token_embedding.weight": (49408, h), "positional_embedding": (77, h), "text_projection": (h, h)}
    out |= norm("ln_final", h) | {"logit_scale": ()}
    for layer in range(layers):
        at = f"transformer.resblocks.{layer}"
        out |= {f"{at}.attn.in_proj_weight": (3 * h, h), f"{at}.attn.in_proj_bias": (3 * h,)}
        out |= linear(f"{at}.attn.out_proj", h, h) | linear(f"{at}.mlp.c_fc", h, 4 * h)
        out |= linear(f"{at}.mlp.c_proj", 4 * h, h) | norm(f"{at}.ln_1", h) | norm(f"{at}.ln_2", h)
    return out


def t5(h: int = 4096, inner: int = 10240, layers: int = 24) -> Shapes:
    """T5 v1.1 XXL's encoder."""
    out: Shapes = {"shared.weight": (32128, h), "encoder.final_layer_norm.weight": (h,)}
    out |= {"encoder.block.0.layer.0.SelfAttention.relative_attention_bias.weight": (32, 64)}
    for layer in range(layers):
        at = f"encoder.block.{layer}.layer"
        for name in "qkvo":
            out |= linear(f"{at}.0.SelfAttention.{name}", h, h, bias=False)
        for name in ("wi_0", "wi_1"):
            out |= linear(f"{at}.1.DenseReluDense.{name}", h, inner, bias=False)
        out |= linear(f"{at}.1.DenseReluDense.wo", inner, h, bias=False)
        out |= {f"{at}.{place}.layer_norm.weight": (h,) for place in range(2)}
    return out


def sd15_file() -> Shapes:
    """v1-5-pruned-emaonly.safetensors."""
    out = under("model.diffusion_model.", unet()) | under("first_stage_model.", vae())
    return out | under("cond_stage_model.transformer.", clip())


def sd21_file() -> Shapes:
    """v2-1_768-ema-pruned.safetensors."""
    out = under("model.diffusion_model.", sd2_unet()) | under("first_stage_model.", vae())
    return out | under("cond_stage_model.model.", open_clip(1024, 24))


def sdxl_file() -> Shapes:
    """sd_xl_base_1.0.safetensors."""
    out = under("model.diffusion_model.", sdxl_unet()) | under("first_stage_model.", vae())
    out |= under("conditioner.embedders.0.transformer.", clip())
    return out | under("conditioner.embedders.1.model.", open_clip())
