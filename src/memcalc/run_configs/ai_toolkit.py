"""ostris' ai-toolkit: its YAML of a job. Source: ostris/ai-toolkit 27a03a9, toolkit/config_modules.py."""

from __future__ import annotations

from typing import Any

from memcalc.errors import ConfigError
from memcalc.run_configs import denoisers, training
from memcalc.run_configs import option_names as our
from memcalc.run_configs.context import Context
from memcalc.run_configs.keys import Key, Keys, anything, count, flag, harmless, number, table, text
from memcalc.run_configs.mapping import Given
from memcalc.run_configs.sharding import Sharding

KEYS = table(
    Key("model.name_or_path", text, None, "model", "the model"),
    Key("model.quantize", flag, False, our.QUANTIZATION, "the frozen base in 8 bits"),
    Key("model.qtype", text, "qfloat8", our.QUANTIZATION, "format of the base"),
    Key("model.layer_offloading", flag, False, "", "layers whose weights wait on the host"),
    Key("network.type", text, "lora", our.LORA_RANK, "what is trained on the frozen model"),
    Key("network.linear", count, 4, our.LORA_RANK, "rank of the adapters", other=("network.rank",)),
    Key("network.conv", count, None, "", "rank of adapters on convolutions"),
    Key("network.dropout", number, 0.0, our.LORA_DROPOUT, "dropout of the adapters"),
    Key("network.network_kwargs", anything, None, our.LORA_TARGETS, "which modules get adapters"),
    Key("train.batch_size", count, 1, our.BATCH, "pictures per forward pass"),
    Key(
        "train.gradient_accumulation_steps",
        count,
        1,
        our.GRAD_ACCUM,
        "micro-batches a step",
        other=("train.gradient_accumulation",),
    ),
    Key("train.gradient_checkpointing", flag, True, our.CHECKPOINTING, "recompute blocks in backward"),
    Key("train.dtype", text, "fp32", our.PRECISION, "dtype of the frozen weights"),
    Key("train.optimizer", text, "adamw", our.OPTIMIZER, "optimizer"),
    Key("train.max_grad_norm", number, 1.0, our.MAX_GRAD_NORM, "norm that gradients are clipped to"),
    Key("train.train_text_encoder", flag, False, our.TRAIN_TEXT_ENCODER, "text encoders are trained too"),
    Key("train.cache_text_embeddings", flag, False, our.CACHE_TEXT, "text is encoded once"),
    Key("train.unload_text_encoder", flag, False, our.CACHE_TEXT, "text encoders are put away"),
    Key("train.ema_config", anything, None, our.USE_EMA, "averaged weights of what is trained"),
    Key("datasets", anything, None, our.RESOLUTION, "pictures: resolutions, caching"),
)
HARMLESS = harmless(
    "type training_folder device trigger_word performance_log_every sqlite_db_path network.linear_alpha "
    "network.conv_alpha network.alpha network.transformer_only network.lokr_full_rank model.arch model.low_vram "
    "model.dtype model.quantize_te model.qtype_te model.quantize_kwargs model.vae_path model.assistant_lora_path "
    "model.te_name_or_path model.extras_name_or_path model.model_kwargs model.refiner_name_or_path "
    "model.attn_masking model.use_flux_cfg model.inference_lora_path model.accuracy_recovery_adapter",
    r"(save|sample|logging|meta|slider|validation|metadata)(\..*)?",
    r"model\.(is_|te_|vae_|text_encoder|use_|unet_|compile|block_compile|experimental|latent|auto_memory|in_context)\w*",
    r"train\.(?!(batch_size|gradient|dtype|optimizer$|max_grad|train_text|cache_text|unload|ema_config)).*",
    r"train\.(gradient_checkpointing_\w+|optimizer_params)",
)
_FORMATS = {
    "qfloat8": "fp8",
    "float8": "fp8",
    "qint8": "int8",
    "int8": "int8",
    "qint4": "nf4",
    "int4": "nf4",
    "nf4": "nf4",
    "uint4": "nf4",
}


def is_ai_toolkit(values: dict[str, Any]) -> bool:
    """Whether a mapping is a job of ai-toolkit."""
    config = values.get("config")
    return "job" in values and isinstance(config, dict) and isinstance(config.get("process"), list)


def read(context: Context) -> None:
    """A job of ai-toolkit. Raises ConfigError."""
    out, config = context.out, context.values.get("config")
    processes = config.get("process") if isinstance(config, dict) else None
    process = processes[0] if isinstance(processes, list) and processes and isinstance(processes[0], dict) else None
    if process is None:
        raise ConfigError(f"{context.where} has no process that is a mapping: give a job of ai-toolkit.")
    if isinstance(processes, list) and len(processes) > 1:
        out.assume(f"{context.where} has {len(processes)} processes: the first is taken")
    values = _named(process)
    given = {name: value for name, value in context.values.items() if name not in ("job", "config", "meta")}
    keys = Keys(KEYS, {**values, **given}, context.where, out, HARMLESS)
    out.model = keys.value("model.name_or_path")
    kind = {"bfloat16": "bf16", "float16": "fp16", "float32": "", "fp32": ""}.get(
        str(keys.value("train.dtype")).lower(), str(keys.value("train.dtype")).lower()
    )
    adapted = "network" in process
    denoisers.precision(out, keys.get("train.dtype"), kind, pure="" if adapted else kind)
    if adapted:
        _network(keys)
    if keys.value("model.quantize"):
        given_type = keys.get("model.qtype")
        name = _FORMATS.get(str(given_type.value).split("|")[0].lower(), "")
        denoisers.base_format(out, given_type, name, "" if name == "nf4" else "quanto or torchao")
    accumulation = keys.take("train.gradient_accumulation_steps").value
    denoisers.optimizer(out, keys.get("train.optimizer"), accumulation=accumulation)
    keys.take("train.max_grad_norm")
    keys.take("train.batch_size")
    on = keys.get("train.gradient_checkpointing")
    training.checkpointing(out, on, bool(on.value))
    _inputs(keys)
    denoisers.stays_on_host(keys, "model.layer_offloading")
    average = keys.get("train.ema_config")
    if isinstance(average.value, dict) and average.value.get("use_ema"):
        if adapted:
            out.note(average, "of the adapters alone: small")
        else:
            out.take(our.USE_EMA, True, average)
    denoisers.loop(out, "ai-toolkit")
    keys.finish()
    context.finish(context.sharding or Sharding(world=context.world, world_from=context.world_from))


def _named(process: dict[str, Any]) -> dict[str, Any]:
    """Sections as dotted names, two levels deep."""
    found: dict[str, Any] = {}
    for name, value in process.items():
        if isinstance(value, dict):
            found.update({f"{name}.{key}": inner for key, inner in value.items()})
        else:
            found[str(name)] = value
    return found


def _network(keys: Keys) -> None:
    out, kind = keys.out, keys.get("network.type")
    if str(kind.value).lower() not in ("lora", "locon"):
        out.lack(f"network.type: {kind.shown} is taken as LoRA of its rank")
    targets: Any = denoisers.ALL_IN_BLOCKS
    arguments = keys.get("network.network_kwargs")
    if isinstance(arguments.value, dict) and arguments.value.get("only_if_contains"):
        out.lack("network_kwargs.only_if_contains is not modelled: adapters are counted in all blocks")
    if keys.has("network.conv"):
        out.lack("network.conv: adapters on convolutions are not counted")
    denoisers.adapters(out, keys.get("network.linear"), targets, "fp32", keys.get("network.dropout"))


def _inputs(keys: Keys) -> None:
    out, given = keys.out, keys.get("datasets")
    sets = [one for one in given.value or [] if isinstance(one, dict)] if isinstance(given.value, list) else []
    sizes = [one.get("resolution", 512) for one in sets]
    flat = [side for value in sizes for side in (value if isinstance(value, list) else [value])]
    if flat:
        denoisers.size(out, Given("datasets.resolution", flat, flat))
    else:
        out.ask("no dataset says its resolution: give --resolution N")
    frames = [one["num_frames"] for one in sets if isinstance(one.get("num_frames"), int) and one["num_frames"] > 1]
    if frames:
        out.take(our.NUM_FRAMES, max(frames), Given("datasets.num_frames", frames, max(frames)))
    cached = bool(sets) and all(one.get("cache_latents") or one.get("cache_latents_to_disk") for one in sets)
    text = keys.get("train.cache_text_embeddings")
    once = bool(text.value or keys.value("train.unload_text_encoder"))
    once = once or (bool(sets) and all(one.get("cache_text_embeddings") for one in sets))
    latents = Given("datasets.cache_latents", cached, cached)
    trains = bool(keys.value("train.train_text_encoder"))
    denoisers.inputs(out, latents, text, latents_cached=cached, text_cached=None if trains else once)
    if trains:
        keys.take("train.train_text_encoder")
