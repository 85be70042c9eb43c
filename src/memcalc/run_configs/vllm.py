"""`vllm serve` lines and vLLM's YAML.

Source: vLLM of 2026 (config/cache.py, config/scheduler.py), vllm-project/recipes.
"""

from __future__ import annotations

import re
from typing import Any

from memcalc.errors import ConfigError
from memcalc.run_configs import option_names as our
from memcalc.run_configs import training
from memcalc.run_configs.context import Context
from memcalc.run_configs.keys import Key, Keys, WrongTypeError, anything, flag, harmless, number, table, text, whole
from memcalc.run_configs.mapping import Given

_SUFFIXES = {"k": 1000, "m": 1000**2, "g": 1000**3, "K": 1024, "M": 1024**2, "G": 1024**3}


def _tokens(raw: Any) -> int:
    """A number of tokens; vLLM takes 32k, 1K, 1M."""
    if isinstance(raw, str) and re.fullmatch(r"\d{1,9}(\.\d{1,3})?[kmgKMG]", raw.strip()):
        return int(float(raw.strip()[:-1]) * _SUFFIXES[raw.strip()[-1]])
    value = whole(raw)
    if value < 1 and value != -1:
        raise WrongTypeError("a number of tokens")
    return value


KEYS = table(
    Key("model", text, None, "model", "the model", other=("model_tag",)),
    Key("dtype", text, "auto", our.DTYPE, "dtype that weights load in; the config's"),
    Key("max_model_len", _tokens, None, our.SEQ_LEN, "longest sequence; the config's when absent"),
    Key(
        "gpu_memory_utilization", number, 0.92, our.UTILIZATION, "share of the GPU that vLLM fills", "2026 (0.9 before)"
    ),
    Key(
        "max_num_seqs",
        whole,
        None,
        our.MAX_NUM_SEQS,
        "sequences at a time: 1024 on 70 GiB and more that is no A100, else 256",
    ),
    Key("max_num_batched_tokens", _tokens, None, our.BATCHED_TOKENS, "tokens of a forward pass: 8192 there, else 2048"),
    Key("kv_cache_dtype", text, "auto", our.KV_DTYPE, "dtype of the KV cache"),
    Key("tensor_parallel_size", whole, 1, our.TENSOR_PARALLEL, "GPUs that share every layer", other=("tp",)),
    Key("pipeline_parallel_size", whole, 1, our.PIPELINE_PARALLEL, "stages", other=("pp",)),
    Key("data_parallel_size", whole, 1, our.DATA_PARALLEL, "copies of the engine", other=("dp",)),
    Key(
        "enable_expert_parallel",
        flag,
        False,
        our.ENABLE_EXPERT_PARALLEL,
        "experts are spread, not split",
        other=("ep",),
    ),
    Key("quantization", text, None, our.QUANTIZATION, "when loading; the config's when absent", other=("q",)),
    Key("enforce_eager", flag, False, our.ENFORCE_EAGER, "no CUDA graphs"),
    Key("max_cudagraph_capture_size", whole, None, "", "largest batch with a graph"),
    Key("kv_cache_memory_bytes", anything, None, "", "a fixed size of the cache"),
    Key("cpu_offload_gb", number, 0.0, "", "weights in host memory"),
    Key("kv_offloading_size", number, None, "", "KV cache in host memory"),
    Key("block_size", whole, None, "", "tokens of a page"),
    Key("enable_lora", flag, False, "", "slots for adapters"),
    Key("speculative_config", anything, None, "", "a draft model"),
    Key("hf_overrides", anything, None, "", "other values of the model's config"),
)
HARMLESS = harmless(
    "config served_model_name trust_remote_code host port api_key tokenizer tokenizer_mode revision seed load_format "
    "download_dir chat_template tool_call_parser enable_auto_tool_choice reasoning_parser enable_reasoning ssl_keyfile "
    "ssl_certfile disable_log_requests no_enable_log_requests disable_log_stats swap_space "
    "distributed_executor_backend "
    "enable_prefix_caching no_enable_prefix_caching enable_chunked_prefill no_enable_chunked_prefill async_scheduling "
    "no_async_scheduling limit_mm_per_prompt mm_processor_kwargs uvicorn_log_level root_path generation_config "
    "override_generation_config max_loras max_lora_rank lora_modules max_cpu_loras worker_use_ray "
    "ray_workers_use_nsight "
    "guided_decoding_backend task runner convert skip_tokenizer_init mm_encoder_tp_mode mm_processor_cache_gb "
    "disable_mm_preprocessor_cache compilation_config kv_transfer_config additional_config cudagraph_capture_sizes "
    "enable_eplb eplb_config all2all_backend disable_custom_all_reduce max_parallel_loading_workers scheduling_policy "
    "structured_outputs_config tokenizer_revision code_revision config_format stream_interval O nnodes node_rank "
    "master_addr master_port headless language_model_only attention_backend enable_log_requests moe_backend",
    r"(no_enable|disable|enable|allow|tool|reasoning|log|uvicorn|ssl|otlp|mm|long_prefill|max_logprobs|data_parallel|spec|hf|default|logits|response|served|chat|media|attention|kernel|max_num_partial|max_long|api_server|middleware|return|io|pooler|profiler|override|calculate|mamba|decode_context|prefill_context|dcp|compilation|structured|numa|performance|model_loader|optimization|renderer|num_gpu|num_lookahead|disable_hybrid)_?\w*",
)

_KV = {
    "auto": "auto",
    "fp8": "fp8",
    "fp8_e4m3": "fp8",
    "fp8_e5m2": "fp8",
    "fp8_inc": "fp8",
    "fp8_ds_mla": "fp8",
    "bfloat16": "bf16",
    "float16": "fp16",
    "half": "fp16",
}
_STORED = {
    "fp8": "fp8",
    "mxfp4": "mxfp4",
    "gptq": "gptq-4",
    "gptq_marlin": "gptq-4",
    "awq": "awq-4",
    "awq_marlin": "awq-4",
    "bitsandbytes": "nf4",
}


def is_vllm(values: dict[str, Any]) -> bool:
    """Whether a mapping is a file for `vllm serve --config`."""
    marks = {"max_model_len", "kv_cache_dtype", "max_num_batched_tokens", "max_num_seqs", "gpu_memory_utilization"}
    dashed = {str(key).replace("-", "_") for key in values if "-" in str(key)}
    return bool(dashed & KEYS.keys()) or bool(marks & values.keys())


def read(context: Context) -> None:
    """What vLLM is asked to serve. Raises ConfigError."""
    out = context.out
    out.mode = "inference"
    values = {str(key).replace("-", "_"): value for key, value in context.values.items()}
    keys = Keys(KEYS, values, context.where, out, HARMLESS)
    out.model = keys.value("model")
    if out.model is None:
        out.ask("the model is on the command line of vllm serve: give --model PATH, ID or COUNT")
    out.take(our.ENGINE, "vllm", Given("engine", "vllm", "vllm", True))
    _memory(keys)
    _parallel(keys)
    sequences, eager = keys.get("max_num_seqs"), keys.get("enforce_eager")
    if sequences.value is None:
        out.note(sequences)
    else:
        out.take(our.MAX_NUM_SEQS, sequences.value, sequences)
    if eager.value:
        out.take(our.ENFORCE_EAGER, True, eager)
    for name in ("block_size", "max_cudagraph_capture_size"):
        given = keys.get(name)
        if not given.default:
            out.note(given)
    for name, words in (
        ("enable_lora", "slots for adapters are"),
        ("speculative_config", "a draft model is"),
        ("cpu_offload_gb", "cpu_offload_gb is"),
        ("kv_offloading_size", "kv_offloading_size is"),
        ("kv_cache_memory_bytes", "a cache of fixed size is"),
        ("hf_overrides", "hf_overrides are"),
    ):
        if keys.value(name):
            out.lack(f"{words} not modelled: the estimate is without it")
    keys.finish()


def _memory(keys: Keys) -> None:
    out, length, share = keys.out, keys.get("max_model_len"), keys.get("gpu_memory_utilization")
    if length.value is None or length.value < 0:
        out.ask("the longest sequence is the model's own (max_model_len is not set): give --seq-len for a shorter one")
    else:
        out.take(our.SEQ_LEN, length.value, length)
    if not 0 < share.value <= 1:
        raise ConfigError(f"gpu_memory_utilization in {keys.where} is {share.shown}: it is a share between 0 and 1.")
    out.take(our.UTILIZATION, share.value, share)
    chunk = keys.get("max_num_batched_tokens")
    if chunk.value is None:
        out.note(chunk)
    else:
        out.take(our.BATCHED_TOKENS, chunk.value, chunk)
    kv = keys.get("kv_cache_dtype")
    name = _KV.get(str(kv.value).lower())
    if name is None:
        out.lack(
            f"kv_cache_dtype: {kv.shown} is not modelled: taken as fp8"
            if "fp8" in str(kv.value)
            else f"kv_cache_dtype: {kv.shown} is not modelled: taken as auto"
        )
        name = "fp8" if "fp8" in str(kv.value) else "auto"
    out.take(our.KV_DTYPE, name, kv)
    dtype = keys.get("dtype")
    if training.dtype(dtype) != "auto":
        out.take(our.DTYPE, training.dtype(dtype), dtype)
    stored = keys.get("quantization")
    if stored.value is not None:
        ours = _STORED.get(str(stored.value).lower())
        if ours is None:
            out.lack(f"quantization: {stored.shown} is not modelled when loading: the checkpoint's own is taken")
        elif ours == "fp8":
            out.take(our.QUANTIZATION, "fp8", stored, "fp8 when loading, where the checkpoint is not stored so")
        else:
            out.note(stored, "as the checkpoint is stored")


def _parallel(keys: Keys) -> None:
    out = keys.out
    tensor, copies, stages = (
        keys.get("tensor_parallel_size"),
        keys.get("data_parallel_size"),
        keys.get("pipeline_parallel_size"),
    )
    out.take(our.TENSOR_PARALLEL, tensor.value, tensor)
    for given, option in ((stages, our.PIPELINE_PARALLEL), (copies, our.DATA_PARALLEL)):
        if given.value > 1:
            out.take(option, given.value, given)
    if keys.value("enable_expert_parallel"):
        size = tensor.value * copies.value
        out.take(our.ENABLE_EXPERT_PARALLEL, True, keys.get("enable_expert_parallel"), f"experts over {size} GPUs")
