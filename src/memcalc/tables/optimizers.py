"""Optimizers: what each keeps between steps, and what its step allocates on top. One row an optimizer.

States and temporaries depend on the shapes of the weights and on the implementation, so a row holds functions of
them. Sizes are bytes as the allocator takes them (rounded up to 512). The steps are in `torch_steps.py` and
`library_steps.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from memcalc.common.escaping import quoted
from memcalc.common.sizes import rounded
from memcalc.errors import UsageError, close_matches
from memcalc.optim import other_libraries, torch_optim
from memcalc.optim.weight import SCALAR, States, Temporaries, Weight, nothing
from memcalc.tables.optimizer_names import REFUSED, SPELLINGS, Spelling
from memcalc.tables.optimizer_states import (
    QUANTILE_MAP,
    adafactor,
    adafactor_fp32,
    adafactor_hf,
    apollo,
    blockwise,
    galore,
    galore_8bit,
    like,
    muon,
    on_gpu,
    paged_states,
    three_blockwise,
    three_wide,
    torchao,
)


class Optimizer(NamedTuple):
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


_TORCH = "torch.optim of PyTorch 2.14"
_BNB = "bitsandbytes 0.50, optim/optimizer.py"
_ADAM = {"foreach": torch_optim.one_list, "for-loop": torch_optim.adam_loop, "fused": nothing}
_IN_PLACE = {"foreach": nothing, "for-loop": nothing, "fused": nothing}
_KERNEL = {"fused": nothing}
_TWO, _ONE = ("momentum", "variance"), ("momentum",)


def _bitsandbytes(name: str, states: States, *, eight: bool, paged: bool = False) -> Optimizer:
    """A row of bitsandbytes: one kernel a weight, without scratch memory."""
    kept = [key for key in states(Weight((4096, 4096), 4)) if "scales" not in key]
    return Optimizer(
        name,
        on_gpu(states) if paged else states,
        _KERNEL,
        _BNB,
        host=paged_states(states) if paged else lambda weight: {},
        once=rounded(QUANTILE_MAP) * len(kept) if eight else 0,
    )


def _torchao(name: str, bits: int, block: int, table: int) -> Optimizer:
    """A row of torchao: a compiled step, one weight after another."""
    states = torchao(bits, block, table=table)
    return Optimizer(name, states, _KERNEL, "torchao 0.14, optim/subclass_*bit.py and adam.py")


ROWS = (
    Optimizer("adamw", like(*_TWO), _ADAM, _TORCH, ("fused",)),
    Optimizer("adam", like(*_TWO), _ADAM, _TORCH, ("fused",)),
    Optimizer("sgd", like(), _IN_PLACE, _TORCH),
    Optimizer("sgd-momentum", like("momentum"), _IN_PLACE, _TORCH),
    Optimizer(
        "adagrad", like("sum of squares"), {"foreach": torch_optim.two_lists, "for-loop": torch_optim.root_loop}, _TORCH
    ),
    Optimizer(
        "rmsprop", like("mean of squares"), {"foreach": torch_optim.one_list, "for-loop": torch_optim.root_loop}, _TORCH
    ),
    Optimizer(
        "adafactor",
        adafactor,
        {"for-loop": torch_optim.adafactor_loop, "foreach": torch_optim.adafactor_foreach},
        f"{_TORCH}, which loops unless foreach is asked for",
    ),
    Optimizer(
        "adafactor-hf",
        adafactor_hf,
        {"for-loop": other_libraries.adafactor},
        "transformers 5.24, optimization.py: Adafactor as Trainer sets it up",
    ),
    Optimizer("adamw-hf", like(*_TWO), {"for-loop": torch_optim.root_loop}, "Transformers 4, optimization.py: AdamW"),
    Optimizer("muon", muon, {"for-loop": torch_optim.muon}, f"{_TORCH} (Muon), AdamW for other weights"),
    Optimizer("lion", like("momentum"), {"for-loop": other_libraries.lion}, "lion-pytorch 0.2"),
    _bitsandbytes("adamw-8bit", blockwise(*_TWO), eight=True),
    _bitsandbytes("lion-8bit", blockwise(*_ONE), eight=True),
    _bitsandbytes("paged-adamw", like(*_TWO, itemsize=4), eight=False, paged=True),
    _bitsandbytes("paged-adamw-8bit", blockwise(*_TWO), eight=True, paged=True),
    _bitsandbytes("paged-lion", like(*_ONE, itemsize=4), eight=False, paged=True),
    _bitsandbytes("paged-lion-8bit", blockwise(*_ONE), eight=True, paged=True),
    _bitsandbytes("adamw-bnb-32bit", like(*_TWO, itemsize=4), eight=False),
    _bitsandbytes("lion-32bit", like(*_ONE, itemsize=4), eight=False),
    _bitsandbytes("rmsprop-bnb", like("mean of squares", itemsize=4), eight=False),
    _bitsandbytes("rmsprop-8bit", blockwise("mean of squares"), eight=True),
    _bitsandbytes("ademamix", three_wide, eight=False),
    _bitsandbytes("ademamix-8bit", three_blockwise, eight=True),
    _bitsandbytes("paged-ademamix", three_wide, eight=False, paged=True),
    _bitsandbytes("paged-ademamix-8bit", three_blockwise, eight=True, paged=True),
    _torchao("adamw-torchao-8bit", 8, 256, 256),
    _torchao("adamw-torchao-4bit", 4, 128, 16),
    _torchao("adamw-torchao-fp8", 8, 256, 0),
    Optimizer(
        "adamw-bf16",
        like(*_TWO, itemsize=2),
        {"for-loop": other_libraries.any_precision},
        "torchdistx AnyPrecisionAdamW with bf16 momentum and variance",
    ),
    Optimizer(
        "adamw-apex",
        like(*_TWO, itemsize=4),
        _KERNEL,
        "apex FusedAdam: fp32 states whatever the weights are",
        once=SCALAR,
    ),
    Optimizer("galore-adamw", galore, {"for-loop": other_libraries.galore(refresh=True)}, "galore-torch 1.0"),
    Optimizer(
        "galore-adamw-8bit",
        galore_8bit,
        {"for-loop": other_libraries.galore_8bit},
        "galore-torch 1.0 on bitsandbytes",
        once=2 * rounded(QUANTILE_MAP),
    ),
    Optimizer("apollo-adamw", apollo, {"for-loop": other_libraries.apollo}, "apollo-torch 1.0, random projections"),
    Optimizer(
        "prodigy",
        like("momentum", "variance", "numerators", "weights at the start"),
        {"for-loop": other_libraries.denominators},
        "prodigyopt 1.1, slice_p 1",
    ),
    Optimizer(
        "grokadamw",
        like("momentum", "variance", "slow gradient"),
        {"for-loop": other_libraries.grokadamw},
        "grokadamw 0.1",
    ),
    Optimizer("lomo", like(), {"for-loop": other_libraries.lomo}, "lomo-optim 0.1", in_backward=True),
    Optimizer("adalomo", adafactor_fp32, {"for-loop": other_libraries.adalomo}, "lomo-optim 0.1", in_backward=True),
    Optimizer(
        "schedule-free-adamw",
        like("averaged weights", "variance"),
        {"foreach": torch_optim.one_list, "for-loop": other_libraries.denominators},
        "schedulefree 1.4",
    ),
    Optimizer(
        "schedule-free-radam",
        like("averaged weights", "variance"),
        {"foreach": torch_optim.one_list, "for-loop": other_libraries.denominators},
        "schedulefree 1.4",
    ),
    Optimizer(
        "schedule-free-sgd", like("averaged weights"), {"foreach": nothing, "for-loop": nothing}, "schedulefree 1.4"
    ),
)

OPTIMIZERS = {row.name: row for row in ROWS}


def optimizer(name: str) -> Optimizer:
    """The optimizer that a trainer calls `name`. Raises UsageError, which names the close matches or says why not."""
    return OPTIMIZERS[spelled(name).row]


def spelled(name: str) -> Spelling:
    """What a trainer's name of an optimizer stands for.

    Raises UsageError where no row describes it.
    """
    if name in OPTIMIZERS:
        return Spelling(name)
    if name in SPELLINGS:
        return SPELLINGS[name]
    why = {_squeezed(other): why for other, why in REFUSED.items()}.get(_squeezed(name.rsplit(".", 1)[-1]))
    if why is not None:
        raise UsageError(f"optimizer {quoted(name)} is not computed: {why}. `memcalc optimizers` lists those that are.")
    same = next((own for own in OPTIMIZERS if _squeezed(own) == _squeezed(name)), None)
    near = f"; did you mean {same!r}?" if same else close_matches(name, OPTIMIZERS) or ";"
    raise UsageError(f"optimizer {quoted(name)} is not known{near} `memcalc optimizers` lists them.")


def _squeezed(name: str) -> str:
    """A name as it is compared with those that are refused: classes and keys are written apart in other ways."""
    return name.lower().replace("_", "").replace("-", "")
