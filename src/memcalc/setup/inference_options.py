"""Options of prefill and decoding."""

from typing import Literal

from memcalc.setup.options import option
from memcalc.setup.shared_options import PositiveInt, SharedOptions


class InferenceOptions(SharedOptions):
    """The options of `--mode inference`."""

    dtype: Literal["fp32", "bf16", "fp16"] | None = option(
        "Precision", None, "Dtype that weights are loaded in.", unset="the one that the config declares, else bf16"
    )
    engine: Literal["transformers", "transformers-static", "vllm", "sglang", "tgi", "llama.cpp"] = option(
        "Serving", "transformers", "Inference engine: how it keeps its caches and what it reserves."
    )
    kv_dtype: Literal["auto", "fp32", "bf16", "fp16", "fp8", "int8", "int4"] = option(
        "Serving", "auto", "Dtype of the KV cache; auto is the dtype that the model computes in."
    )
    max_new_tokens: PositiveInt = option("Serving", 1, "Tokens generated after the prompt; decode is the last of them.")
    num_beams: PositiveInt = option("Serving", 1, "Beams of beam search: every sequence is decoded that many times.")
    prefill_logits: Literal["last", "all"] = option(
        "Serving", "last", "Tokens of the prompt whose logits prefill computes."
    )
    prefill_chunk_size: PositiveInt | None = option(
        "Serving", None, "Tokens per forward pass of prefill.", unset="the whole prompt, or what the engine batches"
    )
    gpu_memory_utilization: float | None = option(
        "Serving", None, "Share of the GPU that a serving engine fills.", unset="the engine's", gt=0, le=1
    )
    num_images_per_prompt: PositiveInt = option(
        "Diffusion", 1, "Pictures of every prompt, all denoised and decoded at once."
    )
    guidance_scale: float | None = option(
        "Diffusion",
        None,
        "Scale of classifier-free guidance; at most 1 switches it off.",
        unset="the pipeline's own, which guides",
        ge=0,
    )
    cpu_offload: str | None = option(
        "Parallel",
        None,
        "What waits in host memory. Of a pipeline: model (one component at a time), sequential (one layer at a time), "
        "group or group-leaf (blocks or layers of diffusers' models). In training: optimizer, parameters, or both.",
        unset="nothing",
    )
    vae_tiling: bool = option("Diffusion", False, "Decode in tiles (vae.enable_tiling).")
    vae_slicing: bool = option("Diffusion", False, "Decode one picture at a time (vae.enable_slicing).")
    vae_dtype: Literal["fp32", "bf16", "fp16"] | None = option(
        "Diffusion", None, "Dtype of the autoencoder.", unset="--dtype, or the one that it is stored in"
    )
    components_to_quantize: str | None = option(
        "Diffusion",
        None,
        "Components that --quantization is for, by name and with commas, such as transformer,text_encoder_2.",
        unset="the denoiser",
    )
    tensor_parallel_size: PositiveInt = option(
        "Parallel", 1, "GPUs that share every layer; the report is for one of them."
    )
