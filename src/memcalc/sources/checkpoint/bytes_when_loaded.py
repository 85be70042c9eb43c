"""A checkpoint's weights as a run loads them: what stays packed, and what is turned into the dtype of the run."""

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
    return StoredWeights(kind if packed else "", dict(packed.most_common()), unpacked, dtype, exact)


def _label(tensor: StoredTensor) -> str:
    if tensor.role is Role.CONSTANT:
        return "quantization constants"
    return f"{tensor.packing or tensor.dtype} weights"
