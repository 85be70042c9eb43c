"""What a GGUF header says about the architecture, in the words of a config.json."""

from collections.abc import Mapping
from math import inf
from types import MappingProxyType
from typing import Any

from memcalc.config.reader import LARGEST
from memcalc.errors import CheckpointError
from memcalc.sources.display_names import shown
from memcalc.sources.gguf.architectures import DEEPER, ENCODERS, MODEL_TYPES
from memcalc.sources.gguf.header import GgufHeader
from memcalc.sources.gguf.translations import TRANSLATIONS, Metadata

# Keys behind the architecture's name, and the config's own. Source: ggml's docs/gguf.md, "LLM".
_KEYS: tuple[tuple[str, str], ...] = (
    ("block_count", "num_hidden_layers"),
    ("embedding_length", "hidden_size"),
    ("feed_forward_length", "intermediate_size"),
    ("attention.head_count", "num_attention_heads"),
    ("attention.head_count_kv", "num_key_value_heads"),
    ("attention.key_length", "head_dim"),
    ("context_length", "max_position_embeddings"),
    ("attention.sliding_window", "sliding_window"),
    ("expert_count", "num_experts"),
    ("expert_used_count", "num_experts_per_tok"),
    ("expert_feed_forward_length", "moe_intermediate_size"),
    ("expert_shared_count", "n_shared_experts"),
    ("attention.q_lora_rank", "q_lora_rank"),
    ("attention.kv_lora_rank", "kv_lora_rank"),
    ("leading_dense_block_count", "first_k_dense_replace"),
    ("nextn_predict_layers", "num_nextn_predict_layers"),
    ("attention.layer_norm_rms_epsilon", "rms_norm_eps"),
    ("rope.freq_base", "rope_theta"),
    ("attention.shared_kv_layers", "num_kv_shared_layers"),
    ("embedding_length_per_layer_input", "hidden_size_per_layer_input"),
)

_MAY_BE_ZERO = (
    ".head_count",
    ".head_count_kv",
    "feed_forward_length",
    ".sliding_window",
    ".expert_count",
    ".expert_used_count",
    ".expert_shared_count",
    ".leading_dense_block_count",
    ".nextn_predict_layers",
    "_lora_rank",
)
"""Keys whose number is 0 where an architecture has none of a kind, or where a layer has none."""

# The name of the number of experts differs by family. Source: the configuration classes of Transformers.
_EXPERTS = MappingProxyType(
    {
        "mixtral": "num_local_experts",
        "gpt_oss": "num_local_experts",
        "deepseek": "n_routed_experts",
        "deepseek_v3": "n_routed_experts",
        "glm4_moe": "n_routed_experts",
        "granitemoe": "num_local_experts",
        "granitemoehybrid": "num_local_experts",
        "minimax_m2": "num_local_experts",
        "nemotron_h": "n_routed_experts",
        "deepseek_v32": "n_routed_experts",
        "glm_moe_dsa": "n_routed_experts",
        "glm4_moe_lite": "n_routed_experts",
        "dots1": "n_routed_experts",
        "llama4_text": "num_local_experts",
        "phimoe": "num_local_experts",
    }
)


def config_from_gguf(header: GgufHeader, name: str) -> dict[str, Any]:
    """A config.json's object for the model in `header`; lists stay lists where layers differ.

    Raises:
        CheckpointError: the file names no architecture (an adapter, a projector, or only a tokenizer).
    """
    architecture = header.architecture
    if not architecture or header.metadata.get("general.type", "model") != "model":
        kind = shown(header.metadata.get("general.type", "no architecture"))
        raise CheckpointError(f"{shown(name)} is not a language model ({kind}): give the model's own GGUF file.")
    found: dict[str, Any] = {"model_type": MODEL_TYPES.get(architecture, architecture)}
    for key, ours in _KEYS:
        value = _single(header.metadata.get(f"{architecture}.{key}"))
        if value is not None:
            found[ours] = _checked(value, f"{architecture}.{key}", name)
    missing = [key for key, ours in _KEYS[:2] if ours not in found]
    if missing or not header.tensors:
        lacking = shown(f"{architecture}.{missing[0]}") if missing else "tensors"
        raise CheckpointError(
            f"{shown(name)} has no {lacking}, so it does not tell the size of a model; is it a tokenizer alone, or cut "
            "short?"
        )
    shapes = {tensor.name: tensor.shape for tensor in header.tensors}
    if architecture in TRANSLATIONS:
        words = TRANSLATIONS[architecture](Metadata(header.metadata, architecture))
        found |= words
        found = {key: value for key, value in found.items() if value is not None}
    pattern = header.metadata.get(f"{architecture}.attention.sliding_window_pattern")
    if isinstance(pattern, list):
        found["sliding_window_pattern"] = [bool(item) for item in pattern]
    inside = header.metadata.get(f"{architecture}.attention.key_length_swa")
    if isinstance(inside, int):  # the other key is that of layers which attend to everything
        found |= {"head_dim": inside, "global_head_dim": found.get("head_dim")}
    if architecture in DEEPER:
        found["num_hidden_layers"] = max(1, found["num_hidden_layers"] - (found.get("num_nextn_predict_layers") or 0))
    if architecture in ENCODERS:
        found["architectures"] = [ENCODERS[architecture]]
    if architecture == "llama" and found.get("num_experts"):
        found["model_type"] = "mixtral"
    if found.get("num_experts"):
        found[_EXPERTS.get(found["model_type"], "num_experts")] = found["num_experts"]
    _vocabulary(found, header, shapes)
    if "blk.0.attn_q.bias" in shapes or "blk.0.attn_qkv.bias" in shapes:
        found["attention_bias"] = True
    for name, key in (("token_types.weight", "type_vocab_size"), ("position_embd.weight", "max_position_embeddings")):
        if name in shapes:
            found[key] = shapes[name][0]
    return found


def _single(value: Any) -> Any:
    """A list of equal numbers, one a layer, is one number; a skipped array is unknown."""
    if isinstance(value, list) and value and all(item == value[0] for item in value):
        return value[0]
    return None if isinstance(value, tuple) or value == [] else value


def _checked(value: Any, key: str, name: str) -> Any:
    """A size, or sizes of the layers; 0 where the architecture has none of a kind."""
    for item in value if isinstance(value, list) else [value]:
        least = 0 if key.endswith(_MAY_BE_ZERO) else 1
        if isinstance(item, float) and 0 < item < inf:
            continue
        if type(item) is not int or not least <= item <= LARGEST:
            raise CheckpointError(
                f"{shown(name)} gives {shown(key)} as {shown(item)}, but it must be a number of {least} to {LARGEST}: "
                "it is damaged, or was converted wrongly."
            )
    return value


def _vocabulary(found: dict[str, Any], header: GgufHeader, shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Rows of the embedding, else the tokenizer's words; a missing output matrix means that it is tied."""
    embedding = shapes.get("token_embd.weight")
    words = header.metadata.get("tokenizer.ggml.tokens")
    if embedding:
        found["vocab_size"] = embedding[0]
        found["tie_word_embeddings"] = "output.weight" not in shapes
    elif isinstance(words, list | tuple) and words:
        found["vocab_size"] = words[0] if isinstance(words, tuple) else len(words)
