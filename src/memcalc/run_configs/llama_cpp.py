"""`llama-server` lines. Source: llama.cpp of 2026 (tools/server/README.md, docs/multi-gpu.md)."""

from __future__ import annotations

import os
import re

from memcalc.run_configs import option_names as our
from memcalc.run_configs.context import Context
from memcalc.run_configs.keys import Key, Keys, anything, flag, harmless, table, text, whole
from memcalc.run_configs.mapping import Given

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
        "n_gpu_layers", text, "auto", "", "layers on the GPU: as many as fit", "0 in old builds", ("ngl", "gpu_layers")
    ),
    Key("fit", text, "on", "", "shrinks what is unset to leave 1024 MiB"),
    Key("cache_type_k", text, "f16", our.KV_DTYPE, "dtype of the keys", other=("ctk",)),
    Key("cache_type_v", text, "f16", our.KV_DTYPE, "dtype of the values", other=("ctv",)),
    Key("batch_size", whole, 2048, "", "tokens handed in at once", other=("b",)),
    Key("ubatch_size", whole, 512, our.PREFILL_CHUNK, "tokens of a forward pass", other=("ub",)),
    Key("swa_full", flag, False, "", "a whole cache for sliding-window layers"),
    Key("flash_attn", text, "auto", our.ATTENTION, "flash attention", other=("fa",)),
    Key("split_mode", text, "layer", "", "how several GPUs share", other=("sm",)),
    Key("tensor_split", anything, None, "", "shares of the GPUs", other=("ts",)),
    Key("main_gpu", whole, 0, "", "the GPU of the rest", other=("mg",)),
    Key("device", text, None, "", "GPUs that are used", other=("dev",)),
    Key("cpu_moe", flag, False, "", "experts on the host", other=("cmoe",)),
    Key("n_cpu_moe", whole, 0, "", "layers whose experts are on the host", other=("ncmoe",)),
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

_TYPES = {
    "f32": "fp32",
    "bf16": "bf16",
    "f16": "fp16",
    "q8_0": "int8",
    "q4_0": "int4",
    "q4_1": "int4",
    "iq4_nl": "int4",
    "q5_0": "int8",
    "q5_1": "int8",
}
_WIDTH = ("int4", "int8", "fp16", "bf16", "fp32")


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
    out.take(our.PREFILL_CHUNK, chunk.value, chunk)
    flash = keys.get("flash_attn")
    if str(flash.value).lower() in ("off", "0", "false"):
        out.take(our.ATTENTION, "eager", flash)
    else:
        out.take(our.ATTENTION, "flash", flash, "bare flag of builds to mid 2025" if flash.raw is True else "")
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
    out, k, v = keys.out, keys.get("cache_type_k"), keys.get("cache_type_v")
    kinds = [_TYPES.get(str(given.value).lower()) for given in (k, v)]
    if None in kinds:
        out.lack(f"cache type {k.shown} or {v.shown} is not modelled: taken as f16")
        kinds = [kind or "fp16" for kind in kinds]
    widest = max((str(kind) for kind in kinds), key=_WIDTH.index)
    if kinds[0] != kinds[1]:
        out.lack(f"keys in {k.shown} and values in {v.shown}: one type for both is modelled, the wider is taken")
    out.take(our.KV_DTYPE, widest, k if str(kinds[0]) == widest else v)
    out.note(v)
    for given in (k, v):
        if str(given.value).lower() in ("q5_0", "q5_1"):
            out.lack(f"{given.shown} is taken as q8_0, an upper bound")


def _elsewhere(keys: Keys) -> None:
    out, layers = keys.out, keys.get("n_gpu_layers")
    word = str(layers.value).lower()
    out.note(layers)
    if re.fullmatch(r"\d+", word) and int(word) < 99:
        out.lack(f"-ngl {word}: a part of the layers on the GPU is not modelled, the estimate is of all of them")
    for name, words in (
        ("mmproj", "the projector file is not read: its tower is not in the estimate"),
        ("model_draft", "a draft model is not modelled: the estimate is without it"),
        ("cpu_moe", "experts on the host are not modelled: the estimate is of all on the GPU"),
        ("n_cpu_moe", "experts on the host are not modelled: the estimate is of all on the GPU"),
        ("override_tensor", "tensors on the host are not modelled: the estimate is of all on the GPU"),
        ("no_kv_offload", "a cache on the host is not modelled: the estimate has it on the GPU"),
        ("swa_full", "--swa-full is not modelled: sliding-window layers have a short cache"),
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
