"""`llama-server` lines. Source: llama.cpp of 2026 (tools/server/README.md, docs/multi-gpu.md)."""

from __future__ import annotations

import os
import re

from memcalc.run_configs import option_names as our
from memcalc.run_configs.context import Context
from memcalc.run_configs.keys import Key, Keys, anything, flag, harmless, table, text, whole
from memcalc.run_configs.mapping import Given
from memcalc.tables.engines import GGML_TYPES

KEYS = table(
    Key("model", text, None, "model", "the GGUF file", other=("m",)),
    Key("hf_repo", text, None, "model", "a repository of the Hub, :QUANT (Q4_K_M when absent)", other=("hf", "hfr")),
    Key("hf_file", text, None, "model", "a file of that repository", other=("hff",)),
    Key("mmproj", text, None, "", "projector and vision tower, on the GPU", other=("mm",)),
    Key(
        "ctx_size", whole, 0, our.SEQ_LEN, "tokens of all slots together; 0: the model's", "4096 in old builds", ("c",)
    ),
    Key(
        "parallel", whole, None, our.BATCH, "slots: 4 over one shared cache; a number splits the context", other=("np",)
    ),
    Key("kv_unified", flag, False, our.BATCH, "one cache for all slots", other=("kvu",)),
    Key(
        "n_gpu_layers",
        text,
        "auto",
        our.GPU_LAYERS,
        "layers on the GPU: as many as fit",
        "0 in old builds",
        ("ngl", "gpu_layers"),
    ),
    Key("fit", text, "on", "", "shrinks what is unset to leave 1024 MiB"),
    Key("cache_type_k", text, "f16", our.CACHE_TYPE_K, "dtype of the keys", other=("ctk",)),
    Key("cache_type_v", text, "f16", our.CACHE_TYPE_V, "dtype of the values", other=("ctv",)),
    Key("batch_size", whole, 2048, "", "tokens handed in at once", other=("b",)),
    Key("ubatch_size", whole, 512, our.UBATCH, "tokens of a forward pass", other=("ub",)),
    Key("swa_full", flag, False, our.SWA_FULL, "a whole cache for sliding-window layers"),
    Key("flash_attn", text, "auto", our.FLASH_ATTN, "flash attention", other=("fa",)),
    Key("split_mode", text, "layer", "", "how several GPUs share", other=("sm",)),
    Key("tensor_split", anything, None, "", "shares of the GPUs", other=("ts",)),
    Key("main_gpu", whole, 0, "", "the GPU of the rest", other=("mg",)),
    Key("device", text, None, "", "GPUs that are used", other=("dev",)),
    Key("cpu_moe", flag, False, our.CPU_MOE, "experts on the host", other=("cmoe",)),
    Key("n_cpu_moe", whole, 0, our.CPU_MOE, "layers whose experts are on the host", other=("ncmoe",)),
    Key("override_tensor", anything, None, "", "tensors on the host", other=("ot",)),
    Key("no_kv_offload", flag, False, "", "the cache on the host", other=("nkvo",)),
    Key("model_draft", text, None, "", "a draft model", other=("md",)),
    Key("ctx_size_draft", whole, 0, "", "its context", other=("cd",)),
    Key("gpu_layers_draft", text, "auto", "", "its layers on the GPU", other=("ngld", "n_gpu_layers_draft")),
    Key("device_draft", text, None, "", "its GPUs", other=("devd",)),
    Key("lora", text, None, "", "an adapter"),
    Key("embeddings", flag, False, "", "embeddings alone", other=("embedding",)),
)
HARMLESS = harmless(
    "host port metrics slots jinja draft_max draft_min draft_p_min draft samplers temp temperature repeat_penalty "
    "dry_multiplier min_p top_k top_p t threads threads_batch tb a alias api_key verbose v log_file mlock no_mmap "
    "reasoning_format reasoning_budget chat_template chat_template_file cache_reuse timeout no_webui webui seed s n "
    "predict n_predict keep rope_scaling rope_freq_base rope_freq_scale yarn_orig_ctx yarn_ext_factor numa prio poll "
    "cont_batching cb no_cont_batching warmup no_warmup props path ssl_key_file ssl_cert_file pooling spm_infill "
    "presence_penalty frequency_penalty typical ignore_eos no_context_shift context_shift special chat_template_kwargs "
    "hf_token hft offline no_perf fit_target fitt fit_ctx fitc lookup_cache_static grammar json_schema id_slot "
    "slot_save_path slot_prompt_similarity sps swa_checkpoints cache_ram cram direct_io",
    r"(log|yarn|dry|mirostat|xtc|cpu|rope|spec|draft|chat|reasoning|image|no|tools|models|ssl|fit|cache_ram|ctx_checkpoints|dynatemp|repeat|top|sleep|webui|media)_\w+",
)

_EVERY_LAYER = 1 << 20


def read(context: Context) -> None:
    """What llama-server is asked to serve."""
    out = context.out
    out.mode = "inference"
    keys = Keys(KEYS, context.values, context.where, out, HARMLESS)
    file, repository = keys.value("model"), keys.value("hf_repo")
    out.model = file or (repository.split(":")[0] if repository else None)
    if out.model is None:
        out.ask("no model is named: give --model PATH, ID or COUNT")
    out.facts["file"] = os.path.basename(file) if file else keys.value("hf_file")
    if repository and not file:
        out.facts["weights"] = keys.value("hf_file") or repository.partition(":")[2] or "Q4_K_M"
    out.take(our.ENGINE, "llama.cpp", Given("engine", "llama.cpp", "llama.cpp", True))
    _context(keys)
    _cache(keys)
    chunk = keys.get("ubatch_size")
    out.take(our.UBATCH, chunk.value, chunk)
    flash = keys.get("flash_attn")
    off = str(flash.value).lower() in ("off", "0", "false")
    out.take(
        our.FLASH_ATTN, "off" if off else "on", flash, "bare flag of builds to mid 2025" if flash.raw is True else ""
    )
    _elsewhere(keys)
    keys.get("batch_size")
    keys.finish()


def _context(keys: Keys) -> None:
    out, size, slots = keys.out, keys.get("ctx_size"), keys.get("parallel")
    number = slots.value if slots.value and slots.value > 0 else None
    shared = number is None or keys.value("kv_unified")
    if number is None:
        out.note(slots, "4 slots over one shared cache")
    if size.value <= 0:
        out.ask("the context is the model's own (-c is not set): give --seq-len for a shorter one")
        out.note(size)
    elif shared:
        out.take(our.BATCH, 1, slots, "slots share one cache of all tokens")
        out.take(our.SEQ_LEN, size.value, size)
    else:
        out.take(our.BATCH, number, slots, "slots that split the context")
        out.take(our.SEQ_LEN, max(1, size.value // number), size, f"{size.value} tokens over {number} slots")
    fit = keys.get("fit")
    if str(fit.value).lower() == "on" and (size.default or keys.get("n_gpu_layers").default):
        out.assume(
            "-fit is on: what is unset (context, layers on the GPU) is shrunk to leave 1024 MiB, which needs the "
            "GPU to be known"
        )


def _cache(keys: Keys) -> None:
    for name, option in (("cache_type_k", our.CACHE_TYPE_K), ("cache_type_v", our.CACHE_TYPE_V)):
        given = keys.get(name)
        kind = str(given.value).lower()
        if kind in GGML_TYPES:
            keys.out.take(option, kind, given)
        else:
            keys.out.lack(f"cache type {given.shown} is not modelled: taken as f16")
            keys.out.take(option, "f16", given)
    given = keys.get("swa_full")
    if given.value:
        keys.out.take(our.SWA_FULL, True, given)


def _elsewhere(keys: Keys) -> None:
    out, layers = keys.out, keys.get("n_gpu_layers")
    word = str(layers.value).lower()
    if re.fullmatch(r"\d+", word):
        out.take(our.GPU_LAYERS, int(word), layers)
    else:
        out.note(layers)
    every, first = keys.get("cpu_moe"), keys.get("n_cpu_moe")
    if every.value:
        out.take(our.CPU_MOE, _EVERY_LAYER, every, "the experts of every layer")
        out.note(first)
    elif first.value:
        out.take(our.CPU_MOE, first.value, first)
    for name, words in (
        ("mmproj", "the projector file is not read: its tower is not in the estimate"),
        ("model_draft", "a draft model is not modelled: the estimate is without it"),
        ("override_tensor", "tensors on the host are not modelled: the estimate is of all on the GPU"),
        ("no_kv_offload", "a cache on the host is not modelled: the estimate has it on the GPU"),
        ("tensor_split", "several GPUs are not modelled for llama.cpp: the estimate is of one"),
        ("lora", "an adapter file is not read: it is not in the estimate"),
    ):
        given = keys.get(name)
        if given.value:
            out.note(given)
            out.lack(words)
    for name in ("split_mode", "main_gpu", "device", "ctx_size_draft", "gpu_layers_draft", "device_draft"):
        given = keys.get(name)
        if given.default:
            continue
        if name.endswith("draft") and not keys.value("model_draft"):
            out.drop(given, "there is no draft model")
        else:
            out.note(given)
