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
    tensor_parallel_size: PositiveInt = option(
        "Parallel", 1, "GPUs that share every layer; the report is for one of them."
    )
