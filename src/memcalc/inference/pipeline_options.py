"""Options of diffusion pipelines and of language models: each is refused where the other is run."""

from __future__ import annotations

from memcalc.errors import UsageError, option_name
from memcalc.inference.component_offload import MOVED_BY_BLOCK
from memcalc.inference.pipeline_components import described, names
from memcalc.models.registry import autoencoders
from memcalc.models.spec import ModelSpec
from memcalc.setup.setup import InferenceSetup

OF_PIPELINES = (
    "resolution",
    "height",
    "width",
    "num_frames",
    "condition_images",
    "max_sequence_length",
    "num_images_per_prompt",
    "guidance_scale",
    "cpu_offload",
    "vae_tiling",
    "vae_slicing",
    "vae_dtype",
    "components_to_quantize",
)
"""Options that a language model has no use for."""

OF_TEXT_MODELS = {
    "engine": "transformers",
    "kv_dtype": "auto",
    "max_new_tokens": 1,
    "num_beams": 1,
    "prefill_logits": "last",
    "prefill_chunk_size": None,
    "gpu_memory_utilization": None,
    "tensor_parallel_size": 1,
    "gpus": None,
    "device_map": None,
    "max_memory": None,
    "quantize_moe_experts": "none",
    "load_on": None,
}
"""Options that say how a language model generates, with the values at which they say nothing."""


def refuse_pipeline_options(spec: ModelSpec, setup: InferenceSetup) -> None:
    """Raise UsageError for options of diffusion pipelines."""
    for name in OF_PIPELINES:
        value = getattr(setup, name)
        # True equals 1; and guidance of 1 is a choice too: it switches guidance off
        silent = value is not True and name != "guidance_scale" and value in (None, False, 1, "none")
        silent = silent and not (name == "condition_images" and value)
        if name in setup.model_fields_set and value is not None and not silent:
            if name == "num_frames" and "vision_config" in spec.config:
                continue  # the model says whether it reads videos
            raise UsageError(f"{option_name(name)} is for diffusion pipelines, which this model is not; leave it out.")


def check_pipeline(spec: ModelSpec, setup: InferenceSetup) -> None:
    """Raise UsageError for options that say nothing about a pipeline, or that do not go together."""
    for name, silent in OF_TEXT_MODELS.items():
        if getattr(setup, name) != silent:
            raise UsageError(
                f"{option_name(name)} says how a language model generates, but {spec.model_type} is part of a "
                "diffusion pipeline; leave it out."
            )
    if not any(part.model_type in autoencoders() for _, part in described(spec)):
        for name, silent in (("vae_tiling", False), ("vae_slicing", False), ("vae_dtype", None)):
            if getattr(setup, name) != silent:
                raise UsageError(
                    f"{option_name(name)} is for a pipeline's autoencoder, and memcalc counts none here; leave it out."
                )
    if setup.components_to_quantize is not None and setup.quantization == "none":
        raise UsageError("--components-to-quantize goes with --quantization, such as nf4; add it, or leave it out.")
    if setup.cpu_offload == "sequential" and setup.quantization != "none":
        raise UsageError(
            "--cpu-offload sequential moves single layers, which diffusers does not do with quantized ones; use model, "
            "or leave out --quantization."
        )
    unmoved = [part.model_type for _, part in described(spec) if part.model_type in autoencoders()]
    if setup.cpu_offload == "group" and not set(unmoved) <= set(MOVED_BY_BLOCK):
        raise UsageError(
            f"--cpu-offload group moves blocks, but diffusers cannot move those of {unmoved[0]}: its decode fails; "
            "use group-leaf or model."
        )
    if setup.components_to_quantize is not None:
        known = [name for name, _ in described(spec)]
        for name in names(setup.components_to_quantize):
            if name not in known:
                raise UsageError(
                    f"--components-to-quantize names {name!r}, which this pipeline does not have; it has "
                    f"{', '.join(known)}."
                )
