"""What `from_pretrained` has on the GPU for a moment while it loads weights there, besides those that are loaded.

Transformers 5.24 (core_model_loading.py) builds the model on the meta device and materializes one weight after another
in the order of their names. Experts that files hold apart lie beside the tensor that they are merged into; bitsandbytes
gets each weight in 16 bits, and its 8-bit kernel makes a copy of that.
"""

from __future__ import annotations

from collections.abc import Iterable
from math import prod

from memcalc.common.sizes import rounded
from memcalc.inference.served_model import ServedModel
from memcalc.nn.layers.mixture_of_experts import Experts
from memcalc.nn.module import Module
from memcalc.nn.quantized_layers import QuantizedLinear
from memcalc.nn.state_dict import NamedWeight, weights_by_stack
from memcalc.setup.setup import InferenceSetup
from memcalc.tables.dtypes import ALIASES, FP32

BLOCK = 64
"""Weights that share a scale in bitsandbytes' 4-bit formats."""

_WIDE_COPIES = {"bnb-4bit": 1, "bnb-8bit": 2}
"""How many 16-bit tensors of a weight there are while it is quantized, by kernel."""


def loading_bytes(setup: InferenceSetup, model: ServedModel) -> int:
    """The most bytes beyond those of all weights; 0 where they are loaded on the CPU, and moved when complete."""
    quantizes = any(_copies(module) for module in model.network.all_modules)
    if setup.engine not in ("transformers", "transformers-static") or setup.load_on == "cpu":
        return 0
    if setup.load_on is None and not quantizes and not any(map(_merges, model.network.all_modules)):
        return 0
    width = ALIASES[model.weights.dtype].itemsize
    groups = [(stack, list(weights)) for stack, _, weights in weights_by_stack(model.network)]
    alone = [weight for stack, weights in groups if not stack for weight in weights]
    most = 0
    for stack, weights in groups:
        after = sum(_loaded(weight, width) for weight in alone if stack and weight.name > stack)
        most = max(most, _in_block(weights, width, after))
    return most


def _in_block(weights: Iterable[NamedWeight], width: int, later: int) -> int:
    """The most beyond all weights, of which `later` bytes and those of the block that follow are not there yet."""
    most = 0
    for weight in sorted(weights, key=lambda weight: weight.name, reverse=True):
        most = max(most, _transient(weight, width) - (0 if _merges(weight.owner) else later))
        later += _loaded(weight, width)
    return most


def _loaded(weight: NamedWeight, width: int) -> int:
    """Bytes of a weight as it stays."""
    owner = weight.owner
    if isinstance(owner, QuantizedLinear) and weight.name.endswith("weight"):
        return owner.form.nbytes(owner.shape)
    return rounded(weight.parameter.numel * width)


def _transient(weight: NamedWeight, width: int) -> int:
    """Bytes beside a weight while it is loaded; experts are merged after all weights of the block are there."""
    if _merges(weight.owner) and len(weight.parameter.shape) == 3:
        return rounded(weight.parameter.numel * width)
    if isinstance(weight.owner, QuantizedLinear) and weight.name.endswith("weight"):
        elements = prod(weight.owner.shape)
        nested = 2 * FP32.itemsize * elements // BLOCK if weight.owner.nested else 0  # scales in fp32, and a copy
        return _copies(weight.owner) * rounded(elements * width) + nested
    return 0


def _merges(module: Module) -> bool:
    """Whether files hold these experts one by one; those that lie as [in, out] are stored as they are used."""
    return isinstance(module, Experts) and not module.transposed


def _copies(module: Module) -> int:
    return _WIDE_COPIES.get(module.form.kernel, 0) if isinstance(module, QuantizedLinear) else 0
