"""llama.cpp's architectures: the Transformers family of each.

Source: llama.cpp's src/llama-arch.cpp. An architecture without a row here is one that no family of memcalc describes,
unless both spell it alike.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

MODEL_TYPES: Mapping[str, str] = MappingProxyType(
    {
        "llama-embed": "llama",
        "llama4": "llama4_text",
        "mistral3": "ministral3",
        "qwen2moe": "qwen2_moe",
        "qwen2vl": "qwen2",
        "qwen3moe": "qwen3_moe",
        "qwen3vl": "qwen3",
        "qwen3vlmoe": "qwen3_moe",
        "qwen3next": "qwen3_next",
        "qwen35": "qwen3_5_text",
        "qwen35moe": "qwen3_5_moe_text",
        "gemma3": "gemma3_text",
        "gemma3n": "gemma3n_text",
        "gemma4": "gemma4_text",
        "phi2": "phi",
        "gptneox": "gpt_neox",
        "command-r": "cohere",
        "granitehybrid": "granitemoehybrid",
        "gpt-oss": "gpt_oss",
        "glm4moe": "glm4_moe",
        "glm-dsa": "glm_moe_dsa",
        "deepseek2": "deepseek_v3",
        "deepseek32": "deepseek_v32",
        "starcoder": "gpt_bigcode",
        "ernie4_5-moe": "ernie4_5_moe",
        "exaone-moe": "exaone_moe",
        "falcon-h1": "falcon_h1",
        "nemotron_h_moe": "nemotron_h",
        "hunyuan-moe": "hunyuan_v1_moe",
        "hunyuan-dense": "hunyuan_v1_dense",
        "minimax-m2": "minimax_m2",
        "lfm2moe": "lfm2_moe",
        "modern-bert": "modernbert",
        "nomic-bert": "nomic_bert",
        "jina-bert-v3": "jina_embeddings_v3",
        "t5encoder": "t5",
    }
)

ENCODERS: Mapping[str, str] = MappingProxyType(
    {
        "bert": "BertModel",
        "modern-bert": "ModernBertModel",
        "nomic-bert": "NomicBertModel",
        "jina-bert-v3": "JinaEmbeddingsV3Model",
        "eurobert": "EuroBertModel",
        "t5encoder": "T5EncoderModel",
    }
)
"""Encoders, which are converted without the head that they were trained with."""

DEEPER = frozenset({"glm4moe", "exaone-moe", "glm-dsa", "deepseek32", "qwen35", "qwen35moe"})
"""Architectures whose block_count counts the blocks of multi-token prediction too."""
