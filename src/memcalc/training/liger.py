"""Liger's kernels put into a built model."""

from __future__ import annotations

from memcalc import ops
from memcalc.errors import UsageError
from memcalc.nn.layers.mlp import FusedGatedMLP, GatedMLP
from memcalc.nn.layers.norms import FusableNorm
from memcalc.nn.model import Network
from memcalc.tables.liger_kernels import LIGER, chosen_parts


def use_liger(network: Network, model_type: str, names: str = "all") -> None:
    """Let Liger's kernels compute norms, gated MLPs and rotary embeddings, as far as it has them for this family.

    `names` are those of the kernels that are put in. Raises UsageError where there are none.
    """
    parts = chosen_parts(names)
    kernels = LIGER.get(model_type)
    if kernels is None:
        raise UsageError(
            f"no Liger kernels are known for {model_type}, only for {', '.join(sorted(LIGER))}; leave out --kernels."
        )
    for _, module in network.modules():
        if isinstance(module, FusableNorm):
            if "rms_norm" in parts:
                module.kernel = "in place" if kernels.in_place else "new"
        elif isinstance(module, (GatedMLP, FusedGatedMLP)) and kernels.gated:
            module.fused = "swiglu" in parts
        elif kernels.rotary and "rope" in parts and vars(module).get("rotate") is not None:
            module.__dict__["rotate"] = ops.liger_rope
