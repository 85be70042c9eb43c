"""Keys of a GGUF header that are an architecture's own, in the words of its family's config.

Source: llama.cpp's converter (conversion/, convert_hf_to_gguf.py).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any


@dataclass(frozen=True)
class Metadata:
    """The keys of one architecture in a GGUF header, without the architecture's name before them."""

    values: Mapping[str, Any]
    architecture: str

    def get(self, key: str) -> Any:
        """The value of a key; None where it is not there or was skipped."""
        value = self.values.get(f"{self.architecture}.{key}")
        return None if isinstance(value, tuple) or value == [] else value

    def ratio(self, whole: str, part: str) -> int | None:
        """One whole number divided by another; None where one is missing."""
        first, second = self.get(whole), self.get(part)
        return first // second if isinstance(first, int) and isinstance(second, int) and second else None

    def nonzero(self, key: str) -> list[bool] | None:
        """Of a list with a number for each layer, which are not 0; None where it is no list."""
        value = self.get(key)
        return [bool(item) for item in value] if isinstance(value, list) else None


Words = dict[str, Any]
Translation = Callable[[Metadata], Words]


def _delta_net(m: Metadata) -> Words:
    """Gated delta nets: the state's keys stand for the heads of linear attention."""
    values = m.get("ssm.time_step_rank") or m.ratio("ssm.inner_size", "ssm.state_size")
    inner = m.get("ssm.inner_size")
    return {
        "linear_key_head_dim": m.get("ssm.state_size"),
        "linear_num_key_heads": m.get("ssm.group_count"),
        "linear_num_value_heads": values,
        "linear_value_head_dim": inner // values if inner and values else None,
        "linear_conv_kernel_dim": m.get("ssm.conv_kernel"),
        "full_attention_interval": m.get("full_attention_interval"),
        "shared_expert_intermediate_size": m.get("expert_shared_feed_forward_length"),
    }


def _shared_expert(m: Metadata) -> Words:
    return {"shared_expert_intermediate_size": m.get("expert_shared_feed_forward_length")}


def _mamba(m: Metadata) -> Words:
    return {
        "state_size": m.get("ssm.state_size"),
        "conv_kernel": m.get("ssm.conv_kernel"),
        "time_step_rank": m.get("ssm.time_step_rank"),
        "expand": m.ratio("ssm.inner_size", "embedding_length"),
        "intermediate_size": m.get("ssm.inner_size"),
        "model_type": "falcon_mamba" if m.get("ssm.dt_b_c_rms") else "mamba",
    }


def _mamba2(m: Metadata) -> Words:
    return {
        "state_size": m.get("ssm.state_size"),
        "conv_kernel": m.get("ssm.conv_kernel"),
        "num_heads": m.get("ssm.time_step_rank"),
        "head_dim": m.ratio("ssm.inner_size", "ssm.time_step_rank"),
        "n_groups": m.get("ssm.group_count"),
        "expand": m.ratio("ssm.inner_size", "embedding_length"),
    }


def _mixers(m: Metadata) -> Words:
    """Mamba 2 mixers beside attention, in the words of Granite and Falcon-H1."""
    return {
        "mamba_d_state": m.get("ssm.state_size"),
        "mamba_d_conv": m.get("ssm.conv_kernel"),
        "mamba_n_groups": m.get("ssm.group_count"),
        "mamba_n_heads": m.get("ssm.time_step_rank"),
        "mamba_d_head": m.ratio("ssm.inner_size", "ssm.time_step_rank"),
    }


def _granite_hybrid(m: Metadata) -> Words:
    experts = m.get("expert_count") or 0
    shared = m.get("expert_shared_feed_forward_length") or (None if experts else m.get("feed_forward_length"))
    return {
        **_mixers(m),
        "mamba_expand": m.ratio("ssm.inner_size", "embedding_length"),
        "layer_types": _kinds(m, "attention", "mamba"),
        "num_key_value_heads": _most(m.get("attention.head_count_kv")),
        "num_local_experts": experts,
        "shared_intermediate_size": shared if isinstance(shared, int) else _most(shared),
    }


def _falcon_h1(m: Metadata) -> Words:
    return {**_mixers(m), "mamba_d_ssm": m.get("ssm.inner_size")}


def _jamba(m: Metadata) -> Words:
    return {
        "mamba_d_state": m.get("ssm.state_size"),
        "mamba_d_conv": m.get("ssm.conv_kernel"),
        "mamba_dt_rank": m.get("ssm.time_step_rank"),
        "mamba_expand": m.ratio("ssm.inner_size", "embedding_length"),
        "layers_block_type": _kinds(m, "attention", "mamba"),
        "num_key_value_heads": _most(m.get("attention.head_count_kv")),
    }


def _nemotron_h(m: Metadata) -> Words:
    attends, is_input_embedding = m.nonzero("attention.head_count_kv"), m.nonzero("feed_forward_length")
    fed = "E" if m.get("expert_count") else "-"
    pattern = None
    if attends and is_input_embedding:
        pattern = "".join("*" if a else fed if f else "M" for a, f in zip(attends, is_input_embedding, strict=False))
    return {
        "hybrid_override_pattern": pattern,
        "num_key_value_heads": _most(m.get("attention.head_count_kv")),
        "num_attention_heads": _most(m.get("attention.head_count")),
        "intermediate_size": _most(m.get("feed_forward_length")),
        "mamba_num_heads": m.get("ssm.time_step_rank"),
        "mamba_head_dim": m.ratio("ssm.inner_size", "ssm.time_step_rank"),
        "ssm_state_size": m.get("ssm.state_size"),
        "n_groups": m.get("ssm.group_count"),
        "conv_kernel": m.get("ssm.conv_kernel"),
        "n_routed_experts": m.get("expert_count"),
        "moe_shared_expert_intermediate_size": m.get("expert_shared_feed_forward_length"),
        "moe_latent_size": m.get("moe_latent_size"),
    }


def _lfm2(m: Metadata) -> Words:
    return {
        "conv_L_cache": m.get("shortconv.l_cache"),
        "layer_types": _kinds(m, "full_attention", "conv"),
        "num_key_value_heads": _most(m.get("attention.head_count_kv")),
        "block_auto_adjust_ff_dim": False,
        "num_dense_layers": m.get("leading_dense_block_count"),
    }


def _latent(m: Metadata) -> Words:
    """Latent attention: newer converters write the sizes of the absorbed heads too, which are not the model's."""
    rope = m.get("rope.dimension_count")
    key = m.get("attention.key_length_mla") or m.get("attention.key_length")
    return {
        "qk_rope_head_dim": rope,
        "qk_nope_head_dim": key - rope if isinstance(key, int) and isinstance(rope, int) and key > rope else None,
        "v_head_dim": m.get("attention.value_length_mla") or m.get("attention.value_length"),
        "head_dim": None,
        "num_key_value_heads": m.get("attention.head_count"),
    }


def _indexed(m: Metadata) -> Words:
    return {
        **_latent(m),
        "index_n_heads": m.get("attention.indexer.head_count"),
        "index_head_dim": m.get("attention.indexer.key_length"),
        "index_topk": m.get("attention.indexer.top_k"),
    }


def _minimax_m2(m: Metadata) -> Words:
    return {
        "intermediate_size": m.get("expert_feed_forward_length"),
        "rotary_dim": m.get("rope.dimension_count"),
        "num_local_experts": m.get("expert_count"),
    }


def _modernbert(m: Metadata) -> Words:
    pattern = m.get("attention.sliding_window_pattern")
    return {
        "local_attention": m.get("attention.sliding_window"),
        "global_attn_every_n_layers": pattern if isinstance(pattern, int) else None,
    }


def _t5(m: Metadata) -> Words:
    return {
        "d_model": m.get("embedding_length"),
        "d_ff": m.get("feed_forward_length"),
        "d_kv": m.get("attention.key_length"),
        "num_heads": m.get("attention.head_count"),
        "num_layers": m.get("block_count"),
        "num_decoder_layers": m.get("decoder_block_count"),
        "relative_attention_num_buckets": m.get("attention.relative_buckets_count"),
    }


def _llama4(m: Metadata) -> Words:
    return {
        "intermediate_size_mlp": m.get("feed_forward_length"),
        "intermediate_size": m.get("expert_feed_forward_length"),
        "interleave_moe_layer_step": m.get("interleave_moe_layer_step"),
    }


def _gemma4(m: Metadata) -> Words:
    """Key-value heads of layers within the window and of the others; MLPs of twice the width in the last layers."""
    words: Words = {}
    heads, inside = m.get("attention.head_count_kv"), m.get("attention.sliding_window_pattern")
    if isinstance(heads, list) and isinstance(inside, list) and len(heads) == len(inside):
        near = {count for count, within in zip(heads, inside, strict=True) if within}
        far = {count for count, within in zip(heads, inside, strict=True) if not within}
        if len(near) == len(far) == 1 and near != far:  # whose keys are their values too
            words = {
                "num_key_value_heads": near.pop(),
                "num_global_key_value_heads": far.pop(),
                "attention_k_eq_v": True,
            }
    widths = m.get("feed_forward_length")
    if isinstance(widths, list) and len(set(widths)) == 2 and max(widths) == 2 * min(widths):
        words |= {"intermediate_size": min(widths), "use_double_wide_mlp": True}
    return words


def _kinds(m: Metadata, attends: str, other: str) -> list[str] | None:
    """The kind of each layer, as those without key-value heads do not attend."""
    layers = m.nonzero("attention.head_count_kv")
    return None if layers is None else [attends if layer else other for layer in layers]


def _most(value: Any) -> Any:
    return max(value, default=None) if isinstance(value, list) else value


TRANSLATIONS: Mapping[str, Translation] = MappingProxyType(
    {
        "qwen3next": _delta_net,
        "qwen35": _delta_net,
        "qwen35moe": _delta_net,
        "qwen2moe": _shared_expert,
        "mamba": _mamba,
        "mamba2": _mamba2,
        "granitehybrid": _granite_hybrid,
        "falcon-h1": _falcon_h1,
        "jamba": _jamba,
        "nemotron_h": _nemotron_h,
        "nemotron_h_moe": _nemotron_h,
        "lfm2": _lfm2,
        "lfm2moe": _lfm2,
        "deepseek2": _latent,
        "deepseek32": _indexed,
        "glm-dsa": _indexed,
        "minimax-m2": _minimax_m2,
        "modern-bert": _modernbert,
        "t5": _t5,
        "t5encoder": _t5,
        "llama4": _llama4,
        "gemma4": _gemma4,
    }
)
