"""Options of prefill and decoding."""

from typing import Literal

from memcalc.setup.options import option
from memcalc.setup.shared_options import PositiveInt, SharedOptions

CacheType = Literal["f32", "f16", "bf16", "q8_0", "q5_1", "q5_0", "q4_1", "q4_0", "iq4_nl"]


class InferenceOptions(SharedOptions):
    """The options of `--mode inference`."""

    dtype: Literal["fp32", "bf16", "fp16"] | None = option(
        "Precision", None, "Dtype that weights are loaded in.", unset="the one that the config declares, else bf16"
    )
    load_on: Literal["cpu", "gpu"] | None = option(
        "Serving",
        None,
        "Where Transformers loads weights: on the GPU (device_map), or on the CPU, to be moved when they are complete.",
        unset="gpu",
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
    max_num_batched_tokens: PositiveInt | None = option(
        "vLLM",
        None,
        "Tokens of one pass in vLLM, which its profile run takes too.",
        unset="vLLM's default for the GPU: 8192 or 2048",
    )
    max_num_seqs: PositiveInt | None = option(
        "vLLM",
        None,
        "Sequences that vLLM runs at once; its profile run samples for as many.",
        unset="vLLM's default for the GPU: 1024 or 256",
    )
    enforce_eager: bool = option("vLLM", False, "vLLM captures no CUDA graphs.")
    engine_version: str | None = option(
        "vLLM", None, "Version of vLLM, such as 0.11.0, whose rules make the pool.", unset="the latest that is known"
    )
    ubatch_size: PositiveInt | None = option(
        "llama.cpp",
        None,
        "Tokens of llama.cpp's physical batch, for which it reserves its compute buffer.",
        unset="512",
    )
    cache_type_k: CacheType | None = option(
        "llama.cpp", None, "Type of llama.cpp's cache of keys.", unset="f16, or what --kv-dtype says"
    )
    cache_type_v: CacheType | None = option(
        "llama.cpp", None, "Type of llama.cpp's cache of values.", unset="f16, or what --kv-dtype says"
    )
    swa_full: bool = option(
        "llama.cpp",
        False,
        "llama.cpp keeps layers with a sliding window in full length, so that prompts can be reused.",
    )
    flash_attn: Literal["on", "off"] | None = option(
        "llama.cpp", None, "Flash attention of llama.cpp; without it, it holds the scores of a ubatch.", unset="on"
    )
    n_gpu_layers: int | None = option(
        "llama.cpp",
        None,
        "Layers that llama.cpp puts on the GPU, the output layer counted; the first stay on the host.",
        unset="all",
        ge=0,
        le=2**20,
    )
    n_cpu_moe: int | None = option(
        "llama.cpp",
        None,
        "Layers whose experts llama.cpp keeps on the host, from the first.",
        unset="0",
        ge=0,
        le=2**20,
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
    vae_tiling: bool = option("Diffusion components", False, "Decode in tiles (vae.enable_tiling).")
    vae_slicing: bool = option("Diffusion components", False, "Decode one picture at a time (vae.enable_slicing).")
    vae_dtype: Literal["fp32", "bf16", "fp16"] | None = option(
        "Diffusion components",
        None,
        "Dtype of the autoencoder.",
        unset="--dtype or the stored one; in training the script's",
    )
    components_to_quantize: str | None = option(
        "Diffusion components",
        None,
        "Components that --quantization is for, by name and with commas, such as transformer,text_encoder_2.",
        unset="the denoiser",
    )
    gpus: PositiveInt | None = option(
        "Parallel", None, "GPUs of the whole job.", unset="as many as the sizes of the axes multiply to"
    )
    tensor_parallel_size: PositiveInt = option(
        "Parallel", 1, "GPUs that share every layer; the report is for one of them."
    )
    pipeline_parallel_size: PositiveInt = option("Pipeline", 1, "Stages that the blocks are divided into.")
    data_parallel_size: PositiveInt | None = option(
        "Parallel",
        None,
        "Ranks with batches of their own; with sharding, the shards of one replica; of an engine, its copies.",
        unset="what --gpus leaves",
    )
    expert_parallel_size: PositiveInt = option("Parallel", 1, "GPUs that the experts of a layer are spread over.")
    enable_expert_parallel: bool = option(
        "Serving on several GPUs",
        False,
        "vLLM spreads whole experts over the GPUs of tensor and data parallel ranks, in place of dividing each.",
    )
    enable_dp_attention: bool = option(
        "Serving on several GPUs",
        False,
        "SGLang divides the GPUs of --tensor-parallel-size into --data-parallel-size groups, each with sequences and a "
        "cache of its own.",
    )
    ranks: Literal["most-loaded", "all"] = option(
        "Pipeline", "most-loaded", "Ranks of a pipeline that `ranks` lists: the first and the last, or all."
    )
    nccl_buffers: str | None = option(
        "GPU", None, "Size of NCCL's buffers outside the allocator, such as 1GiB.", unset="by communicators"
    )
