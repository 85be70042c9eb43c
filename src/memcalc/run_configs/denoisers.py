"""What trainers of diffusion models share: a fact of theirs becomes options of ours, in one place."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from memcalc.errors import ConfigError
from memcalc.run_configs import option_names as our
from memcalc.run_configs import training
from memcalc.run_configs.keys import Keys, WrongTypeError, count
from memcalc.run_configs.mapping import Given, Mapping

ATTENTION = ("to_q", "to_k", "to_v", "to_out.0")
ALL_IN_BLOCKS = (
    r".*(?:blocks|layers|refiner)\.\d+\.(?:.*\.)?(?:to_[qkv]|to_out|to_out\.0|add_[qkv]_proj|to_add_out|to_qkv_mlp_proj"
    r"|linear|linear_[123]|proj|proj_mlp|proj_out|net\.2|w[123]|(?:img|txt)_mod\.1|adaLN_modulation\.0)"
)
"""The linear layers of all blocks of a transformer, as one pattern."""
UNET_TRANSFORMERS = (*ATTENTION, "ff.net.0.proj", "ff.net.2", "proj_in", "proj_out")
"""The linear layers of a UNet's transformer blocks, which sd-scripts and others adapt."""

_OPTIMIZERS = {
    "adamw": "adamw",
    "adam": "adam",
    "adamw8bit": "adamw_8bit",
    "adam8bit": "adamw_8bit",
    "bnbadamw8bit": "adamw_8bit",
    "pagedadamw": "paged_adamw",
    "pagedadamw32bit": "paged_adamw_32bit",
    "pagedadamw8bit": "paged_adamw_8bit",
    "lion": "lion_pytorch",
    "lion8bit": "lion_8bit",
    "bnblion8bit": "lion_8bit",
    "pagedlion8bit": "paged_lion_8bit",
    "sgd": "sgd",
    "adafactor": "adafactor",
    "prodigy": "prodigy",
    "prodigyopt": "prodigy",
    "ademamix": "ademamix",
    "ademamix8bit": "ademamix_8bit",
    "bnbademamix": "ademamix",
    "bnbademamix8bit": "ademamix_8bit",
    "adamwschedulefree": "schedule_free_adamw",
    "scheduelefreeadamw": "schedule_free_adamw",
    "schedulefreeadamw": "schedule_free_adamw",
    "radamschedulefree": "schedule_free_radam",
    "sgdschedulefree": "schedule_free_sgd",
    "schedulefreesgd": "schedule_free_sgd",
    "came": "came_pytorch",
    "muon": "muon",
    "rmsprop": "rmsprop",
    "adagrad": "adagrad",
    "adamwbf16": "adamw_anyprecision",
    "optimiadamw": "optimi_adamw",
    "optimistableadamw": "stable_adamw",
    "aoadamw8bit": "ao_adamw_8bit",
    "aoadamw4bit": "ao_adamw_4bit",
    "aoadamwfp8": "ao_adamw_fp8",
}
"""Spellings without dashes, and the one that the table of optimizers has."""


def optimizer(out: Mapping, given: Given, *, accumulation: int = 1) -> None:
    """The optimizer that a key spells, in the spellings of these trainers. Raises ConfigError for an unknown one."""
    plain = re.sub(r"[-_]", "", str(given.value).split(".")[-1].lower())
    found = _OPTIMIZERS.get(plain)
    if found is None:
        raise ConfigError(
            f"{given.key}: {given.shown} is no optimizer that memcalc knows: put another in its place after --, "
            f"such as --{given.key} adamw8bit."
        )
    training.optimizer(out, Given(given.key, given.raw, found, given.default, given.meaning), accumulation=accumulation)


def size(out: Mapping, given: Given) -> None:
    """A resolution: a number, `width,height`, or several, of which the largest counts. Raises ConfigError."""
    values = (
        given.value if isinstance(given.value, (list, tuple)) else re.split(r"\s*[,x]\s*", str(given.value).strip())
    )
    try:
        numbers = [count(value) for value in values if str(value).strip()]
    except WrongTypeError as problem:
        raise ConfigError(f"{given.key} needs pixels, such as 1024, not {given.shown} ({problem}).") from None
    if not numbers:
        out.ask(f"{given.key} names no size: give --resolution N")
    elif len(numbers) == 2 and isinstance(given.value, str) and numbers[0] != numbers[1]:
        out.take(our.WIDTH, numbers[0], given, "width of pictures")
        out.take(our.HEIGHT, numbers[1], given, "height of pictures")
    else:
        out.take(our.RESOLUTION, max(numbers), given, "the largest" if len(set(numbers)) > 1 else given.meaning)


def precision(out: Mapping, given: Given, mixed: str, *, pure: str = "") -> None:
    """Weights under autocast in `mixed` ("" for fp32 throughout); `pure`: the 16 bits that trained weights are in."""
    if mixed not in ("bf16", "fp16", ""):
        raise ConfigError(f"{given.key}: {given.shown} is no precision of training: use bf16, fp16 or no.")
    if not mixed:
        out.take(our.PRECISION, "fp32", given, "fp32 throughout")
    elif pure:
        out.take(our.PRECISION, pure, given, f"{pure} weights under {mixed} autocast")
        out.take(our.AUTOCAST, mixed, given, f"{mixed} autocast")
    else:
        out.take(our.PRECISION, f"mixed-{mixed}", given, f"{mixed} autocast; a frozen base is in {mixed} itself")


def adapters(out: Mapping, rank: Given, targets: Sequence[str] | str | None, dtype: str, dropout: Given) -> None:
    """LoRA on the denoiser: modules by name or a pattern, None for those of diffusers' scripts."""
    out.take(our.LORA_RANK, rank.value, rank)
    if targets is not None:
        text = targets if isinstance(targets, str) else ",".join(targets)
        out.take(our.LORA_TARGETS, text, Given("adapted modules", text, text, True), "what the trainer adapts")
    if dtype:
        out.take(our.LORA_DTYPE, dtype, Given("adapter dtype", dtype, dtype, True))
    if dropout.value:
        out.take(our.LORA_DROPOUT, float(dropout.value), dropout)
    else:
        out.note(dropout, "no dropout in front of the adapters")


def base_format(out: Mapping, given: Given, name: str, library: str = "") -> None:
    """The frozen base in 8 or 4 bits: `name` is one of ours, "" for none of them."""
    if not name:
        out.lack(f"{given.key}: {given.shown} is not modelled: the base is counted in 16 bits, which is more")
        return
    out.take(our.QUANTIZATION, name, given, f"base in {name}, made wide layer by layer")
    if library:
        out.assume(f"{given.key}: {given.shown} ({library}) is taken to take the bytes of {name}")


def inputs(out: Mapping, latents: Given, text: Given, *, latents_cached: bool, text_cached: bool | None) -> None:
    """Whether latents and text embeddings are cached, or made on the GPU in every step.

    `text_cached` None: encoders are trained, and which of the others are run follows from the model.
    """
    out.take(our.CACHE_LATENTS, latents_cached, latents, "cached" if latents_cached else "made in every step")
    if text_cached is None:
        out.note(text, "text encoders are trained")
    else:
        out.take(our.CACHE_TEXT, text_cached, text, "cached" if text_cached else "made in every step")


def loop(out: Mapping, trainer: str) -> None:
    """The loop: that of diffusers' scripts, which others resemble."""
    out.take(our.TRAINER, "diffusers", Given("training loop", trainer, "diffusers", True), "diffusers' scripts")
    if trainer != "diffusers":
        out.assume(f"the loop of {trainer} is taken to keep what that of diffusers' scripts keeps")


def stays_on_host(keys: Keys, *names: str) -> None:
    """Options that keep weights off the GPU for part of the time: told, as they are not counted."""
    for name in names:
        given = keys.get(name)
        if given.value and given.value not in (0, "0", "none"):
            keys.out.lack(
                f"{given.key}: {given.shown} is not modelled: all weights are counted on the GPU, which is more"
            )


def flattened(values: dict[str, Any]) -> dict[str, Any]:
    """The keys of sections of a TOML file side by side: sd-scripts does not look at their names."""
    found: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, dict):
            found.update(flattened(value))
        else:
            found[key] = value
    return found
