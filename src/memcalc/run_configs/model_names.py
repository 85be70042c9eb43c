"""What torchtune and torchtitan call a model, and the repository of the Hub that holds the same shape.

Sources: torchtune 0.7 (torchtune/models/*/_model_builders.py), torchtitan 0.2.2 (models/*/__init__.py).
"""

from __future__ import annotations

REPOSITORIES = {
    "llama2 7B": "meta-llama/Llama-2-7b-hf",
    "llama2 13B": "meta-llama/Llama-2-13b-hf",
    "llama2 70B": "meta-llama/Llama-2-70b-hf",
    "llama3 8B": "meta-llama/Meta-Llama-3-8B",
    "llama3 70B": "meta-llama/Meta-Llama-3-70B",
    "llama3 405B": "meta-llama/Llama-3.1-405B",
    "llama3_1 8B": "meta-llama/Llama-3.1-8B-Instruct",
    "llama3_1 70B": "meta-llama/Llama-3.1-70B-Instruct",
    "llama3_1 405B": "meta-llama/Llama-3.1-405B-Instruct",
    "llama3_2 1B": "meta-llama/Llama-3.2-1B-Instruct",
    "llama3_2 3B": "meta-llama/Llama-3.2-3B-Instruct",
    "llama3_2_vision 11B": "meta-llama/Llama-3.2-11B-Vision-Instruct",
    "llama3_2_vision 90B": "meta-llama/Llama-3.2-90B-Vision-Instruct",
    "llama3_3 70B": "meta-llama/Llama-3.3-70B-Instruct",
    "llama4 scout 17b 16e": "meta-llama/Llama-4-Scout-17B-16E-Instruct",
    "llama4 17bx16e": "meta-llama/Llama-4-Scout-17B-16E",
    "llama4 17bx128e": "meta-llama/Llama-4-Maverick-17B-128E",
    "mistral 7B": "mistralai/Mistral-7B-v0.1",
    "gemma 2B": "google/gemma-2b",
    "gemma 7B": "google/gemma-7b",
    "gemma2 2B": "google/gemma-2-2b",
    "gemma2 9B": "google/gemma-2-9b",
    "gemma2 27B": "google/gemma-2-27b",
    "phi3 mini": "microsoft/Phi-3-mini-4k-instruct",
    "phi4 14B": "microsoft/phi-4",
    "qwen2 0.5B": "Qwen/Qwen2-0.5B-Instruct",
    "qwen2 1.5B": "Qwen/Qwen2-1.5B-Instruct",
    "qwen2 7B": "Qwen/Qwen2-7B-Instruct",
    **{
        f"qwen2_5 {size}{kind}": f"Qwen/Qwen2.5-{size}{suffix}"
        for size in ("0.5B", "1.5B", "3B", "7B", "14B", "32B", "72B")
        for kind, suffix in (("", "-Instruct"), (" base", ""), (" instruct", "-Instruct"))
    },
    **{
        f"qwen3 {size}{kind}": f"Qwen/Qwen3-{size}{suffix}"
        for size in ("0.6B", "1.7B", "4B", "8B", "14B", "32B")
        for kind, suffix in (("", ""), (" base", "-Base"), (" instruct", ""))
    },
    "deepseek_v3 671B": "deepseek-ai/DeepSeek-V3",
    "gpt_oss 20B": "openai/gpt-oss-20b",
    "gpt_oss 120B": "openai/gpt-oss-120b",
}
"""Repository by «family size», as `Mapping.model` says it for these two frameworks."""


def repository(name: str) -> str | None:
    """Where the Hub has a model of torchtune or torchtitan, None where it has not; other names stand as they are."""
    return REPOSITORIES.get(name, None if " " in name else name)
