"""Keys of a config that --generic does not understand although they change what a model takes."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from memcalc.config.dtypes import INNER

_TELLING = re.compile(
    r"(layer_types|layers_block|block_config|hybrid|pattern|window|chunk|global|per_layer|lora_rank|latent|linear_|ssm|"
    r"mamba|recurrent|rwkv|delta|conv_|state_size|d_state|expert|moe|shared|kv_source|index_|indexer|sparse|altup|laurel|"
    r"compress|k_eq_v|cross_attention|memory|hyper|loop|vision|visual|audio|speech|image|video|mm_|qk_nope|qk_rope|"
    r"v_head_dim|interval|attn_layer|hc_|engram|block_size|cache)"
)
"""Parts of keys that say that a model is more, or other, than blocks of attention and an MLP."""

_HARMLESS = re.compile(
    r"(_token|_coef|_loss|dropout|_std$|_range$|_eps$|_theta|_scale$|_scaling|_factor$|_softcap|"
    r"use_cache|cache_implementation|initializer|_bias|norm_topk|scoring|topk_method|routed_scaling|aux|gating|"
    r"layerdrop|chunk_size_feed_forward|_version|vocab|mtp|nextn|output_router|router_jitter|num_assistant|_type$|"
    r"_name|tie_|attention_dropout|has_|is_|sep_|n_group|topk_group|num_expert_group|ep_size|pretraining_tp)"
)
"""Parts of keys that say nothing of size, among those that look as if they did."""

VISION = ("vision_config", "visual", "vit_config", "vision_tower", "mm_vision_tower", "vision_encoder_config")
AUDIO = ("audio_config", "speech_config", "whisper_config", "audio_encoder_config")
TOWERS = (*VISION, *AUDIO)
"""Configs of what stands beside the language model."""


def unread_keys(given: Mapping[str, Any], understood: Collection[str]) -> Iterator[str]:
    """Keys of `given` that change the answer and are not among those `understood`; empty values change nothing."""
    for key, value in given.items():
        if key in understood or key in INNER or not value or key in TOWERS:
            continue
        if _TELLING.search(key) and not _HARMLESS.search(key):
            yield key


def towers(config: Mapping[str, Any]) -> list[str]:
    """Keys of the config that describe towers beside the language model."""
    found = [key for key in TOWERS if config.get(key)]
    for inner in INNER:
        nested = config.get(inner)
        if isinstance(nested, Mapping):
            found += [key for key in towers(nested) if key not in found]
    return found
