"""Optimizers: what each keeps between steps, and what its step allocates on top. One row an optimizer.

States and temporaries depend on the shapes of the weights and on the implementation, so a row holds functions of
them. Sizes are bytes as the allocator takes them (rounded up to 512). The steps are in `torch_steps.py` and
`library_steps.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from memcalc.common.escaping import quoted
from memcalc.common.sizes import rounded
from memcalc.errors import UsageError, close_matches
from memcalc.optim import other_libraries, torch_optim
from memcalc.optim.weight import SCALAR, States, Temporaries, Weight, nothing

SMALLEST_8BIT = 4096
"""bitsandbytes keeps the states of smaller weights in 32 bits (`min_8bit_size`)."""

BLOCK_8BIT = 256
"""Elements that share one fp32 scale in bitsandbytes' 8-bit states."""

SMALLEST_PAGED = 100_000
"""bitsandbytes pages the states of weights with at least this many elements."""

QUANTILE_MAP = 1024
"""A table of 256 fp32 values; bitsandbytes keeps one for signed and one for unsigned 8-bit states."""


@dataclass(frozen=True)
class Optimizer:
    """One optimizer: `states` gives the bytes kept for a weight by name of state, `step` the most that a step adds.

    `step` has a function for each implementation that exists, PyTorch's default on CUDA first. `host` gives the bytes
    of states that live in host memory (CUDA managed memory that is paged in and out). `once` is kept whatever the
    weights are. `in_backward` marks an optimizer that steps each weight during backward.
    """

    name: str
    states: States
    step: Mapping[str, Temporaries]
    source: str
    counter_on_device: tuple[str, ...] = ()
    """Implementations that keep each weight's step counter on the GPU (512 bytes each)."""
    host: States = lambda weight: {}
    once: int = 0
    in_backward: bool = False
    aliases: tuple[str, ...] = ()
    """What Hugging Face Trainer calls it (`optim=`)."""


def _like(*names: str, itemsize: int | None = None) -> States:
    """States as large as the weight, in its dtype or with elements of `itemsize` bytes."""
    return lambda weight: {name: weight.sized(itemsize) for name in names}


def _adafactor(weight: Weight) -> Mapping[str, int]:
    """Row and column statistics of a matrix; the full variance of a vector."""
    if len(weight.shape) < 2:
        return {"variance": weight.nbytes}
    return {"row statistics": weight.rows(), "column statistics": weight.columns()}


def _adafactor_fp32(weight: Weight) -> Mapping[str, int]:
    """Transformers' and AdaLOMO's statistics are fp32."""
    return _adafactor(Weight(weight.shape, 4))


def _adafactor_hf(weight: Weight) -> Mapping[str, int]:
    """Statistics, and the weight's root mean square as a tensor of one element."""
    return {**_adafactor_fp32(weight), "root mean squares": SCALAR}


def _muon(weight: Weight) -> Mapping[str, int]:
    """A momentum for a hidden matrix, AdamW's two states for everything else."""
    names = ("momentum",) if weight.is_hidden_matrix else ("momentum", "variance")
    return dict.fromkeys(names, weight.nbytes)


def _galore(weight: Weight) -> Mapping[str, int]:
    """AdamW's states of the projected gradient, and the projection.

    The projection of an fp32 gradient is a slice of a whole factor, which it keeps alive; a 16-bit one is a copy.
    """
    if not weight.is_hidden_matrix:
        return {"momentum": weight.nbytes, "variance": weight.nbytes}
    small = Weight(other_libraries.projected(weight), weight.itemsize)
    side, rank = min(weight.shape), min(small.shape[0], small.shape[1], weight.rank)
    kept = Weight((side, rank if weight.itemsize < 4 else side), weight.itemsize)
    return {"momentum": small.nbytes, "variance": small.nbytes, "projections": kept.nbytes}


def _blockwise(*names: str) -> States:
    """8-bit states with an fp32 scale per block; fp32 ones for a small weight."""

    def states(weight: Weight) -> Mapping[str, int]:
        if weight.wide_states:
            return {f"fp32 {name} of embeddings": weight.sized(4) for name in names}
        if weight.count < SMALLEST_8BIT:
            return {f"fp32 {name} of small weights": weight.sized(4) for name in names}
        scales = rounded(4 * -(-weight.count // BLOCK_8BIT))
        return {name: weight.sized(1) for name in names} | {"scales per block": len(names) * scales}

    return states


def _on_gpu(states: States) -> States:
    """What of `states` is not paged: those of small weights, and scales."""

    def kept(weight: Weight) -> Mapping[str, int]:
        found = states(weight)
        return {name: size for name, size in found.items() if weight.count < SMALLEST_PAGED or "scales" in name}

    return kept


def _paged(states: States) -> States:
    """What of `states` is paged."""

    def kept(weight: Weight) -> Mapping[str, int]:
        stays = _on_gpu(states)(weight)
        return {name: size for name, size in states(weight).items() if name not in stays}

    return kept


_TORCH = "torch.optim of PyTorch 2.14"
_BNB = "bitsandbytes 0.50, optim/optimizer.py"
_ADAM = {"foreach": torch_optim.one_list, "for-loop": torch_optim.adam_loop, "fused": nothing}
_IN_PLACE = {"foreach": nothing, "for-loop": nothing, "fused": nothing}
_KERNEL = {"fused": nothing}
_TWO, _ONE = ("momentum", "variance"), ("momentum",)


def _bitsandbytes(name: str, states: States, *aliases: str, eight: bool, paged: bool = False) -> Optimizer:
    """A row of bitsandbytes: one kernel a weight, without scratch memory."""
    once = rounded(QUANTILE_MAP) * len([key for key in states(Weight((4096, 4096), 4)) if "scales" not in key])
    return Optimizer(
        name,
        _on_gpu(states) if paged else states,
        _KERNEL,
        _BNB,
        host=_paged(states) if paged else lambda weight: {},
        once=once if eight else 0,
        aliases=aliases,
    )


ROWS = (
    Optimizer("adamw", _like(*_TWO), _ADAM, _TORCH, ("fused",), aliases=("adamw_torch", "adamw_torch_fused")),
    Optimizer("adam", _like(*_TWO), _ADAM, _TORCH, ("fused",)),
    Optimizer("sgd", _like(), _IN_PLACE, _TORCH),
    Optimizer("sgd-momentum", _like("momentum"), _IN_PLACE, _TORCH),
    Optimizer(
        "adagrad",
        _like("sum of squares"),
        {"foreach": torch_optim.two_lists, "for-loop": torch_optim.root_loop},
        _TORCH,
    ),
    Optimizer(
        "rmsprop",
        _like("mean of squares"),
        {"foreach": torch_optim.one_list, "for-loop": torch_optim.root_loop},
        _TORCH,
    ),
    Optimizer(
        "adafactor",
        _adafactor,
        {"foreach": torch_optim.adafactor_foreach, "for-loop": torch_optim.adafactor_loop},
        _TORCH,
    ),
    Optimizer(
        "adafactor-hf",
        _adafactor_hf,
        {"for-loop": other_libraries.adafactor},
        "transformers 5.24, optimization.py: Adafactor as Trainer sets it up",
    ),
    Optimizer("muon", _muon, {"for-loop": torch_optim.muon}, f"{_TORCH} (Muon), AdamW for other weights"),
    Optimizer("lion", _like("momentum"), {"for-loop": other_libraries.lion}, "lion-pytorch 0.2"),
    _bitsandbytes("adamw-8bit", _blockwise(*_TWO), "adamw_8bit", "adamw_bnb_8bit", eight=True),
    _bitsandbytes("lion-8bit", _blockwise(*_ONE), "lion_8bit", eight=True),
    _bitsandbytes("paged-adamw", _like(*_TWO, itemsize=4), "paged_adamw", "paged_adamw_32bit", eight=False, paged=True),
    _bitsandbytes("paged-adamw-8bit", _blockwise(*_TWO), "paged_adamw_8bit", eight=True, paged=True),
    _bitsandbytes("paged-lion", _like(*_ONE, itemsize=4), "paged_lion_32bit", eight=False, paged=True),
    _bitsandbytes("paged-lion-8bit", _blockwise(*_ONE), "paged_lion_8bit", eight=True, paged=True),
    Optimizer(
        "adamw-bf16",
        _like(*_TWO, itemsize=2),
        {"for-loop": other_libraries.any_precision},
        "torchdistx AnyPrecisionAdamW with bf16 momentum and variance",
        aliases=("adamw_anyprecision",),
    ),
    Optimizer(
        "adamw-apex",
        _like(*_TWO, itemsize=4),
        _KERNEL,
        "apex FusedAdam: fp32 states whatever the weights are",
        once=SCALAR,
        aliases=("adamw_apex_fused",),
    ),
    Optimizer(
        "galore-adamw",
        _galore,
        {"for-loop": other_libraries.galore(refresh=True)},
        "galore-torch 1.0",
        aliases=("galore_adamw",),
    ),
    Optimizer("lomo", _like(), {"for-loop": other_libraries.lomo}, "lomo-optim 0.1", in_backward=True),
    Optimizer("adalomo", _adafactor_fp32, {"for-loop": other_libraries.adalomo}, "lomo-optim 0.1", in_backward=True),
    Optimizer(
        "schedule-free-adamw",
        _like("averaged weights", "variance"),
        {"foreach": torch_optim.one_list, "for-loop": other_libraries.denominators},
        "schedulefree 1.4",
        aliases=("schedule_free_adamw",),
    ),
    Optimizer(
        "schedule-free-sgd",
        _like("averaged weights"),
        {"foreach": nothing, "for-loop": nothing},
        "schedulefree 1.4",
        aliases=("schedule_free_sgd",),
    ),
)

OPTIMIZERS = {row.name: row for row in ROWS}
_NAMES = {name: row for row in ROWS for name in (row.name, *row.aliases)}


def optimizer(name: str) -> Optimizer:
    """The optimizer of this exact name or alias. Raises UsageError, which names the close matches."""
    try:
        return _NAMES[name]
    except KeyError:
        near = close_matches(name, OPTIMIZERS) or ";"
        raise UsageError(f"optimizer {quoted(name)} is not known{near} `memcalc optimizers` lists them.") from None
