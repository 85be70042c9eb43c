"""kohya's sd-scripts: command lines and the TOML of --config_file.

Source: kohya-ss/sd-scripts 48d368f: library/train_util.py, train_network.py, flux_train_network.py, networks/lora.py.
"""

from __future__ import annotations

import re
from typing import Any

from memcalc.run_configs import denoisers, training
from memcalc.run_configs import option_names as our
from memcalc.run_configs.context import Context
from memcalc.run_configs.keys import Key, Keys, anything, count, flag, harmless, number, table, text, whole
from memcalc.run_configs.mapping import Given
from memcalc.run_configs.sharding import Sharding

SCRIPT = re.compile(
    r"(?:(?:flux|sdxl|sd3|lumina|anima|hunyuan_image)_)?(?:train_network|train_textual_inversion)\.py"
    r"|(?:flux|sdxl|sd3|lumina|anima)_train\.py|train_db\.py|fine_tune\.py"
)

KEYS = table(
    Key("pretrained_model_name_or_path", text, None, "model", "the model"),
    Key("network_module", text, None, our.LORA_RANK, "what is trained on the frozen model"),
    Key("network_dim", count, 4, our.LORA_RANK, "rank of the adapters"),
    Key("network_dropout", number, 0.0, our.LORA_DROPOUT, "dropout of the adapters"),
    Key("network_args", anything, None, our.LORA_TARGETS, "arguments of the module"),
    Key("network_train_unet_only", flag, False, our.TRAIN_TEXT_ENCODER, "whether text encoders get none"),
    Key("network_train_text_encoder_only", flag, False, our.TRAIN_TEXT_ENCODER, "text encoders alone get adapters"),
    Key("train_text_encoder", flag, False, our.TRAIN_TEXT_ENCODER, "text encoders are trained too"),
    Key("learning_rate_te1", number, 0.0, our.TRAIN_TEXT_ENCODER, "0: the first text encoder is not trained"),
    Key("train_batch_size", count, 1, our.BATCH, "pictures per GPU and forward pass"),
    Key("gradient_accumulation_steps", count, 1, our.GRAD_ACCUM, "micro-batches a step"),
    Key("resolution", anything, None, our.RESOLUTION, "pixels of a side"),
    Key("mixed_precision", text, "no", our.PRECISION, "autocast"),
    Key("full_bf16", flag, False, our.PRECISION, "trained weights in bf16 too"),
    Key("full_fp16", flag, False, our.PRECISION, "trained weights in fp16 too"),
    Key("fp8_base", flag, False, our.QUANTIZATION, "frozen weights in fp8"),
    Key("fp8_base_unet", flag, False, our.QUANTIZATION, "the denoiser's frozen weights in fp8"),
    Key("gradient_checkpointing", flag, False, our.CHECKPOINTING, "recompute blocks in backward"),
    Key("cpu_offload_checkpointing", flag, False, our.ACTIVATION_OFFLOADING, "inputs of blocks go to the host"),
    Key("cache_latents", flag, False, our.CACHE_LATENTS, "latents are made once"),
    Key("cache_latents_to_disk", flag, False, our.CACHE_LATENTS, "latents are made once"),
    Key("cache_text_encoder_outputs", flag, False, our.CACHE_TEXT, "text is encoded once"),
    Key("cache_text_encoder_outputs_to_disk", flag, False, our.CACHE_TEXT, "text is encoded once"),
    Key("no_half_vae", flag, False, our.VAE_DTYPE, "the autoencoder in fp32"),
    Key("optimizer_type", text, "AdamW", our.OPTIMIZER, "optimizer"),
    Key("use_8bit_adam", flag, False, our.OPTIMIZER, "bitsandbytes' AdamW"),
    Key("use_lion_optimizer", flag, False, our.OPTIMIZER, "Lion"),
    Key("fused_backward_pass", flag, False, our.OPTIMIZER_IN_BACKWARD, "each weight is stepped in backward"),
    Key("blockwise_fused_optimizers", flag, False, our.OPTIMIZER_IN_BACKWARD, "blocks are stepped in backward"),
    Key("fused_optimizer_groups", whole, 0, our.OPTIMIZER_IN_BACKWARD, "groups are stepped in backward"),
    Key("max_grad_norm", number, 1.0, our.MAX_GRAD_NORM, "norm that gradients are clipped to; 0 for none"),
    Key("blocks_to_swap", whole, 0, "", "blocks whose weights wait on the host"),
    Key("double_blocks_to_swap", whole, 0, "", "blocks whose weights wait on the host"),
    Key("single_blocks_to_swap", whole, 0, "", "blocks whose weights wait on the host"),
    Key("split_mode", flag, False, "", "half of the blocks wait on the host"),
    Key("t5xxl_max_token_length", count, None, our.TEXT_LENGTH, "tokens of text"),
    Key("max_token_length", count, None, our.TEXT_LENGTH, "tokens of text: 75, 150 or 225"),
    Key("torch_compile", flag, False, "", "torch.compile"),
    Key("mem_eff_attn", flag, False, our.ATTENTION, "an attention of its own"),
    Key("enable_bucket", flag, False, "", "pictures keep their proportions, at the same area"),
)
HARMLESS = harmless(
    "v2 v_parameterization tokenizer_cache_dir learning_rate unet_lr text_encoder_lr learning_rate_te "
    "learning_rate_te2 output_dir output_name seed resume xformers sdpa vae clip_l clip_g t5xxl ae model_type "
    "guidance_scale clip_skip timestep_sampling sigmoid_scale model_prediction_type discrete_flow_shift "
    "apply_t5_attn_mask apply_lg_attn_mask network_alpha network_weights training_comment dim_from_weights "
    "scale_weight_norms base_weights no_metadata base_weights_multiplier vae_batch_size text_encoder_batch_size "
    "persistent_data_loader_workers lowram highvram max_data_loader_n_workers max_train_steps max_train_epochs "
    "train_data_dir reg_data_dir in_json dataset_config dataset_repeats dataset_class shuffle_caption color_aug "
    "flip_aug random_crop debug_dataset cache_info config_file bucket_reso_steps bucket_no_upscale "
    "min_bucket_reso max_bucket_reso resize_interpolation skip_cache_check noise_offset multires_noise_iterations "
    "multires_noise_discount adaptive_noise_scale zero_terminal_snr min_snr_gamma ip_noise_gamma perlin_noise "
    "min_timestep max_timestep loss_type huber_schedule huber_c huber_scale weighting_scheme logit_mean logit_std "
    "mode_scale prior_loss_weight masked_loss alpha_mask conditioning_data_dir training_shift optimizer_args "
    "use_safetensors mem_eff_save disable_mmap_load_safetensors scale_v_pred_loss_like_noise_pred "
    "v_pred_like_loss debiased_estimation_loss weighted_captions initial_epoch initial_step "
    "skip_until_initial_step ddp_timeout ddp_gradient_as_bucket_view ddp_static_graph output_config log_config "
    "t5xxl_dtype t5xxl_device block_lr diffusers_xformers num_cpu_threads_per_process arch ddp_bucket_view "
    "validation_split validation_seed",
    r"(caption|keep_tokens|token|secondary|enable_wildcard|lr|save|log|logging|wandb|huggingface|sample|metadata|async"
    r"|validat|clip_l|clip_g|t5|pos_emb|ip_noise|optimizer_schedulefree|schedulefree|face_crop|resume|max_validation)_?\w*",
)

_IN_DOUBLE = ("attn.to_q", "attn.to_k", "attn.to_v", "attn.to_out.0", "attn.add_q_proj", "attn.add_k_proj")
_FLUX = (
    *_IN_DOUBLE,
    "attn.add_v_proj",
    "attn.to_add_out",
    "ff.net.0.proj",
    "ff.net.2",
    "ff_context.net.0.proj",
    "ff_context.net.2",
    "norm1.linear",
    "norm1_context.linear",
)
_FLUX_SINGLE = ("norm.linear", "proj_mlp", "proj_out")
_IN_BLOCKS = r"(?:single_)?transformer_blocks\.\d+\.(?:" + "|".join(map(re.escape, (*_FLUX, *_FLUX_SINGLE))) + ")"
_IN_BACKWARD = ("fused_backward_pass", "blockwise_fused_optimizers", "fused_optimizer_groups")
_LENGTHS = {75: 77, 150: 152, 225: 227}


def is_kohya(values: dict[str, Any]) -> bool:
    """Whether a mapping is a config file of sd-scripts."""
    flat = denoisers.flattened(values)
    own = {"network_module", "network_dim", "optimizer_type", "cache_latents", "enable_bucket", "save_model_as", "ae"}
    return "pretrained_model_name_or_path" in flat and len(own & flat.keys()) > 1


def is_dataset(values: dict[str, Any]) -> bool:
    """Whether a mapping is a --dataset_config of sd-scripts."""
    sets = values.get("datasets")
    return isinstance(sets, list) and any(isinstance(one, dict) and "subsets" in one for one in sets)


def dataset_values(values: dict[str, Any]) -> dict[str, Any]:
    """The keys of a --dataset_config that a run file may have too: the largest batch and resolution."""
    general = values.get("general") if isinstance(values.get("general"), dict) else {}
    sets = [{**(general or {}), **one} for one in values["datasets"] if isinstance(one, dict)]
    found: dict[str, Any] = {}
    for ours, theirs in (("train_batch_size", "batch_size"), ("resolution", "resolution")):
        given = [one[theirs] for one in sets if theirs in one]
        if given:
            found[ours] = max(given, key=_pixels)
    return found


def _pixels(value: Any) -> float:
    sides = [float(part) for part in re.findall(r"\d{1,7}", str(value))]
    return sides[0] * sides[-1] if sides else 0


def read(context: Context) -> None:
    """A run of sd-scripts. Raises ConfigError."""
    out, script = context.out, context.command
    context.values = denoisers.flattened(context.values)
    keys = Keys(KEYS, context.values, context.where, out, HARMLESS)
    out.model = keys.value("pretrained_model_name_or_path")
    module = keys.get("network_module")
    adapted = module.value is not None or script.endswith("train_network.py")
    if script.endswith("train_textual_inversion.py"):
        out.take(our.TEXTUAL_INVERSION, True, Given("script", script, script), "a token is trained")
    mixed = str(keys.value("mixed_precision")).lower().replace("no", "")
    pure = bool(keys.value("full_bf16") or keys.value("full_fp16"))
    flow = script.startswith(("flux", "sd3", "lumina", "anima", "hunyuan"))
    denoisers.precision(out, keys.get("mixed_precision"), mixed, pure=mixed if not adapted and (pure or flow) else "")
    if adapted:
        _adapters(keys, script, "bf16" if pure and mixed == "bf16" else "fp32")
        for name in ("fp8_base", "fp8_base_unet"):
            if keys.value(name):
                denoisers.base_format(out, keys.get(name), "fp8", "PyTorch")
    else:
        out.note(keys.get("network_dim"), "nothing is frozen: all weights are trained")
    denoisers.optimizer(out, _optimizer(keys), accumulation=keys.value("gradient_accumulation_steps"))
    if any(keys.value(name) for name in _IN_BACKWARD):
        out.take(our.OPTIMIZER_IN_BACKWARD, True, keys.get("fused_backward_pass"))
    norm = keys.get("max_grad_norm")
    out.take(our.MAX_GRAD_NORM, norm.value, norm)
    keys.take("train_batch_size")
    keys.take("gradient_accumulation_steps")
    training.checkpointing(out, keys.get("gradient_checkpointing"), bool(keys.value("gradient_checkpointing")))
    if keys.value("cpu_offload_checkpointing"):
        out.take(our.ACTIVATION_OFFLOADING, True, keys.get("cpu_offload_checkpointing"))
    _pictures(keys)
    _inputs(keys, script, adapted=adapted)
    denoisers.stays_on_host(keys, "blocks_to_swap", "double_blocks_to_swap", "single_blocks_to_swap", "split_mode")
    for name in ("torch_compile", "mem_eff_attn"):
        if keys.value(name):
            out.lack(f"{name} is not modelled: counted without it")
    out.note(keys.get("enable_bucket"))
    denoisers.loop(out, "sd-scripts")
    keys.finish()
    context.finish(context.sharding or Sharding(world=context.world, world_from=context.world_from))


def _optimizer(keys: Keys) -> Given:
    for name, value in (("use_8bit_adam", "AdamW8bit"), ("use_lion_optimizer", "Lion")):
        given = keys.get(name)
        if given.value:
            return Given(given.key, given.raw, value)
    return keys.get("optimizer_type")


def _adapters(keys: Keys, script: str, dtype: str) -> None:
    out, module = keys.out, keys.get("network_module")
    arguments = _arguments(keys.value("network_args"))
    name = str(module.value or "networks.lora")
    if not name.startswith("networks.lora") or arguments.get("algo", "lora") not in ("lora", "locon"):
        out.lack(
            f"network_module: {module.shown} ({arguments.get('algo', 'not LoRA')[:40]}) is taken as LoRA of its rank"
        )
    else:
        out.note(module)
    if "conv_dim" in arguments:
        out.lack("network_args: adapters on convolutions (conv_dim) are not counted")
    flux = "flux" in script or "flux" in name
    unet = not flux and script in ("", "train_network.py", "sdxl_train_network.py")
    targets: Any = denoisers.UNET_TRANSFORMERS if unet else _IN_BLOCKS
    if flux and arguments.get("train_blocks") in ("single", "double"):
        kind = "single_" if arguments["train_blocks"] == "single" else ""
        targets = _IN_BLOCKS.replace("(?:single_)?", kind, 1)
    denoisers.adapters(out, keys.get("network_dim"), targets, dtype, keys.get("network_dropout"))


def _arguments(raw: Any) -> dict[str, str]:
    """`key=value` words, a list of them or one text."""
    words = raw if isinstance(raw, list) else str(raw or "").split()
    return {key.strip("\"'"): value.strip("\"'") for key, _, value in (str(word).partition("=") for word in words)}


def _pictures(keys: Keys) -> None:
    out, given = keys.out, keys.get("resolution")
    if given.value is None:
        out.ask("the resolution is in none of the files: give --resolution N, or the file of --dataset_config too")
    else:
        sides = given.value
        if isinstance(sides, list) and len(sides) == 2:
            given = Given(given.key, given.raw, f"{sides[0]},{sides[1]}", meaning=given.meaning)
        denoisers.size(out, given)
    tokens, clip = keys.get("t5xxl_max_token_length"), keys.get("max_token_length")
    if tokens.value is not None:
        out.take(our.TEXT_LENGTH, tokens.value, tokens)
    elif clip.value is not None:
        out.take(our.TEXT_LENGTH, _LENGTHS.get(clip.value, clip.value), clip)


def _inputs(keys: Keys, script: str, *, adapted: bool) -> None:
    out = keys.out
    latents = keys.get("cache_latents_to_disk" if keys.value("cache_latents_to_disk") else "cache_latents")
    on_disk = keys.get("cache_text_encoder_outputs_to_disk")
    text_cached = on_disk if on_disk.value else keys.get("cache_text_encoder_outputs")
    only, encoder = keys.get("network_train_unet_only"), keys.get("train_text_encoder")
    if keys.value("network_train_text_encoder_only"):
        out.lack("network_train_text_encoder_only is not modelled: the denoiser is counted as trained")
    trains = not only.value and not text_cached.value if adapted else bool(encoder.value) or script == "train_db.py"
    if trains and script.startswith(("sd3", "lumina", "anima", "hunyuan")):
        out.lack("adapters on text encoders are not counted for this family (network_train_unet_only is not given)")
        trains = False
    if trains:
        out.take(our.TRAIN_TEXT_ENCODER, True, only if adapted else encoder, "text encoders are trained too")
    else:
        out.note(only if adapted else encoder, "text encoders are not trained")
    once = None if trains else bool(text_cached.value)
    denoisers.inputs(out, latents, text_cached, latents_cached=bool(latents.value), text_cached=once)
    if keys.value("no_half_vae"):
        out.take(our.VAE_DTYPE, "fp32", keys.get("no_half_vae"))
    elif not latents.value and out.setup[our.PRECISION] != "fp32":
        kind = str(out.setup[our.PRECISION]).removeprefix("mixed-")
        out.take(our.VAE_DTYPE, kind, Given("no_half_vae", False, False, True), "the autoencoder in the weights' dtype")
    keys.get("learning_rate_te1")
