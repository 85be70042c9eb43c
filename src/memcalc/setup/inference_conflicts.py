"""Options of one engine given to another, and those that exclude each other, each told in one sentence."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from memcalc.errors import given_option
from memcalc.setup.inference_options import InferenceOptions

OPTIONS_OF: dict[str, tuple[str, ...]] = {
    "llama.cpp": ("ubatch_size", "cache_type_k", "cache_type_v", "swa_full", "flash_attn", "n_gpu_layers", "n_cpu_moe"),
    "vllm": ("max_num_batched_tokens", "max_num_seqs", "enforce_eager", "engine_version"),
}
"""Options that only one engine has."""


def inference_conflicts(setup: InferenceOptions) -> Iterator[str]:
    """What is wrong with the options of an inference job, each by itself being fine."""
    for engine, names in OPTIONS_OF.items():
        for name in names:
            if name in setup.model_fields_set and setup.engine != engine:
                typed = given_option(name, getattr(setup, name))
                yield (
                    f"{typed} belongs to --engine {engine}, but --engine is {setup.engine}; leave it out, or "
                    f"use --engine {engine}."
                )
    if setup.engine == "llama.cpp" and setup.quantization != "none":
        yield (
            f"llama.cpp has no {setup.quantization} weights, but types of GGUF files; give the .gguf as the model, "
            "or leave out --quantization."
        )
    if setup.engine == "llama.cpp" and setup.tensor_parallel_size > 1:
        yield "several GPUs under llama.cpp are not computed; leave out --tensor-parallel-size."
    yield from _several_gpus(setup)
    if setup.load_on is not None and not setup.engine.startswith("transformers"):
        yield f"--load-on is for Transformers, and --engine {setup.engine} loads in its own way; leave it out."
    if setup.kv_dtype != "auto" and (setup.cache_type_k or setup.cache_type_v):
        yield "--kv-dtype says what --cache-type-k and --cache-type-v say for keys and values apart; leave it out."
    if setup.ubatch_size is not None and setup.prefill_chunk_size is not None:
        yield "--prefill-chunk-size and --ubatch-size both say how many tokens llama.cpp takes at once; leave one out."
    if setup.cache_type_v not in (None, "f32", "f16", "bf16") and setup.flash_attn == "off":
        yield (
            f"llama.cpp quantizes the cache of values only with flash attention; leave out --flash-attn off, or "
            f"--cache-type-v {setup.cache_type_v}."
        )
    if setup.max_num_batched_tokens is not None and setup.prefill_chunk_size is not None:
        yield (
            "--prefill-chunk-size and --max-num-batched-tokens both say how many tokens vLLM takes at once; leave one "
            "of them out."
        )
    if setup.max_num_seqs is not None and setup.batch > setup.max_num_seqs:
        yield (
            f"--batch {setup.batch} is more than the {setup.max_num_seqs} sequences that --max-num-seqs lets vLLM run "
            "at once; raise it, or lower --batch."
        )


def _several_gpus(setup: InferenceOptions) -> Iterator[str]:
    """How a model is spread."""
    if setup.device_map is not None and not setup.engine.startswith("transformers"):
        yield (
            f"--device-map is Transformers' way to use several GPUs, and --engine {setup.engine} has its own; leave "
            "one of them out."
        )
    if setup.device_map is not None and setup.tensor_parallel_size > 1:
        yield (
            "--device-map spreads whole modules in one process, and --tensor-parallel-size divides each over several; "
            "use one of them."
        )
    if setup.device_map is not None and setup.load_on == "cpu":
        yield "--device-map loads each module where it will be, so --load-on cpu has no effect; leave one of them out."
    yield from _engine_axes(setup)
    copies = 1 if setup.enable_dp_attention else setup.data_parallel_size or 1
    total = setup.tensor_parallel_size * setup.pipeline_parallel_size * copies
    if setup.gpus is not None and setup.device_map is None and setup.gpus != total:
        how = "--device-map auto" if setup.engine.startswith("transformers") else "--tensor-parallel-size"
        yield (
            f"--gpus is {setup.gpus}, but the sizes of the axes multiply to {total}; say how the model is spread over "
            f"them, such as with {how}, or leave --gpus out."
        )


_AXES_OF = {
    "pipeline_parallel_size": ("vllm", "sglang"),
    "data_parallel_size": ("vllm", "sglang"),
    "expert_parallel_size": ("vllm", "sglang"),
    "enable_expert_parallel": ("vllm",),
    "enable_dp_attention": ("sglang",),
}
"""The engines that have an axis."""


def _engine_axes(setup: InferenceOptions) -> Iterator[str]:
    """An axis that an engine does not have, or that has no effect."""
    for name, engines in _AXES_OF.items():
        value = getattr(setup, name)
        if (value is True or (value or 0) > 1) and setup.engine not in engines:
            yield (
                f"--engine {setup.engine} has no {_option(name)} as memcalc knows it; leave it out, or use --engine "
                f"{' or '.join(engines)}."
            )
    if setup.enable_dp_attention and (setup.data_parallel_size or 1) == 1:
        yield "--enable-dp-attention divides GPUs into --data-parallel-size groups, but that is 1; raise it."
    if setup.ranks == "all" and setup.pipeline_parallel_size == 1 and setup.device_map is None:
        yield "--ranks all lists the stages of a pipeline, and there is one; add --pipeline-parallel-size."


def engine_of(given: Iterable[str]) -> str | None:
    """The engine that the options which only one engine has mean, where nobody named one; None where they do not."""
    meant = {engine for engine, names in OPTIONS_OF.items() if not set(names).isdisjoint(given)}
    return meant.pop() if len(meant) == 1 else None


def _option(name: str) -> str:
    return f"--{name.replace('_', '-')}"
