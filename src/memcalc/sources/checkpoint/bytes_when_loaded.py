"""A checkpoint's weights as a run loads them: what stays packed, and what is turned into the dtype of the run."""

import re
from collections import Counter
from collections.abc import Collection

from memcalc.models.stored_weights import GGUF, StoredWeights
from memcalc.sources.checkpoint.checkpoint import Checkpoint
from memcalc.sources.checkpoint.stored_tensor import Role, StoredTensor
from memcalc.sources.config_vs_weights import part_of

SHORT = {"F32": "fp32", "BF16": "bf16", "F16": "fp16"}
"""The dtypes that a run may load, by their names in files."""


def stored_weights(
    checkpoint: Checkpoint, *, built: Collection[str] | None = None, layers: int | None = None, exact: bool = False
) -> StoredWeights:
    """What `checkpoint` tells about the bytes of weights in memory.

    Args:
        checkpoint: the headers.
        built: the parts that the config builds, as `part_of` names them; tensors of other parts are not loaded. None
            for all.
        layers: how many layers the config has.
        exact: the shapes that the network has are only alike, so that all bytes are to be those of the headers.
    """
    loaded = [t for t in checkpoint.tensors if built is None or part_of(t.weight, layers) in built]
    packed: Counter[str] = Counter()
    unpacked = 0
    for tensor in loaded:
        if tensor.role is Role.PARAMETER and checkpoint.format != "gguf":
            unpacked += tensor.parameters
        elif tensor.role is not Role.BUFFER or checkpoint.format == "gguf":
            packed[_label(tensor)] += tensor.nbytes
    kind = GGUF if checkpoint.format == "gguf" else str(checkpoint.quantization or ", ".join(checkpoint.packings))
    dtype = SHORT.get(checkpoint.stored_dtype or "")
    if not packed and not exact:
        return StoredWeights(dtype=dtype)
    places: Counter[tuple[str, str]] = Counter()
    if checkpoint.format == "gguf":
        for tensor in loaded:
            places[_place(tensor.weight), _label(tensor)] += tensor.nbytes
    return StoredWeights(kind if packed else "", dict(packed.most_common()), unpacked, dtype, exact, places)


_INPUTS = ("per_layer_token_embd.weight", "position_embd.weight", "token_types.weight", "token_embd_norm.weight")
"""Tensors of llama.cpp's input layer, which stays on the host."""


def _place(name: str) -> str:
    """Where a GGUF tensor stands in the model (llama.cpp's names of tensors)."""
    block = re.match(r"blk\.(\d+)\.(.*)", name)
    if block is not None:
        return f"{'experts' if '_exps' in block[2] else 'layer'} {block[1]}"
    if name in _INPUTS:
        return "input"
    return "embedding" if name == "token_embd.weight" else "head" if name == "output.weight" else "other"


def _label(tensor: StoredTensor) -> str:
    if tensor.role is Role.CONSTANT:
        return "quantization constants"
    return f"{tensor.packing or tensor.dtype} weights"
