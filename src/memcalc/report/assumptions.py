"""Everything that the user did not say and the estimate took for granted, a line each."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from memcalc.common.assumption import Assumption
from memcalc.common.image_sides import ImageSides
from memcalc.models.registry import family
from memcalc.models.spec import ModelSpec
from memcalc.report.host_memory import in_host_memory
from memcalc.report.unused_options import idle
from memcalc.setup.setup import InferenceSetup, TrainingSetup
from memcalc.training.input_sizes import with_frames
from memcalc.training.traced_step import Step

_DEFAULTS = {
    "batch": "micro-batch size",
    "precision": "precision",
    "optimizer": "optimizer",
    "optimizer_impl": "optimizer implementation",
    "attention": "attention",
}
"""Fields of a setup whose defaults are worth a word."""

_SIZES = (
    "hidden_size",
    "d_model",
    "num_hidden_layers",
    "num_layers",
    "encoder_layers",
    "decoder_layers",
    "num_attention_heads",
    "num_heads",
    "encoder_attention_heads",
    "decoder_attention_heads",
    "intermediate_size",
    "d_ff",
    "encoder_ffn_dim",
    "decoder_ffn_dim",
    "ffn_dim",
    "moe_intermediate_size",
    "vocab_size",
    "num_experts",
    "num_local_experts",
    "n_routed_experts",
)
"""Keys of a config that decide how large the model is."""


def assumed(spec: ModelSpec, setup: TrainingSetup | InferenceSetup, step: Step) -> Iterator[Assumption]:
    """Lines for the defaults that were taken and for what the answer rests on."""
    explicit = setup.model_fields_set
    yield from left_out(spec)
    yield from _lengths(setup, step)
    yield from images(setup, step)
    used = step.resolved()
    taken = [f"{words} {used[name]}" for name, words in _DEFAULTS.items() if name in used and name not in explicit]
    if taken:
        yield Assumption("option_defaults", f"defaults: {', '.join(taken)}")
    by_transformers = isinstance(setup, TrainingSetup) or setup.engine.startswith("transformers")
    if "attention" in explicit and used["attention"] != setup.attention and by_transformers:  # other engines say so
        yield Assumption(
            "attention_not_available",
            f"--attention {setup.attention} is not used: Transformers has {family(spec.model_type).attention} for "
            f"{spec.model_type}, so {used['attention']} is counted",
        )
    if step.network.input_kind != "latents":
        yield from _padding(setup, step)
    if isinstance(setup, TrainingSetup) or setup.engine == "transformers":
        yield from dict.fromkeys(module.assumption for module in step.network.all_modules if module.assumption)
    if step.training and any(allocation.name == "KV cache" for allocation in step.tape.allocations):
        yield Assumption(
            "cache_in_training",
            "Transformers fills this model's KV cache in training too (use_cache); full checkpointing turns it off",
        )
    yield from idle(spec, setup, step)
    yield from step.notes
    yield from in_host_memory(step)
    limit = spec.positions
    if limit is not None and step.seq_len > limit:
        yield Assumption(
            "positions_exceeded",
            f"{step.seq_len} tokens exceed the {limit} positions that it was made for (max_position_embeddings)",
        )


def left_out(spec: ModelSpec) -> Iterator[Assumption]:
    """The sizes that the config does not give, which Transformers takes from the defaults of the model's class."""
    text = spec.config.get("text_config")
    if isinstance(text, Mapping) and spec.positions and not {"max_position_embeddings", "n_positions"} & text.keys():
        yield Assumption(
            "text_positions",
            f"text_config leaves out how long a text may be: {spec.positions:,} tokens, the default of its class "
            "(max_position_embeddings)",
        )
    row = family(spec.model_type)
    given = {row.aliases.get(key, key) for key in spec.config}
    taken = [f"{key} {row.defaults[key]}" for key in _SIZES if key not in given and row.defaults.get(key) is not None]
    if taken:
        yield Assumption(
            "config_defaults", f"the config leaves out what its class has a default for: {', '.join(taken)}"
        )


def _lengths(setup: TrainingSetup | InferenceSetup, step: Step) -> Iterator[Assumption]:
    """The lengths of text that nobody named."""
    reads = step.network.reads_text and step.network.source_is_text
    if reads and setup.seq_len is None:
        many = isinstance(setup, TrainingSetup) and setup.lengths is not None
        why = "the longest batch of the run; --lengths" if many else "default; --seq-len"
        yield Assumption("sequence_length", f"sequence length {step.seq_len} ({why})")
    if step.network.length_unit:
        yield Assumption(
            "sequence_length_unit", f"--seq-len counts {step.network.length_unit}, where this report says tokens"
        )
    if step.target_len is not None and setup.target_len is None and (reads or setup.seq_len is None):
        why = "that of the source" if reads else "default"
        why = "the longest that the model writes" if step.network.longest_target else why
        yield Assumption("target_length", f"target length {step.target_len} ({why}; --target-len)")


def _padding(setup: TrainingSetup | InferenceSetup, step: Step) -> Iterator[Assumption]:
    """Whether sequences are padded, and in training, which of a data set's lengths decides."""
    training = isinstance(setup, TrainingSetup) and step.network.reads_text
    if isinstance(setup, TrainingSetup) and setup.packing:
        yield Assumption("packing", "rows are packed full: each has --seq-len tokens, whatever the samples' lengths")
    elif not setup.padding_mask:
        longest = ": the longest sample of a run decides its peak" if training else ""
        yield Assumption("no_padding", f"no sequence is padded (--padding-mask){longest}")
    elif training:
        yield Assumption(
            "padding",
            "sequences are padded to the longest of their micro-batch: the longest sample of a run decides its peak",
        )


def images(setup: TrainingSetup | InferenceSetup, step: Step) -> Iterator[Assumption]:
    """What stands for images among the tokens, where the user did not say all of it."""
    frames = setup.num_frames
    setup = with_frames(step.network, setup)
    picture = setup.image
    side = step.network.image_side(picture)
    if side is None or not setup.images_per_sequence:
        return
    asked = isinstance(picture, ImageSides)
    if frames is None and not asked and {"images_per_sequence", "image_size"} <= setup.model_fields_set:
        return
    size = f"{picture.width} x {picture.height}" if isinstance(picture, ImageSides) else f"{side} x {side}"
    if not step.network.reads_text:
        yield Assumption("image_size", f"images of {size} pixels (--image-size)")
        return
    tokens = step.network.image_tokens(setup.images_per_sequence, picture)
    several = "an image" if setup.images_per_sequence == 1 else f"{setup.images_per_sequence} images"
    if frames is not None:
        several = f"{frames} frames, read as {several}"
    took = f"{tokens} token{'' if tokens == 1 else 's'}"
    yield Assumption(
        "images", f"{several} of {size} pixels in each sequence: {took} (--images-per-sequence, --image-size)"
    )
