"""SimpleTuner's config.json. Source: bghira/SimpleTuner bc8e6ab, documentation/OPTIONS.md and helpers/configuration."""

from __future__ import annotations

import math
from typing import Any

from memcalc.errors import ConfigError
from memcalc.run_configs import denoisers, training
from memcalc.run_configs import option_names as our
from memcalc.run_configs.context import Context
from memcalc.run_configs.keys import Key, Keys, count, flag, harmless, number, table, text, whole
from memcalc.run_configs.mapping import Given
from memcalc.run_configs.sharding import Sharding

KEYS = table(
    Key("pretrained_model_name_or_path", text, None, "model", "the model; the family's own when absent"),
    Key("model_family", text, None, "model", "the family"),
    Key("model_flavour", text, None, "model", "which of the family"),
    Key("model_type", text, "lora", our.LORA_RANK, "lora or full"),
    Key("lora_type", text, "standard", our.LORA_RANK, "standard or lycoris"),
    Key("lora_rank", count, 16, our.LORA_RANK, "rank of the adapters"),
    Key("lora_dropout", number, 0.0, our.LORA_DROPOUT, "dropout in front of the adapters"),
    Key("use_dora", flag, False, our.DORA, "weight-decomposed LoRA"),
    Key("flux_lora_target", text, None, our.LORA_TARGETS, "what gets adapters"),
    Key("base_model_precision", text, "no_change", our.QUANTIZATION, "format of the frozen base"),
    Key("mixed_precision", text, "bf16", our.PRECISION, "autocast"),
    Key("train_batch_size", count, 4, our.BATCH, "pictures per GPU and forward pass"),
    Key("gradient_accumulation_steps", count, 1, our.GRAD_ACCUM, "micro-batches a step"),
    Key("resolution", number, 1024, our.RESOLUTION, "pixels of a side, or megapixels"),
    Key("resolution_type", text, "pixel_area", our.RESOLUTION, "how resolution counts"),
    Key("gradient_checkpointing", flag, False, our.CHECKPOINTING, "recompute blocks in backward"),
    Key("gradient_checkpointing_interval", whole, 0, our.CHECKPOINT_EVERY, "every n-th block alone"),
    Key("optimizer", text, None, our.OPTIMIZER, "optimizer"),
    Key("max_grad_norm", number, 2.0, our.MAX_GRAD_NORM, "norm that gradients are clipped to"),
    Key("use_ema", flag, False, our.USE_EMA, "averaged weights beside"),
    Key("ema_device", text, "accelerator", our.USE_EMA, "where averaged weights are"),
    Key("controlnet", flag, False, our.CONTROLNET, "a ControlNet is trained"),
    Key("vae_cache_ondemand", flag, False, our.CACHE_LATENTS, "latents are made while training"),
    Key("vae_cache_disable", flag, False, our.CACHE_LATENTS, "latents are not kept"),
    Key("musubi_blocks_to_swap", whole, 0, "", "blocks whose weights wait on the host"),
    Key("enable_group_offload", flag, False, "", "groups of layers wait on the host"),
    Key("ramtorch", flag, False, "", "weights wait on the host"),
    Key("tokenizer_max_length", count, None, our.TEXT_LENGTH, "tokens of text"),
)
HARMLESS = harmless(
    "seed output_dir data_backend_config learning_rate lora_alpha num_train_epochs max_train_steps report_to "
    "quantize_via num_eval_images push_to_hub hub_model_id resume_from_checkpoint flow_schedule_shift "
    "fuse_qkv_projections caption_dropout_probability disable_benchmark compress_disk_cache vae_batch_size "
    "write_batch_size aspect_bucket_rounding minimum_image_size skip_file_discovery strict_epoch_limit "
    "grad_clip_method checkpoints_total_limit allow_tf32 quantize_activations base_model_default_dtype "
    "attention_mechanism init_lora lycoris_config vae_dtype vae_tiling delete_unwanted_images user_prompt_library "
    "keep_vae_loaded offload_during_startup webhook_config noise_offset pretrained_vae_model_name_or_path "
    "text_encoder_1_precision text_encoder_2_precision text_encoder_3_precision text_encoder_4_precision "
    "ignore_final_epochs snr_gamma use_soft_min_snr prediction_type inference_scheduler_timestep_spacing",
    r"(_|validation|tracker|hub|push|checkpoint|flow|flux|lr|ema|wandb|eval|disable|delete|preserve|data|dataloader|text"
    r"|metadata|caption|adam|prodigy|optimizer|tread|webhook|publishing|modelspec|compress|override|skip|log)_?\w*",
)
_FORMATS = {
    "int8_quanto": ("int8-like", "fp8"),
    "fp8_quanto": ("", "fp8"),
    "fp8uz_quanto": ("", "fp8"),
    "int8_torchao": ("", "fp8"),
    "fp8_torchao": ("", "fp8"),
    "int4_quanto": ("", "nf4"),
    "int4_torchao": ("", "nf4"),
    "nf4_bnb": ("", "nf4"),
}
_MODELS = {
    "flux": "black-forest-labs/FLUX.1-dev",
    "sdxl": "stabilityai/stable-diffusion-xl-base-1.0",
    "sd3": "stabilityai/stable-diffusion-3.5-large",
    "qwen_image": "Qwen/Qwen-Image",
    "pixart_sigma": "PixArt-alpha/PixArt-Sigma-XL-2-1024-MS",
    "z_image": "Tongyi-MAI/Z-Image-Turbo",
}
"""The model of a family where neither a name nor a flavour is given."""


def is_simple_tuner(values: dict[str, Any]) -> bool:
    """Whether a mapping is SimpleTuner's."""
    plain = _plain(values)
    own = {"model_family", "lora_type", "base_model_precision", "data_backend_config"}
    return "model_type" in plain and bool(own & plain.keys())


def _plain(values: dict[str, Any]) -> dict[str, Any]:
    """Keys without dashes in front; those of `config`, where a file has metadata beside."""
    inner = values.get("config")
    return {str(key).lstrip("-"): value for key, value in (inner if isinstance(inner, dict) else values).items()}


def read(context: Context) -> None:
    """A run of SimpleTuner. Raises ConfigError."""
    out = context.out
    keys = Keys(KEYS, _plain(context.values), context.where, out, HARMLESS)
    _model(keys)
    adapted = str(keys.value("model_type")).lower() != "full"
    mixed = str(keys.value("mixed_precision")).lower().replace("no", "")
    denoisers.precision(out, keys.get("mixed_precision"), mixed, pure="" if adapted else mixed)
    if adapted:
        _adapters(keys, mixed)
    elif not keys.get("base_model_precision").default:
        out.drop(keys.get("base_model_precision"), "model_type is full: nothing is frozen")
    accumulation = keys.take("gradient_accumulation_steps").value
    name = keys.get("optimizer")
    if name.value is None:
        out.ask("the optimizer is in none of the files: give --optimizer NAME")
    else:
        denoisers.optimizer(out, name, accumulation=accumulation)
    for key in ("max_grad_norm", "train_batch_size"):
        keys.take(key)
    every, on = keys.get("gradient_checkpointing_interval"), keys.get("gradient_checkpointing")
    training.checkpointing(out, on, bool(on.value), every=max(1, every.value))
    _size(keys)
    late = next((keys.get(key) for key in ("vae_cache_ondemand", "vae_cache_disable") if keys.value(key)), None)
    given = late or Given("latents", True, True, True)
    denoisers.inputs(
        out, given, Given("text embeddings", True, True, True), latents_cached=late is None, text_cached=True
    )
    if keys.value("use_ema") and keys.value("ema_device") != "cpu":
        keys.take("use_ema")
    if keys.value("controlnet"):
        keys.take("controlnet")
    if keys.has("tokenizer_max_length"):
        keys.take("tokenizer_max_length")
    denoisers.stays_on_host(keys, "musubi_blocks_to_swap", "enable_group_offload", "ramtorch")
    denoisers.loop(out, "SimpleTuner")
    keys.finish()
    context.finish(context.sharding or Sharding(world=context.world, world_from=context.world_from))


def _model(keys: Keys) -> None:
    name, family, flavour = (
        keys.get(key) for key in ("pretrained_model_name_or_path", "model_family", "model_flavour")
    )
    keys.out.model = name.value
    if name.value is None and not keys.has("model_flavour"):
        keys.out.model = _MODELS.get(str(family.value))
    if keys.out.model is None:
        keys.out.ask(f"model_family {family.shown} with flavour {flavour.shown}: give --model PATH or ID")


def _adapters(keys: Keys, mixed: str) -> None:
    out, kind, target = keys.out, keys.get("lora_type"), keys.get("flux_lora_target")
    if str(kind.value).lower() != "standard":
        out.lack(f"lora_type: {kind.shown} is taken as LoRA of its rank")
    targets = None if target.value in (None, "all", "mmdit") else denoisers.ATTENTION
    if target.value is not None and targets is not None:
        out.lack(f"flux_lora_target: {target.shown} is taken as attention's query, key, value and output")
    if target.value is None:
        targets = denoisers.ATTENTION
    denoisers.adapters(out, keys.get("lora_rank"), targets, mixed if mixed == "bf16" else "", keys.get("lora_dropout"))
    if keys.value("use_dora"):
        keys.take("use_dora")
    base = keys.get("base_model_precision")
    spelled = str(base.value).lower().replace("-", "_")
    if spelled not in ("no_change", "bf16", "fp16"):
        name = _FORMATS.get(spelled, ("", ""))[1]
        denoisers.base_format(out, base, name, "" if spelled == "nf4_bnb" else "quanto or torchao")
    else:
        out.note(base)


def _size(keys: Keys) -> None:
    given, kind = keys.get("resolution"), keys.get("resolution_type")
    side = given.value
    if side <= 0:
        raise ConfigError(f"resolution needs pixels or megapixels, not {given.shown}: correct it.")
    if str(kind.value) == "area" or side < 16:
        side = math.sqrt(side) * 1024
        keys.out.assume(f"resolution {given.shown} is megapixels: a side of {round(side / 64) * 64} pixels")
        side = round(side / 64) * 64
    keys.out.take(our.RESOLUTION, int(side), given)
    keys.out.note(kind)
