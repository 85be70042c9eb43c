"""A model of an unknown family, read as a Llama-like decoder: only with `--generic`, and the report says so."""

from collections import Counter
from collections.abc import Collection, Mapping
from typing import Any

from memcalc.common.assumption import Assumption
from memcalc.config.dtypes import INNER
from memcalc.config.reader import Config
from memcalc.errors import ConfigError
from memcalc.models.families.decoders.generic import GENERIC
from memcalc.sources.config_vs_weights import part_of
from memcalc.sources.display_names import shown, some
from memcalc.sources.generic.keys import TOWERS, towers, unread_keys
from memcalc.sources.generic.layers import LAYER_KEYS, layer_lists
from memcalc.sources.generic.shape_from_names import generic_shape
from memcalc.sources.loaded_model import LoadedModel
from memcalc.tables.linear_attention import why_not
from memcalc.units import format_bytes

# The names under which configs give the sizes of a decoder, the most usual first. Sources: the configuration classes of
# Transformers, and configs of repositories that bring their own code.
_SIZES: Mapping[str, tuple[str, ...]] = {
    "hidden_size": ("hidden_size", "n_embd", "d_model", "model_dim", "n_embed", "embed_dim", "dim"),
    "num_hidden_layers": (
        "num_hidden_layers",
        "n_layer",
        "n_layers",
        "num_layers",
        "num_transformer_layers",
        "decoder_layers",
    ),
    "num_attention_heads": (
        "num_attention_heads",
        "n_head",
        "n_heads",
        "num_heads",
        "num_query_heads",
        "decoder_attention_heads",
    ),
    "num_key_value_heads": (
        "num_key_value_heads",
        "n_head_kv",
        "num_kv_heads",
        "n_kv_heads",
        "multi_query_group_num",
        "num_attention_groups",
    ),
    "head_dim": ("head_dim", "kv_channels", "d_head", "head_size"),
    "intermediate_size": (
        "intermediate_size",
        "ffn_hidden_size",
        "n_inner",
        "d_ff",
        "ffn_dim",
        "feed_forward_dim",
        "hidden_dim",
    ),
    "vocab_size": ("vocab_size", "padded_vocab_size", "n_vocab", "vocabulary_size"),
    "max_position_embeddings": (
        "max_position_embeddings",
        "n_positions",
        "seq_length",
        "max_seq_len",
        "max_sequence_length",
        "n_ctx",
    ),
    "num_experts": ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"),
    "num_experts_per_tok": ("num_experts_per_tok", "num_experts_per_token", "moe_k", "moe_top_k", "top_k_experts"),
    "moe_intermediate_size": ("moe_intermediate_size", "expert_intermediate_size", "moe_ffn_hidden_size"),
}
_SHARED = ("shared_expert_intermediate_size", "moe_shared_expert_intermediate_size", "shared_intermediate_size")
_SHARED_COUNTS = ("n_shared_experts", "num_shared_experts", "moe_num_shared_experts", "num_shared_expert")
_LATENT = ("kv_lora_rank", "q_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
_FLAGS = {"tie_word_embeddings": ("tie_word_embeddings", "share_input_output_layers")}
_NEEDED = ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "vocab_size")


def generic_config(model: LoadedModel, ignored: Collection[str] = ()) -> tuple[dict[str, Any], tuple[Assumption, ...]]:
    """A config of a family that can stand for `model`, and what to say about it.

    The family is llama, mixtral with experts, deepseek_v3 with latent attention, or a decoder whose layers differ.
    `ignored` are keys that the user said to pass over.

    Raises:
        ConfigError: neither the config nor the weights' names tell a size that is needed, or a key that changes the
            answer is not understood.
    """
    given = _flat(model.config or {})
    why = why_not(str(given.get("model_type")))
    if why is not None:
        raise ConfigError(why)
    known = {key: _sizes(key, value) for key, names in _SIZES.items() if (value := _first(given, names)) is not None}
    known |= {key: value for key, names in _FLAGS.items() if isinstance(value := _first(given, names), bool)}
    if given.get("multi_query_attention") is False and "multi_query_group_num" in given:
        known.pop("num_key_value_heads", None)
    shapes = model.checkpoint.shapes if model.checkpoint else {}
    config = {**generic_shape(shapes, _plain(known)).config, **known}
    missing = [key for key in _NEEDED if config.get(key) is None]
    if missing:
        gguf = model.checkpoint is not None and model.checkpoint.format == "gguf"
        where = "the file's keys" if gguf else shown(model.config_file)
        next_step = "`memcalc inspect` counts what the file holds" if gguf else f"add them to {where}"
        raise ConfigError(
            f"neither {where} nor the weights' names of {shown(model.name)} tell {', '.join(missing)}, which "
            f"--generic needs; {next_step}."
        )
    _refuse_unread(model, given, ignored)
    kept = {key: given[key] for key in ("dtype", "torch_dtype", "quantization_config") if given.get(key) is not None}
    config = _as_family(given, {**config, **kept})
    return config, tuple(_said(model, given, config, ignored))


_ONE_FOR_ALL = ("hidden_size", "num_hidden_layers", "vocab_size", "max_position_embeddings")
"""Sizes that cannot differ by layer."""


def _sizes(key: str, value: Any) -> Any:
    """A size, or a list with one for each layer, of which some may be 0. Raises ConfigError where it is none."""
    if not isinstance(value, list | tuple) or key in _ONE_FOR_ALL:
        return Config({key: value}).integer(key, minimum=1 if key in _NEEDED else 0)
    return Config({key: value}).integers(key)


def _plain(known: Mapping[str, Any]) -> dict[str, Any]:
    """Those of the sizes that are one number for all layers."""
    return {key: value for key, value in known.items() if not isinstance(value, list | tuple | Mapping)}


def _refuse_unread(model: LoadedModel, given: Mapping[str, Any], ignored: Collection[str]) -> None:
    understood = {name for names in _SIZES.values() for name in names}
    understood |= {*_FLAGS, *_SHARED, *_SHARED_COUNTS, *LAYER_KEYS, *ignored}
    if _is_latent(given):
        understood |= set(_LATENT)
    unread = list(unread_keys(given, understood))
    if model.checkpoint is None:
        unread += [key for key in towers(model.config or {}) if key not in ignored]
    if unread:
        raise ConfigError(
            f"the config of {shown(model.name)} has {some(unread, 8)}, which --generic does not understand and which "
            f"can change the answer much; `memcalc inspect` counts its weights, and --generic-ignore "
            f"{','.join(unread[:3])} passes over what it names."
        )


def _is_latent(given: Mapping[str, Any]) -> bool:
    """Whether the config describes the latent attention of DeepSeek, with all that it needs."""
    return all(type(given.get(key)) is int for key in _LATENT if key != "q_lora_rank")


def _as_family(given: Mapping[str, Any], config: dict[str, Any]) -> dict[str, Any]:
    """The config in the words of the family that can stand for it."""
    if _is_latent(given):
        return _latent(given, config)
    lists = layer_lists(given, config)
    shared = _shared(given, config)
    experts = bool(config.get("num_experts"))
    uniform = all(len(set(values)) == 1 for values in lists.values()) and not any(lists["layer_windows"])
    if uniform and not shared and not isinstance(config.get("num_key_value_heads"), list):
        config = {**config, "model_type": "llama"}
        if experts:
            width = config.get("moe_intermediate_size") or config["intermediate_size"]
            config |= {
                "model_type": "mixtral",
                "num_local_experts": config["num_experts"],
                "intermediate_size": width,
                "sliding_window": None,
            }
        return config
    dims = Counter(lists["layer_head_dims"])
    moe_width = config.get("moe_intermediate_size") or lists["layer_widths"][0]
    return {
        **config,
        **lists,
        "model_type": GENERIC,
        "head_dim": dims.most_common(1)[0][0],
        "num_attention_heads": lists["layer_heads"][0],
        "num_key_value_heads": lists["layer_kv_heads"][0],
        "intermediate_size": lists["layer_widths"][0],
        "moe_intermediate_size": moe_width,
        "shared_intermediate_size": shared,
    }


def _latent(given: Mapping[str, Any], config: dict[str, Any]) -> dict[str, Any]:
    experts = config.get("num_experts") or 0
    depth = config["num_hidden_layers"]
    words = {key: given.get(key) for key in _LATENT}
    if not experts:  # the family needs some, in no layer
        words |= {"n_routed_experts": 8, "num_experts_per_tok": 2, "first_k_dense_replace": depth, "n_group": 1}
    else:
        shared = _first(given, _SHARED_COUNTS) or 1
        words |= {"n_routed_experts": experts, "n_shared_experts": shared, "n_group": 1, "topk_group": 1}
        words["first_k_dense_replace"] = given.get("first_k_dense_replace") or 0
    config = {key: value for key, value in config.items() if key not in ("head_dim", "num_key_value_heads")}
    return {**config, **words, "model_type": "deepseek_v3", "num_key_value_heads": config["num_attention_heads"]}


def _shared(given: Mapping[str, Any], config: Mapping[str, Any]) -> int:
    """The inner size of the experts that every token meets, 0 where there are none."""
    if not config.get("num_experts"):
        return 0
    width = _first(given, _SHARED)
    count = _first(given, _SHARED_COUNTS)
    if type(width) is int and width > 0:
        return width
    return int(count) * int(config.get("moe_intermediate_size") or 0) if type(count) is int else 0


def _said(
    model: LoadedModel, given: Mapping[str, Any], config: Mapping[str, Any], ignored: Collection[str]
) -> list[Assumption]:
    whose = shown((model.config or {}).get("model_type") or "unknown")
    lines = [
        Assumption(
            "generic_family",
            f"generic: family {whose!r} is unknown, so it is estimated as a Llama-like decoder (--generic)",
        )
    ]
    if model.config is None:
        lines.append(Assumption("generic_shapes", "generic: shapes are read off the weights' names"))
    if config["model_type"] == GENERIC:
        kinds = Counter(zip(*(config[key] for key in _DIFFERING), strict=True))
        lines.append(
            Assumption("generic_layers", f"generic: layers by window, key-value heads and head size: {_listed(kinds)}")
        )
    there = {*(key for key, value in given.items() if value), *towers(model.config or {})}
    passed = [key for key in ignored if key in there]
    if passed:
        lines.append(
            Assumption(
                "generic_low_confidence",
                f"generic: low confidence, as {some(passed)} of the config is passed over (--generic-ignore)",
            )
        )
    lines += _left_out(model)
    if config.get("num_experts") and config.get("num_experts_per_tok") is None:
        lines.append(
            Assumption(
                "generic_experts_per_token",
                "generic: each token is taken to meet 2 experts, as the config does not say",
            )
        )
    return lines


_DIFFERING = ("layer_windows", "layer_kv_heads", "layer_head_dims")


def _listed(kinds: Counter[tuple[int, ...]]) -> str:
    return ", ".join(
        f"{count} {f'of window {window}' if window else 'full'} with {heads} x {dim}"
        for (window, heads, dim), count in kinds.most_common(6)
    )


def _left_out(model: LoadedModel) -> list[Assumption]:
    """What the files hold beside the decoder, with its share of the bytes that they hold."""
    if model.checkpoint is None:
        return []
    parts: Counter[str] = Counter()
    for tensor in model.checkpoint.tensors:
        part = part_of(tensor.weight)
        if part in ("vision tower", "audio tower", "multimodal projector", "multi-token prediction"):
            parts[part] += tensor.nbytes
    whole = max(model.checkpoint.stored_bytes, 1)
    return [
        Assumption(
            "generic_left_out",
            f"generic: of the {part} ({format_bytes(nbytes)}, {nbytes / whole:.0%} of what is stored) only the "
            "weights are known, not what it computes",
        )
        for part, nbytes in parts.items()
    ]


def _flat(config: Mapping[str, Any]) -> dict[str, Any]:
    """The config with the text model's own over it: its values win, and what it lacks comes from the top."""
    inner = next((config[key] for key in INNER if isinstance(config.get(key), Mapping)), None)
    outer = {key: value for key, value in config.items() if key not in (*INNER, *TOWERS)}
    if inner is None:
        return outer
    return {**outer, **{key: value for key, value in _flat(inner).items() if value is not None}}


def _first(config: Mapping[str, Any], names: tuple[str, ...]) -> Any:
    return next((config[name] for name in names if config.get(name) is not None), None)
