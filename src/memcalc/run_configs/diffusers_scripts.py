"""Command lines of diffusers' training scripts: train_dreambooth_lora_flux.py and its like.

Source: examples/{dreambooth,text_to_image,controlnet,cogvideo,instruct_pix2pix,textual_inversion} of diffusers, commit
58eb52c, whose defaults these are.
"""

from __future__ import annotations

import re

from memcalc.run_configs import denoisers, training
from memcalc.run_configs import option_names as our
from memcalc.run_configs.context import Context
from memcalc.run_configs.keys import Key, Keys, count, flag, harmless, names, number, table, text
from memcalc.run_configs.mapping import Given
from memcalc.run_configs.sharding import Sharding

SCRIPT = re.compile(
    r"train_(?:dreambooth|text_to_image|controlnet|t2i_adapter|cogvideox|instruct_pix2pix)\w*\.py|textual_inversion(?:_sdxl)?\.py"
)

KEYS = table(
    Key("pretrained_model_name_or_path", text, None, "model", "the model"),
    Key("rank", count, 4, our.LORA_RANK, "rank of the adapters"),
    Key("lora_layers", names, None, our.LORA_TARGETS, "what gets adapters; the script's own list when absent"),
    Key("lora_dropout", number, 0.0, our.LORA_DROPOUT, "dropout in front of the adapters"),
    Key("train_batch_size", count, 4, our.BATCH, "pictures per GPU and forward pass"),
    Key("gradient_accumulation_steps", count, 1, our.GRAD_ACCUM, "micro-batches a step"),
    Key("resolution", count, None, our.RESOLUTION, "pixels of a side"),
    Key("height", count, None, our.HEIGHT, "height of a video"),
    Key("width", count, None, our.WIDTH, "width of a video"),
    Key("max_num_frames", count, None, our.NUM_FRAMES, "frames of a video"),
    Key("mixed_precision", text, "no", our.PRECISION, "autocast"),
    Key("gradient_checkpointing", flag, False, our.CHECKPOINTING, "recompute blocks in backward"),
    Key("use_8bit_adam", flag, False, our.OPTIMIZER, "bitsandbytes' AdamW"),
    Key("use_adafactor", flag, False, our.OPTIMIZER, "Transformers' Adafactor"),
    Key("optimizer", text, "adamw", our.OPTIMIZER, "optimizer"),
    Key("max_grad_norm", number, 1.0, our.MAX_GRAD_NORM, "norm that gradients are clipped to"),
    Key("cache_latents", flag, False, our.CACHE_LATENTS, "latents are made once"),
    Key("train_text_encoder", flag, False, our.TRAIN_TEXT_ENCODER, "text encoders are trained too"),
    Key("with_prior_preservation", flag, False, our.BATCH, "as many pictures of the class in each batch"),
    Key("caption_column", text, None, our.CACHE_TEXT, "a prompt for each picture"),
    Key("pre_compute_text_embeddings", flag, False, our.CACHE_TEXT, "the text encoder goes before training"),
    Key("num_double_layers", count, 4, "", "double blocks of FLUX's ControlNet"),
    Key("num_single_layers", count, 4, "", "single blocks of FLUX's ControlNet"),
    Key("max_sequence_length", count, None, our.TEXT_LENGTH, "tokens of text"),
    Key("use_ema", flag, False, our.USE_EMA, "averaged weights beside"),
    Key("use_dora", flag, False, our.DORA, "weight-decomposed LoRA"),
    Key("bnb_quantization_config_path", text, None, our.QUANTIZATION, "a file with the base's quantization"),
    Key("do_fp8_training", flag, False, "", "torchao's float8 layers"),
    Key("enable_xformers_memory_efficient_attention", flag, False, our.ATTENTION, "xformers' attention"),
    Key("validation_prompt", text, None, "", "pictures are made now and then, with a pipeline beside"),
    Key("offload", flag, False, "", "VAE and text encoders go to the host after use"),
)
HARMLESS = harmless(
    "revision variant dataset_name dataset_config_name instance_data_dir cache_dir image_column repeats "
    "class_data_dir instance_prompt class_prompt num_validation_images validation_epochs validation_steps "
    "lora_alpha prior_loss_weight num_class_images output_dir seed center_crop random_flip sample_batch_size "
    "num_train_epochs max_train_steps checkpointing_steps checkpoints_total_limit resume_from_checkpoint "
    "learning_rate guidance_scale text_encoder_lr scale_lr lr_scheduler lr_warmup_steps lr_num_cycles lr_power "
    "dataloader_num_workers weighting_scheme logit_mean logit_std mode_scale push_to_hub hub_token hub_model_id "
    "logging_dir allow_tf32 report_to upcast_before_saving prior_generation_precision local_rank "
    "precondition_outputs snr_gamma noise_offset prediction_type train_data_dir max_train_samples "
    "image_interpolation_mode enable_npu_flash_attention aspect_ratio_buckets remote_text_encoder "
    "fsdp_text_encoder fps id_token instance_data_root video_column skip_final_inference tracker_name "
    "tracker_project_name non_ema_revision foreach_ema offload_ema timestep_bias_strategy "
    "controlnet_model_name_or_path conditioning_image conditioning_image_column proportion_empty_prompts "
    "placeholder_token initializer_token learnable_property num_vectors save_steps "
    "pretrained_vae_model_name_or_path set_grads_to_none do_edm_style_training system_prompt caption_dropout "
    "complex_human_instruction cond_image_column conditioning_dropout_prob crops_coords_top_left_h "
    "crops_coords_top_left_w dataset_preprocess_batch_size debug_loss edit_prompt_column edited_image_column "
    "final_validation_prompt jsonl_for_train nccl_timeout no_safe_serialization noised_image_dropout "
    "num_validation_videos offset_noise original_image_column output_kohya_format save_as_full_pipeline "
    "save_weight_dtype skip_frames_end skip_frames_start skip_save_text_encoder text_encoder_use_attention_mask "
    "tokenizer_name use_dynamic_cfg vae_encode_mode val_image_url val_image_url_or_path video_reshape_mode",
    r"(adam|prodigy|validation|timestep|wandb|lr|hub)_\w+",
)

_RANKS = {"cogvideox": 128}
_SIZES = ((r"pix2pix", 256), (r"(dreambooth_lora|t2i_adapter|text_to_image|text_to_image_lora)_sdxl", 1024), ("", 512))
"""Pixels of a side by a part of the script's name; the first that fits."""
_BATCHES = ((r"text_to_image|pix2pix|textual_inversion", 16), ("", 4))
_TEXT = ((r"sd3|train_dreambooth_flux\.py", 77), ("hidream", 128), ("lumina2", 256), ("sana", 300), ("", 0))
"""Tokens of text; 0: the pipeline's own number, or no such option."""


def _default(rows: tuple[tuple[str, int], ...], script: str) -> int:
    return next(value for pattern, value in rows if re.search(pattern, script))


def read(context: Context) -> None:
    """A run of one of the scripts. Raises ConfigError."""
    out, script = context.out, context.command
    keys = Keys(KEYS, context.values, context.where, out, HARMLESS)
    out.model = keys.value("pretrained_model_name_or_path")
    lora = "lora" in script
    mixed = str(keys.value("mixed_precision")).lower().replace("no", "")
    denoisers.precision(out, keys.get("mixed_precision"), mixed)
    if lora:
        rank = keys.get("rank")
        if rank.default:
            own = next((value for name, value in _RANKS.items() if name in script), 4)
            rank = Given("rank", own, own, True, rank.meaning)
        denoisers.adapters(out, rank, keys.value("lora_layers"), "", keys.get("lora_dropout"))
        if keys.value("use_dora"):
            keys.take("use_dora")
    if "controlnet" in script:
        out.take(our.CONTROLNET, True, Given("script", script, script), "a ControlNet is trained")
    if script.startswith("textual_inversion"):
        out.take(our.TEXTUAL_INVERSION, True, Given("script", script, script), "a token is trained")
    eight = keys.get("use_8bit_adam")
    given = Given(eight.key, eight.raw, "adamw8bit") if eight.value else keys.get("optimizer")
    if keys.value("use_adafactor"):
        given = Given("use_adafactor", True, "adafactor")
    denoisers.optimizer(out, given, accumulation=keys.value("gradient_accumulation_steps"))
    keys.take("max_grad_norm")
    _pictures(keys, script)
    keys.take("gradient_accumulation_steps")
    training.checkpointing(out, keys.get("gradient_checkpointing"), bool(keys.value("gradient_checkpointing")))
    _inputs(keys, script)
    if keys.value("use_ema"):
        keys.take("use_ema")
    for name in ("num_double_layers", "num_single_layers"):
        if keys.value(name) != 4:
            out.lack(f"{name}: a ControlNet of four double and four single blocks is counted")
    if keys.has("bnb_quantization_config_path"):
        out.ask("bnb_quantization_config_path names a file that is not read: give --quantization, such as nf4")
    if keys.value("do_fp8_training"):
        out.lack("do_fp8_training is not modelled: counted in bf16")
    if keys.value("enable_xformers_memory_efficient_attention"):
        out.note(keys.get("enable_xformers_memory_efficient_attention"), "keeps what SDPA keeps")
    if keys.has("validation_prompt"):
        out.assume("validation_prompt: the pipeline that makes pictures now and then is not counted")
    keys.get("offload")
    denoisers.loop(out, "diffusers")
    keys.finish()
    context.finish(context.sharding or Sharding(world=context.world, world_from=context.world_from))


def _pictures(keys: Keys, script: str) -> None:
    out, batch, prior = keys.out, keys.get("train_batch_size"), keys.get("with_prior_preservation")
    default = _default(_BATCHES, script) if batch.default else batch.value
    out.take(our.BATCH, default * (2 if prior.value else 1), batch, "twice with prior preservation" * bool(prior.value))
    given = keys.get("resolution")
    side = given.value or _default(_SIZES, script)
    if "cogvideox" in script or keys.has("height"):
        for name in ("height", "width", "max_num_frames"):
            if keys.has(name):
                keys.take(name)
    else:
        out.take(our.RESOLUTION, side, given if given.value else Given("resolution", side, side, True, given.meaning))
    tokens = keys.get("max_sequence_length")
    if tokens.value is not None:
        keys.take("max_sequence_length")
    elif own := _default(_TEXT, script):
        out.take(our.TEXT_LENGTH, own, Given(tokens.key, own, own, True, tokens.meaning))


def _inputs(keys: Keys, script: str) -> None:
    out, latents, encoder = keys.out, keys.get("cache_latents"), keys.get("train_text_encoder")
    prompts = keys.get("caption_column")
    if script in ("train_dreambooth.py", "train_dreambooth_lora.py"):
        prompts = keys.get("pre_compute_text_embeddings")
        once = bool(prompts.value)
    else:
        once = ("dreambooth" in script and not keys.has("caption_column")) or "cogvideox" in script
    cached = None if encoder.value else once
    denoisers.inputs(out, latents, prompts, latents_cached=bool(latents.value), text_cached=cached)
    if encoder.value:
        keys.take("train_text_encoder")
