"""Options that were given and change nothing for the model at hand: a line each, so that none is taken in silence."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from memcalc.common.assumption import Assumption
from memcalc.config.quantization import find_quantization
from memcalc.models.registry import family
from memcalc.setup.setup import TrainingSetup

if TYPE_CHECKING:
    from memcalc.models.spec import ModelSpec
    from memcalc.setup.setup import InferenceSetup
    from memcalc.training.traced_step import Step


def idle(spec: ModelSpec, setup: TrainingSetup | InferenceSetup, step: Step) -> Iterator[Assumption]:
    """Lines for the options of `setup` that the model has no use for."""
    given = setup.model_fields_set
    blind = step.network.reads_text and not {"vision_config", "audio_config"} & spec.config.keys()
    if not step.network.reads_text and step.network.input_kind != "latents":
        reads = step.network.input_kind
        text = f"the model takes {reads} only, one for each of --batch: --seq-len changes nothing"
        yield Assumption("seq_len_unused", text)
        if "images_per_sequence" in given:
            yield Assumption(
                "images_per_sequence_unused",
                f"--images-per-sequence counts images of a sequence, and this model takes {reads} only: --batch "
                "says how many",
            )
        if setup.image_size is not None and not step.network.resizable_input:
            yield Assumption(
                "image_size_unused",
                "--image-size changes nothing: the model has a position for every patch of the config's image size",
            )
    if blind:
        why = "reads one image of the config's size" if step.network.image_of_config else "reads no images"
        yield from (
            Assumption("image_options_unused", f"--{name.replace('_', '-')} changes nothing: {spec.model_type} {why}")
            for name in ("images_per_sequence", "image_size")
            if name in given and getattr(setup, name) is not None
        )
    if not step.network.source_is_text and setup.seq_len is not None:
        if not step.training:
            yield Assumption(
                "seq_len_unused",
                "--seq-len changes nothing: the source is no text, and generation begins with one token",
            )
        elif setup.target_len is not None:
            yield Assumption(
                "seq_len_unused",
                "--seq-len changes nothing: the source is no text, and --target-len says how long the target is",
            )
    if (
        isinstance(setup, TrainingSetup)
        and setup.keep_logits
        and setup.loss_implementation in ("cut-cross-entropy", "liger")
    ):
        yield Assumption(
            "keep_logits_unused",
            f"--keep-logits changes nothing: --loss-implementation {setup.loss_implementation} makes no logits that "
            "a loop could hold",
        )
    if "prepare_kbit_training" in given and setup.quantization == "none" and find_quantization(spec.config) is None:
        yield Assumption(
            "prepare_kbit_training_unused",
            "--prepare-kbit-training and --no-prepare-kbit-training change nothing: the model is not quantized",
        )
    if isinstance(setup, TrainingSetup) and setup.zero_allgather_bucket_size is not None:
        yield Assumption(
            "zero_allgather_bucket_size_unused",
            "--zero-allgather-bucket-size changes nothing: DeepSpeed gathers weights into the buffers that they lie in",
        )
    if setup.target_len is not None:
        if not step.training:
            yield Assumption(
                "target_len_unused",
                "--target-len changes nothing: generation begins with one token of the target (--max-new-tokens)",
            )
        elif family(spec.model_type).blocks != "encoder-decoder":
            yield Assumption(
                "target_len_unused", f"--target-len changes nothing: {spec.model_type} is no encoder-decoder"
            )
