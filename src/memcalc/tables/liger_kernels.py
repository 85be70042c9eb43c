"""Which of Liger's kernels replace modules of which model family.

Source: liger-kernel 0.8.5, transformers/monkey_patch.py (what `apply_liger_kernel_to_…` patches by default). Families
whose experts it replaces are left out.
"""

from __future__ import annotations

from typing import NamedTuple

from memcalc.common.escaping import quoted
from memcalc.errors import UsageError


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

PARTS = ("rope", "rms_norm", "swiglu")
"""What `liger_kernel_config` switches of a block's kernels, by its own names."""

_OTHER_NAMES = {
    "geglu": "swiglu",
    "glu_activation": "swiglu",
    "liger_glu_activation": "swiglu",
    "liger_swiglu": "swiglu",
    "liger_rope": "rope",
    "liger_rms_norm": "rms_norm",
    "rotary": "rope",
    "norm": "rms_norm",
}
"""axolotl's names, and those of other families' MLPs."""


def chosen_parts(names: str) -> frozenset[str]:
    """The parts that a list with commas names; all of them for `all`.

    Raises UsageError for a name that is none of them.
    """
    if names.strip().lower() == "all":
        return frozenset(PARTS)
    asked = [name.strip().lower().replace("-", "_") for name in names.split(",")]
    found = [_OTHER_NAMES.get(name, name) for name in asked]
    odd = [name for name, part in zip(asked, found, strict=True) if part not in PARTS]
    if odd:
        raise UsageError(
            f"--liger-kernels cannot be {quoted(odd[0])}: choose all, or some of {', '.join(PARTS)}; Liger's losses "
            "are --loss-implementation liger and liger-cross-entropy."
        )
    return frozenset(found)


STREAMING_MULTIPROCESSORS = 132
"""Of an H100 or H200: the weight gradient of a norm is summed in as many rows."""
