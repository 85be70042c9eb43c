"""Options that say what a model is given: those of a denoiser are refused for other models, and the other way round."""

from __future__ import annotations

from typing import TypeVar, cast

from memcalc.errors import UsageError, given_option, option_name
from memcalc.nn.model import Network
from memcalc.setup.sentences import NO_VIDEO
from memcalc.setup.setup import InferenceSetup, TrainingSetup

_SIZES = ("resolution", "height", "width", "num_frames", "condition_images", "max_sequence_length")
"""Options that say what a denoiser is given."""

_OF_SCRIPTS = {
    "cache_latents": True,
    "cache_text_embeddings": True,
    "controlnet": False,
    "textual_inversion": False,
    "train_text_encoder": False,
    "use_ema": False,
    "vae_dtype": None,
}
"""Options of diffusers' scripts, with the values at which they say nothing."""

_OF_TEXT = ("seq_len", "target_len", "images_per_sequence", "image_size", "padding_mask")
"""Options of models that read text, of which a denoiser has none."""

_OF_LANGUAGE_MODELS = {"packing": False, "keep_logits": False, "pad_to_multiple_of": 1, "attention": "sdpa"}
"""Options of a language model's training, with the values at which they say nothing to a denoiser's."""


AnySetup = TypeVar("AnySetup", bound=TrainingSetup | InferenceSetup)


def with_frames(network: Network, setup: AnySetup) -> AnySetup:
    """`setup` with the images that a language model makes of a video, which `--num-frames` gives to each sequence.

    Qwen-VL and GLM-V read two frames as one image (`temporal_patch_size`; an odd last one is repeated), InternVL and
    SmolVLM each as one; every image attends to itself alone. Limits of pixels are a frame's, or in Qwen3-VL and GLM-V
    those of all frames. Source: video_processing_*.py and get_video_features of Transformers 5.24.
    """
    per = network.frames_per_image
    if setup.num_frames is None or per is None or not setup.images_per_sequence:
        return setup
    images = -(-setup.num_frames // per)
    update: dict[str, int | None] = {"images_per_sequence": setup.images_per_sequence * images, "num_frames": None}
    if network.limits_whole_videos:
        frames = images * per
        least, most = setup.image_min_pixels, setup.image_max_pixels
        update["image_min_pixels"] = None if least is None else -(-least // frames)
        update["image_max_pixels"] = None if most is None else max(1, most // frames)
    return cast("AnySetup", setup.model_copy(update=update))


def check_sizes(network: Network, setup: TrainingSetup | InferenceSetup) -> None:
    """Raise UsageError for sizes of another kind of model than `network` is."""
    denoises = network.input_kind == "latents"
    for name in _OF_TEXT if denoises else _SIZES:
        if name in setup.model_fields_set and getattr(setup, name):
            if name == "num_frames" and network.reads_text and network.image_side(None) is not None:
                raise UsageError(NO_VIDEO)
            raise UsageError(
                f"{option_name(name)} is for models that read text, but this one is a denoiser; use --resolution, "
                "--height and --width, --num-frames, --max-sequence-length."
                if denoises
                else f"{option_name(name)} is for denoisers of a diffusion pipeline, which this model is not; leave it "
                "out."
            )
    for name, silent in _OF_SCRIPTS.items():
        value = getattr(setup, name, silent)
        if not denoises and value != silent:
            raise UsageError(
                f"{given_option(name, value)} is for denoisers of a diffusion pipeline, which this model is not; "
                "leave it out."
            )
    if getattr(setup, "use_ema", False) and getattr(setup, "lora_rank", None) is not None:
        raise UsageError("--use-ema averages the weights of a whole denoiser; with --lora-rank leave it out.")
    trainer = getattr(setup, "trainer", None)
    if trainer == "diffusers" and not denoises:
        raise UsageError("--trainer diffusers trains denoisers, which this model is not; use plain, hf or trl.")
    if denoises and trainer in ("hf", "trl"):
        raise UsageError(f"--trainer {trainer} trains no denoisers; use diffusers or plain, or leave it out.")
    if denoises and isinstance(setup, TrainingSetup):
        _check_denoiser_training(setup)


def _check_denoiser_training(setup: TrainingSetup) -> None:
    """Raise UsageError for options that a denoiser's training step has no use for."""
    for name, silent in _OF_LANGUAGE_MODELS.items():
        if getattr(setup, name) != silent:
            own = ", whose attention is sdpa" if name == "attention" else ""
            raise UsageError(
                f"{option_name(name)} is for training language models, but this one is a denoiser{own}; leave it out."
            )
    if setup.vae_dtype is not None and setup.cache_latents:
        raise UsageError(
            "--vae-dtype changes nothing where latents are cached; add --no-cache-latents, or leave it out."
        )
