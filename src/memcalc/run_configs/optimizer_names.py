"""What frameworks call an optimizer, and what memcalc does. One row a spelling; look-up is exact, but for case.

Sources: OptimizerNames of transformers 5.24, CustomSupportedOptimizers of axolotl, torchtune's and DeepSpeed's types.
"""

from __future__ import annotations

from dataclasses import dataclass

from memcalc.errors import ConfigError, UsageError, close_matches
from memcalc.tables.optimizers import optimizer


@dataclass(frozen=True)
class Spelled:
    """Our name, the implementation that the spelling fixes, and the library; `near` is taken where ours is lacking."""

    name: str
    library: str = "torch"
    impl: str = ""
    in_backward: bool = False
    near: str = ""


_BNB, _AO, _GALORE = "bitsandbytes", "torchao", "galore-torch"

NAMES: dict[str, Spelled] = {
    "adamw_torch": Spelled("adamw", impl="foreach"),
    "adamw_torch_fused": Spelled("adamw", impl="fused"),
    "adamw_hf": Spelled("adamw-hf", "Transformers before 5"),
    "adamw_torch_xla": Spelled("adamw"),
    "adamw_torch_npu_fused": Spelled("adamw", impl="fused"),
    "adamw": Spelled("adamw"),
    "adam": Spelled("adam"),
    "torch.optim.adamw": Spelled("adamw"),
    "torch.optim.adam": Spelled("adam"),
    "torch.optim.sgd": Spelled("sgd"),
    "adamw_apex_fused": Spelled("adamw-apex", "apex", near="adamw"),
    "adamw_anyprecision": Spelled("adamw-bf16", "torchdistx"),
    "adamw_bnb_8bit": Spelled("adamw-8bit", _BNB),
    "adamw_8bit": Spelled("adamw-8bit", _BNB),
    "paged_adamw": Spelled("paged-adamw", _BNB),
    "paged_adamw_32bit": Spelled("paged-adamw", _BNB),
    "paged_adamw_8bit": Spelled("paged-adamw-8bit", _BNB),
    "bitsandbytes.optim.adamw": Spelled("adamw-bnb-32bit", _BNB),
    "bitsandbytes.optim.adamw8bit": Spelled("adamw-8bit", _BNB),
    "bitsandbytes.optim.adam8bit": Spelled("adamw-8bit", _BNB),
    "bitsandbytes.optim.pagedadamw": Spelled("paged-adamw", _BNB),
    "bitsandbytes.optim.pagedadamw32bit": Spelled("paged-adamw", _BNB),
    "bitsandbytes.optim.pagedadamw8bit": Spelled("paged-adamw-8bit", _BNB),
    "bitsandbytes.optim.lion8bit": Spelled("lion-8bit", _BNB),
    "lion_32bit": Spelled("lion-32bit", _BNB),
    "lion_8bit": Spelled("lion-8bit", _BNB),
    "lion_pytorch": Spelled("lion", "lion-pytorch"),
    "paged_lion_32bit": Spelled("paged-lion", _BNB),
    "paged_lion_8bit": Spelled("paged-lion-8bit", _BNB),
    "adafactor": Spelled("adafactor-hf", "Transformers"),
    "sgd": Spelled("sgd"),
    "adagrad": Spelled("adagrad"),
    "rmsprop": Spelled("rmsprop"),
    "muon": Spelled("muon", "torch"),
    "lomo": Spelled("lomo", "lomo-optim"),
    "adalomo": Spelled("adalomo", "lomo-optim"),
    "schedule_free_adamw": Spelled("schedule-free-adamw", "schedulefree"),
    "schedule_free_sgd": Spelled("schedule-free-sgd", "schedulefree"),
    "galore_adamw": Spelled("galore-adamw", _GALORE),
    "galore_adamw_layerwise": Spelled("galore-adamw", _GALORE, in_backward=True),
    "galore_adamw_8bit": Spelled("galore-adamw-8bit", _GALORE),
    "galore_adamw_8bit_layerwise": Spelled("galore-adamw-8bit", _GALORE, in_backward=True),
    "galore_adafactor": Spelled("galore-adafactor", _GALORE, near="galore-adamw"),
    "galore_adafactor_layerwise": Spelled("galore-adafactor", _GALORE, in_backward=True, near="galore-adamw"),
    "q_galore_adamw8bit": Spelled("q-galore-adamw-8bit", "q-galore", near="galore-adamw"),
    "adamw_torch_8bit": Spelled("adamw-torchao-8bit", _AO),
    "ao_adamw_8bit": Spelled("adamw-torchao-8bit", _AO),
    "ao_adamw_fp8": Spelled("adamw-torchao-fp8", _AO),
    "adamw_torch_4bit": Spelled("adamw-torchao-4bit", _AO),
    "ao_adamw_4bit": Spelled("adamw-torchao-4bit", _AO),
    "torchao.optim.adamw8bit": Spelled("adamw-torchao-8bit", _AO),
    "torchao.optim.adamw4bit": Spelled("adamw-torchao-4bit", _AO),
    "torchao.optim.adamwfp8": Spelled("adamw-torchao-fp8", _AO),
    "torchao.prototype.low_bit_optim.adamw8bit": Spelled("adamw-torchao-8bit", _AO),
    "torchao.prototype.low_bit_optim.adamw4bit": Spelled("adamw-torchao-4bit", _AO),
    "torchao.prototype.low_bit_optim.cpuoffloadoptimizer": Spelled("adamw-cpu", _AO),
    "ademamix": Spelled("ademamix", _BNB),
    "ademamix_8bit": Spelled("ademamix-8bit", _BNB),
    "paged_ademamix_32bit": Spelled("paged-ademamix", _BNB),
    "paged_ademamix_8bit": Spelled("paged-ademamix-8bit", _BNB),
    "rmsprop_bnb": Spelled("rmsprop-bnb", _BNB),
    "rmsprop_bnb_32bit": Spelled("rmsprop-bnb", _BNB),
    "rmsprop_bnb_8bit": Spelled("rmsprop-8bit", _BNB),
    "apollo_adamw": Spelled("apollo-adamw", "apollo-torch"),
    "apollo_adamw_layerwise": Spelled("apollo-adamw", "apollo-torch", in_backward=True),
    "grokadamw": Spelled("grokadamw", "grokadamw"),
    "stable_adamw": Spelled("stable-adamw", "optimi", near="adamw"),
    "schedule_free_radam": Spelled("schedule-free-radam", "schedulefree"),
    "optimi_adamw": Spelled("optimi-adamw", "optimi", near="adamw"),
    "adopt_adamw": Spelled("adopt", "axolotl", near="adamw"),
    "came_pytorch": Spelled("came", "came-pytorch"),
    "dion": Spelled("dion", "dion"),
    "sinkgd": Spelled("sinkgd", "axolotl"),
    "flash_adamw": Spelled("flash-adamw", "flash-optimizers", near="adamw-8bit"),
    "flash_adam": Spelled("flash-adam", "flash-optimizers", near="adamw-8bit"),
    "flash_sgd": Spelled("flash-sgd", "flash-optimizers", near="sgd"),
    "flash_sgdw": Spelled("flash-sgd", "flash-optimizers", near="sgd"),
    "flash_lion": Spelled("flash-lion", "flash-optimizers", near="lion-8bit"),
    "fusedadam": Spelled("adamw", "DeepSpeed", impl="fused"),
    "deepspeedcpuadam": Spelled("adamw-cpu", "DeepSpeed"),
    "lion": Spelled("lion", "DeepSpeed"),
    "torch_adam": Spelled("adam"),
    "prodigy": Spelled("prodigy", "prodigyopt"),
    "badam": Spelled("badam", "badam"),
    "adam_mini": Spelled("adam-mini", "adam-mini"),
}


def spelled(name: str) -> Spelled:
    """The optimizer of this spelling. Raises ConfigError, which names the close matches."""
    found = NAMES.get(name.strip().lower().replace("-", "_"))
    if found is None:
        raise ConfigError(
            f"No optimizer is called {name[:40]!r} in Transformers, axolotl, torchtune or DeepSpeed"
            f"{close_matches(name, NAMES) or '.'}"
        )
    return found


def is_known(name: str) -> bool:
    """Whether memcalc has an optimizer of this name."""
    try:
        optimizer(name)
    except UsageError:
        return False
    return True
