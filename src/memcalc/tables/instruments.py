"""What measured rows were measured with: the two instruments, and which families the second one has seen.

Source: the rows themselves (`tests/data/measured`, `tests/data/allocator`, `tests/data/diffusion.jsonl`).
"""

from typing import Final

TRACKER: Final = "PyTorch's memory tracker (MemTracker) over the real model on shape-only tensors"
ALLOCATOR: Final = "PyTorch's own CUDA allocator (memory_stats) under the real model on a GPU whose kernels do nothing"

ON_BOTH: Final = frozenset(
    {
        "bart",
        "bert",
        "bloom",
        "cohere2_moe",
        "falcon",
        "falcon_h1",
        "gemma2",
        "gemma3_text",
        "gpt2",
        "gpt_neox",
        "llama",
        "mamba2",
        "mellum",
        "mistral",
        "mixtral",
        "olmo2",
        "opt",
        "phi",
        "phi3",
        "qwen2",
        "qwen3",
        "qwen3_moe",
        "roberta",
        "starcoder2",
        "t5",
        "vit",
    }
)
"""Families of which both have measured training; denoisers and autoencoders were measured with the allocator alone."""

ON_ALLOCATOR: Final = frozenset({"dbrx", "jetmoe", "layoutlmv3", "moonshine", "switch_transformers"})
"""Families of which the allocator alone has measured training: they read values, or run faster there."""
