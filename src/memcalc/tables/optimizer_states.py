"""What optimizers keep between steps: bytes of each state, as functions of a weight.

Sizes are bytes as the allocator takes them (rounded up to 512).
"""

from __future__ import annotations

from collections.abc import Mapping

from memcalc.common.sizes import rounded
from memcalc.optim import other_libraries
from memcalc.optim.weight import SCALAR, States, Weight

SMALLEST_8BIT = 4096
"""bitsandbytes keeps the states of smaller weights in 32 bits (`min_8bit_size`)."""

BLOCK_8BIT = 256
"""Elements that share one fp32 scale in bitsandbytes' 8-bit states."""

SMALLEST_PAGED = 100_000
"""bitsandbytes pages the states of weights with at least this many elements."""

QUANTILE_MAP = 1024
"""A table of 256 fp32 values; bitsandbytes keeps one for signed and one for unsigned 8-bit states."""


def like(*names: str, itemsize: int | None = None) -> States:
    """States as large as the weight, in its dtype or with elements of `itemsize` bytes."""
    return lambda weight: {name: weight.sized(itemsize) for name in names}


def adafactor(weight: Weight) -> Mapping[str, int]:
    """Row and column statistics of a matrix; the full variance of a vector."""
    if len(weight.shape) < 2:
        return {"variance": weight.nbytes}
    return {"row statistics": weight.rows(), "column statistics": weight.columns()}


def adafactor_fp32(weight: Weight) -> Mapping[str, int]:
    """Transformers' and AdaLOMO's statistics are fp32."""
    return adafactor(Weight(weight.shape, 4))


def adafactor_hf(weight: Weight) -> Mapping[str, int]:
    """Statistics, and the weight's root mean square as a tensor of one element."""
    return {**adafactor_fp32(weight), "root mean squares": SCALAR}


def muon(weight: Weight) -> Mapping[str, int]:
    """A momentum for a hidden matrix, AdamW's two states for everything else."""
    names = ("momentum",) if weight.is_hidden_matrix else ("momentum", "variance")
    return dict.fromkeys(names, weight.nbytes)


def galore(weight: Weight) -> Mapping[str, int]:
    """AdamW's states of the projected gradient, and the projection.

    The projection of an fp32 gradient is a slice of a whole factor, which it keeps alive; a 16-bit one is a copy.
    """
    if not weight.is_hidden_matrix:
        return {"momentum": weight.nbytes, "variance": weight.nbytes}
    small = Weight(other_libraries.projected(weight), weight.itemsize)
    side, rank = min(weight.shape), min(small.shape[0], small.shape[1], weight.rank)
    kept = Weight((side, rank if weight.itemsize < 4 else side), weight.itemsize)
    return {"momentum": small.nbytes, "variance": small.nbytes, "projections": kept.nbytes}


def blockwise(*names: str) -> States:
    """8-bit states with an fp32 scale per block; fp32 ones for a small weight."""

    def states(weight: Weight) -> Mapping[str, int]:
        if weight.wide_states:
            return {f"fp32 {name} of embeddings": weight.sized(4) for name in names}
        if weight.count < SMALLEST_8BIT:
            return {f"fp32 {name} of small weights": weight.sized(4) for name in names}
        scales = rounded(4 * -(-weight.count // BLOCK_8BIT))
        return {name: weight.sized(1) for name in names} | {"scales per block": len(names) * scales}

    return states


def on_gpu(states: States) -> States:
    """What of `states` is not paged: those of small weights, and scales."""

    def kept(weight: Weight) -> Mapping[str, int]:
        found = states(weight)
        return {name: size for name, size in found.items() if weight.count < SMALLEST_PAGED or "scales" in name}

    return kept


def paged_states(states: States) -> States:
    """What of `states` is paged."""

    def kept(weight: Weight) -> Mapping[str, int]:
        stays = on_gpu(states)(weight)
        return {name: size for name, size in states(weight).items() if name not in stays}

    return kept


def galore_8bit(weight: Weight) -> Mapping[str, int]:
    """bitsandbytes' states of the projected gradient, and the projection; its own states for all other weights."""
    eight = blockwise("momentum", "variance")
    if not weight.is_hidden_matrix:
        return eight(weight)
    small = Weight(other_libraries.projected(weight), weight.itemsize)
    return {**eight(small), "projections": galore(weight)["projections"]}


def apollo(weight: Weight) -> Mapping[str, int]:
    """AdamW's states of the gradient in a random subspace, and the random projection."""
    if not weight.is_hidden_matrix:
        return {"momentum": weight.nbytes, "variance": weight.nbytes}
    small = Weight(other_libraries.projected(weight), weight.itemsize)
    side, rank = min(weight.shape), min(*weight.shape, weight.rank)
    projection = Weight((side, rank), weight.itemsize)
    return {"momentum": small.nbytes, "variance": small.nbytes, "projections": projection.nbytes}


def torchao(bits: int, block: int, *, table: int) -> States:
    """torchao's subclasses: codes, an fp32 scale for each block, a table of `table` fp32 values for each state.

    A weight of fewer than 4,096 elements, or of no whole number of blocks, keeps states in its own dtype.
    """

    def states(weight: Weight) -> Mapping[str, int]:
        if weight.count < SMALLEST_8BIT or weight.count % block:
            return {"momentum": weight.nbytes, "variance": weight.nbytes}
        codes = rounded(weight.count * bits // 8)
        found = {"momentum": codes, "variance": codes, "scales per block": 2 * rounded(4 * weight.count // block)}
        return found | ({"tables of values": 2 * rounded(4 * table)} if table else {})

    return states


def three_blockwise(weight: Weight) -> Mapping[str, int]:
    """AdEMAMix: two momenta in one buffer, and a variance; 8 bits with scales, fp32 for a small weight."""
    if weight.wide_states or weight.count < SMALLEST_8BIT:
        return {"fp32 momenta of small weights": rounded(8 * weight.count), "fp32 variance": weight.sized(4)}
    blocks = -(-weight.count // BLOCK_8BIT)
    scales = rounded(8 * blocks) + rounded(4 * blocks)
    return {"two momenta": rounded(2 * weight.count), "variance": weight.sized(1), "scales per block": scales}


def three_wide(weight: Weight) -> Mapping[str, int]:
    """AdEMAMix in 32 bits."""
    return {"two momenta": rounded(8 * weight.count), "variance": weight.sized(4)}
