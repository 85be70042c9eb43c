"""A model of an unknown family, read as a Llama-like decoder: only with `--generic`, and the report says so."""

from collections.abc import Mapping
from typing import Any

from memcalc.common.assumption import Assumption
from memcalc.config.dtypes import INNER
from memcalc.errors import ConfigError
from memcalc.sources.display_names import shown, some
from memcalc.sources.generic.shape_from_names import generic_shape
from memcalc.sources.loaded_model import LoadedModel

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
_FLAGS = {"tie_word_embeddings": ("tie_word_embeddings", "share_input_output_layers")}
_NEEDED = ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "vocab_size")

# Parts of keys that say that a model keeps something else than keys and values of every layer.
_OTHER_ATTENTION = (
    "kv_lora",
    "latent",
    "shared_layers",
    "kv_source",
    "index_",
    "linear_attention",
    "ssm",
    "mamba",
    "state_",
)


def generic_config(model: LoadedModel) -> tuple[dict[str, Any], tuple[Assumption, ...]]:
    """A config of family llama (mixtral with experts) for `model`, and what to say about it.

    Raises:
        ConfigError: neither the config nor the weights' names tell a size that is needed, or layers differ in it.
    """
    given = _flat(model.config or {})
    known = {key: value for key, names in _SIZES.items() if (value := _first(given, names)) is not None}
    known |= {key: value for key, names in _FLAGS.items() if isinstance(value := _first(given, names), bool)}
    if given.get("multi_query_attention") is False and "multi_query_group_num" in given:
        known.pop("num_key_value_heads", None)
    for key, value in known.items():
        if isinstance(value, list | tuple | Mapping):
            raise ConfigError(
                f"{shown(model.name)} gives {key!r} for each layer, but --generic estimates layers that are all equal; "
                "inspect counts what its files hold."
            )
    shapes = model.checkpoint.shapes if model.checkpoint else {}
    config = {**generic_shape(shapes, known).config, **known}
    missing = [key for key in _NEEDED if config.get(key) is None]
    if missing:
        raise ConfigError(
            f"neither config.json nor the weights' names of {shown(model.name)} tell {', '.join(missing)}, which "
            "--generic needs; add them to config.json."
        )
    kept = {key: given[key] for key in ("dtype", "torch_dtype", "quantization_config") if given.get(key) is not None}
    config = {**config, **kept, "model_type": "llama"}
    if config.get("num_experts"):
        width = config.get("moe_intermediate_size") or config["intermediate_size"]
        config |= {"model_type": "mixtral", "num_local_experts": config["num_experts"], "intermediate_size": width}
    return config, tuple(_said(model, given, config))


def _said(model: LoadedModel, given: Mapping[str, Any], config: Mapping[str, Any]) -> list[Assumption]:
    whose = shown((model.config or {}).get("model_type") or "unknown")
    lines = [
        Assumption(
            "generic_family",
            f"generic: family {whose!r} is unknown, so it is estimated as a Llama-like decoder (--generic)",
        )
    ]
    if model.config is None:
        lines.append(Assumption("generic_shapes", "generic: shapes are read off the weights' names"))
    odd = [key for key in given if any(word in key for word in _OTHER_ATTENTION)]
    if odd:
        lines.append(
            Assumption(
                "generic_low_confidence",
                f"generic: low confidence, as the config has {some(odd)}, which a Llama-like decoder has not",
            )
        )
    if config["model_type"] == "mixtral" and config.get("num_experts_per_tok") is None:
        lines.append(
            Assumption(
                "generic_experts_per_token",
                "generic: each token is taken to meet 2 experts, as the config does not say",
            )
        )
    return lines


def _flat(config: Mapping[str, Any]) -> dict[str, Any]:
    """The config with the text model's own over it: its values win, and what it lacks comes from the top."""
    inner: Mapping[str, Any] = next((config[key] for key in INNER if isinstance(config.get(key), Mapping)), {})
    return {**config, **{key: value for key, value in inner.items() if value is not None}}


def _first(config: Mapping[str, Any], names: tuple[str, ...]) -> Any:
    return next((config[name] for name in names if config.get(name) is not None), None)
