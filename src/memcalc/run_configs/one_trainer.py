"""OneTrainer's JSON. Source: Nerogar/OneTrainer 23df383, modules/util/config/TrainConfig.py."""

from __future__ import annotations

from typing import Any

from memcalc.run_configs import denoisers, training
from memcalc.run_configs import option_names as our
from memcalc.run_configs.context import Context
from memcalc.run_configs.keys import Key, Keys, anything, count, flag, harmless, number, table, text
from memcalc.run_configs.mapping import Given
from memcalc.run_configs.sharding import Sharding

KEYS = table(
    Key("base_model_name", text, None, "model", "the model"),
    Key("model_type", text, "STABLE_DIFFUSION_15", "", "the family"),
    Key("training_method", text, "FINE_TUNE", our.LORA_RANK, "LORA, FINE_TUNE or EMBEDDING"),
    Key("lora_rank", count, 16, our.LORA_RANK, "rank of the adapters"),
    Key("lora_weight_dtype", text, "FLOAT_32", our.LORA_DTYPE, "dtype of the adapters"),
    Key("lora_decompose", flag, False, our.DORA, "weight-decomposed LoRA"),
    Key("peft_type", text, "LORA", our.LORA_RANK, "kind of adapter"),
    Key("dropout_probability", number, 0.0, our.LORA_DROPOUT, "dropout of the adapters"),
    Key("layer_filter", text, "", our.LORA_TARGETS, "parts of names of the modules that are trained"),
    Key("batch_size", count, 1, our.BATCH, "pictures per GPU and forward pass"),
    Key("gradient_accumulation_steps", count, 1, our.GRAD_ACCUM, "micro-batches a step"),
    Key("resolution", text, "512", our.RESOLUTION, "pixels of a side"),
    Key("frames", text, "25", our.NUM_FRAMES, "frames of a video"),
    Key("optimizer", anything, "ADAMW", our.OPTIMIZER, "optimizer"),
    Key("gradient_checkpointing", anything, True, our.CHECKPOINTING, "ON, OFF or CPU_OFFLOADED"),
    Key("train_dtype", text, "FLOAT_16", our.AUTOCAST, "autocast"),
    Key("weight_dtype", text, "FLOAT_32", our.PRECISION, "dtype of all weights"),
    Key("transformer", anything, None, our.PRECISION, "the denoiser's dtype"),
    Key("unet", anything, None, our.PRECISION, "the denoiser's dtype"),
    Key("prior", anything, None, our.PRECISION, "the denoiser's dtype"),
    Key("text_encoder", anything, None, our.TRAIN_TEXT_ENCODER, "whether it is trained"),
    Key("text_encoder_2", anything, None, our.TRAIN_TEXT_ENCODER, "whether it is trained"),
    Key("vae", anything, None, our.VAE_DTYPE, "the autoencoder's dtype"),
    Key("latent_caching", flag, True, our.CACHE_LATENTS, "latents and text embeddings are made once"),
    Key("ema", text, "OFF", our.USE_EMA, "averaged weights: OFF, GPU or CPU"),
    Key("clip_grad_norm", number, 1.0, our.MAX_GRAD_NORM, "norm that gradients are clipped to"),
    Key("layer_offload_fraction", number, 0.0, "", "part of the layers whose weights wait on the host"),
    Key("compile", flag, False, "", "torch.compile"),
    Key("text_encoder_sequence_length", count, None, our.TEXT_LENGTH, "tokens of text"),
    Key("text_encoder_2_sequence_length", count, None, our.TEXT_LENGTH, "tokens of text"),
)
HARMLESS = harmless(
    "output_model_destination output_model_format output_dtype learning_rate epochs workspace_dir cache_dir "
    "debug_mode debug_dir tensorboard validation concept_file_name concepts samples sample_definition_file_name "
    "dataloader_threads train_device temp_device only_cache loss_weight_fn loss_weight_strength loss_scaler "
    "learning_rate_scaler masked_training timestep_distribution dynamic_timestep_shifting timestep_shift "
    "aspect_ratio_bucketing attention_mechanism lora_alpha lora_model_name lora_decompose_norm_epsilon "
    "layer_filter_preset layer_filter_regex fallback_train_dtype async_offloading enable_autocast_cache ema_decay "
    "ema_update_step_interval embedding additional_embeddings embedding_learning_rate "
    "bundle_additional_embeddings preserve_embedding_norm text_encoder_3 text_encoder_4 effnet_encoder decoder "
    "quantization decoder_text_encoder decoder_vqgan rolling_backup rolling_backup_count backup_before_save "
    "secrets cloud multi_gpu text_encoder_layer_skip text_encoder_2_layer_skip train_any_embedding "
    "enable_activation_offloading device_indexes clear_cache_before_training force_circular_padding "
    "vb_loss_strength continue_last_backup include_train_config",
    r"(__|tensorboard|validat|learning_rate|backup|save|sample|mse|mae|log_cosh|huber|offset_noise|perturbation|force|min_"
    r"|max_|noising|rescale|unmasked|normalize|masked|custom|generalized|non_ema|samples|dataloader|optimizer_defaults"
    r"|scheduler|gradient_reduce|fused_gradient|async|offline|huggingface|prevent|stop|text_encoder_[234]_).*",
)
_WIDE = {"FLOAT_32": "fp32", "TFLOAT_32": "fp32", "FLOAT_16": "fp16", "BFLOAT_16": "bf16", "NONE": ""}
_FORMATS = {
    "FLOAT_8": "fp8",
    "INT_8": "int8",
    "NFLOAT_4": "nf4",
    "FLOAT_W8A8": "fp8",
    "INT_W8A8": "fp8",
    "FLOAT_W8A8_COMPRESSED": "fp8",
    "INT_W8A8_COMPRESSED": "fp8",
}


def is_one_trainer(values: dict[str, Any]) -> bool:
    """Whether a mapping is OneTrainer's."""
    own = {"base_model_name", "training_method", "train_dtype", "model_type", "output_model_destination"}
    return len(own & values.keys()) > 2


def read(context: Context) -> None:
    """A run of OneTrainer. Raises ConfigError."""
    out = context.out
    keys = Keys(KEYS, context.values, context.where, out, HARMLESS)
    out.model = keys.value("base_model_name")
    keys.get("model_type")
    method = keys.get("training_method")
    adapted = str(method.value).upper() == "LORA"
    if str(method.value).upper() == "EMBEDDING":
        out.take(our.TEXTUAL_INVERSION, True, method, "a token is trained")
    elif not adapted:
        out.note(method, "all weights are trained")
    _precision(keys, adapted=adapted)
    if adapted:
        _adapters(keys)
    accumulation = keys.take("gradient_accumulation_steps").value
    given = keys.get("optimizer")
    name = given.value.get("optimizer", "ADAMW") if isinstance(given.value, dict) else given.value
    denoisers.optimizer(out, Given(given.key, name, name, given.default, given.meaning), accumulation=accumulation)
    if isinstance(given.value, dict) and given.value.get("fused_back_pass"):
        out.take(our.OPTIMIZER_IN_BACKWARD, True, Given("optimizer.fused_back_pass", True, True))
    for key in ("clip_grad_norm", "batch_size"):
        keys.take(key)
    _checkpointing(keys)
    sides = keys.get("resolution")
    several = [part.strip() for part in str(sides.value).split(",")]
    denoisers.size(out, Given(sides.key, sides.raw, several, sides.default, sides.meaning) if several[1:] else sides)
    if "VIDEO" in str(keys.value("model_type")).upper():
        out.take(our.NUM_FRAMES, int(keys.value("frames")), keys.get("frames"))
    _inputs(keys, adapted=adapted)
    denoisers.stays_on_host(keys, "layer_offload_fraction")
    if keys.value("compile"):
        out.lack("compile is not modelled: counted without torch.compile")
    denoisers.loop(out, "OneTrainer")
    keys.finish()
    context.finish(context.sharding or Sharding(world=context.world, world_from=context.world_from))


def _precision(keys: Keys, *, adapted: bool) -> None:
    out, dtype = keys.out, keys.get("train_dtype")
    mixed = _WIDE.get(str(dtype.value).upper(), "").replace("fp32", "")
    part = next((keys.get(name) for name in ("transformer", "unet", "prior") if keys.has(name)), None)
    own = part.value.get("weight_dtype") if part is not None and isinstance(part.value, dict) else None
    kind = str(own or keys.value("weight_dtype")).upper()
    weights = Given(f"{part.key if part else 'weight'}.weight_dtype", kind, kind, own is None)
    if kind in _FORMATS and adapted:
        denoisers.precision(out, dtype, mixed)
        denoisers.base_format(out, weights, _FORMATS[kind], "" if kind == "NFLOAT_4" else "OneTrainer")
        return
    if kind in _FORMATS or kind.startswith("GGUF"):
        out.lack(f"{weights.key}: {kind} is not modelled here: counted in {mixed or 'fp32'}")
    narrow = _WIDE.get(kind, mixed).replace("fp32", "")
    denoisers.precision(out, dtype, mixed, pure="" if adapted else narrow)
    out.note(weights, "dtype of the weights")
    for name in ("transformer", "unet", "prior"):
        keys.get(name)


def _adapters(keys: Keys) -> None:
    out, kind, text_of = keys.out, keys.get("peft_type"), keys.get("layer_filter")
    if str(kind.value).upper() not in ("LORA", "DORA"):
        out.lack(f"peft_type: {kind.shown} is taken as LoRA of its rank")
    parts = [part.strip() for part in str(text_of.value).split(",") if part.strip()]
    if parts:
        out.note(text_of, "layers whose names hold these: linear layers of all blocks are counted")
    unet = "transformer" not in keys.values
    targets: Any = denoisers.UNET_TRANSFORMERS if unet else denoisers.ALL_IN_BLOCKS
    dtype = _WIDE.get(str(keys.value("lora_weight_dtype")).upper(), "fp32") or "fp32"
    denoisers.adapters(out, keys.get("lora_rank"), targets, dtype, keys.get("dropout_probability"))
    if keys.value("lora_decompose"):
        keys.take("lora_decompose")


def _checkpointing(keys: Keys) -> None:
    given = keys.get("gradient_checkpointing")
    word = str(given.value).upper()
    training.checkpointing(keys.out, given, word not in ("OFF", "FALSE"))
    if word == "CPU_OFFLOADED":
        keys.out.take(our.ACTIVATION_OFFLOADING, True, given, "inputs of blocks go to the host")


def _inputs(keys: Keys, *, adapted: bool) -> None:
    out, cached = keys.out, keys.get("latent_caching")
    encoders = [keys.get(name) for name in ("text_encoder", "text_encoder_2")]
    trained = [one for one in encoders if isinstance(one.value, dict) and one.value.get("train")]
    denoisers.inputs(
        out, cached, cached, latents_cached=bool(cached.value), text_cached=None if trained else bool(cached.value)
    )
    if trained:
        out.take(our.TRAIN_TEXT_ENCODER, True, trained[0])
    vae = keys.get("vae")
    own = vae.value.get("weight_dtype") if isinstance(vae.value, dict) else None
    if own is not None and not cached.value and _WIDE.get(str(own).upper()):
        out.take(our.VAE_DTYPE, _WIDE[str(own).upper()], vae)
    ema = keys.get("ema")
    if str(ema.value).upper() == "GPU" and not adapted:
        out.take(our.USE_EMA, True, ema)
    else:
        out.note(ema)
    for name in ("text_encoder_sequence_length", "text_encoder_2_sequence_length"):
        given = keys.get(name)
        if given.value is not None:
            out.take(our.TEXT_LENGTH, given.value, given)
