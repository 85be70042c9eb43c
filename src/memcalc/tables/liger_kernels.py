"""Which of Liger's kernels replace modules of which model family.

Source: liger-kernel 0.8.5, transformers/monkey_patch.py (what `apply_liger_kernel_to_…` patches by default). Families
whose experts it replaces are left out.
"""

from __future__ import annotations

from typing import NamedTuple


class LigerKernels(NamedTuple):
    """What is replaced in a family. Norms work `in_place` on the incoming gradient, or make a new one."""

    rotary: bool = True
    in_place: bool = True
    gated: bool = True


_ALL = LigerKernels()
_NEW_GRADIENTS = LigerKernels(in_place=False)

LIGER = {
    "exaone4": _NEW_GRADIENTS,
    "gemma": _ALL,
    "gemma2": _NEW_GRADIENTS,
    "gemma3_text": _NEW_GRADIENTS,
    "glm4": LigerKernels(rotary=False, in_place=False),
    "gpt_oss": LigerKernels(gated=False),
    "granite": _ALL,
    "llama": _ALL,
    "ministral": _ALL,
    "mistral": _ALL,
    "olmo2": _NEW_GRADIENTS,
    "olmo3": _NEW_GRADIENTS,
    "phi3": _ALL,
    "qwen2": _ALL,
    "qwen3": _ALL,
    "smollm3": _ALL,
}
"""By model type."""

STREAMING_MULTIPROCESSORS = 132
"""Of an H100 or H200: the weight gradient of a norm is summed in as many rows."""
