"""What trainers call an optimizer: Transformers, TRL, axolotl, LLaMA-Factory, torchtune, and the libraries' classes.

Sources: training_args.py of Transformers 5.24 (`OptimizerNames`) and 4.x, axolotl's and LLaMA-Factory's configs,
torchtune's recipes (`optimizer._component_`), bitsandbytes 0.50 and torchao 0.14 for the classes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple


class Spelling(NamedTuple):
    """A row of the table of optimizers, and what the name says besides: an implementation, or steps in backward."""

    row: str
    impl: str | None = None
    in_backward: bool = False


def _names(row: str, *names: str, impl: str | None = None, in_backward: bool = False) -> dict[str, Spelling]:
    return {name: Spelling(row, impl, in_backward) for name in names}


SPELLINGS: Mapping[str, Spelling] = {
    **_names("adamw", "adamw_torch", "torch.optim.AdamW", "AdamW"),
    **_names("adamw", "adamw_torch_fused", impl="fused"),
    **_names("adam", "torch.optim.Adam", "Adam"),
    **_names("sgd", "torch.optim.SGD", "SGD"),
    **_names("adagrad", "torch.optim.Adagrad"),
    **_names("rmsprop", "torch.optim.RMSprop"),
    **_names("adafactor", "torch.optim.Adafactor"),
    **_names("adafactor-hf", "adafactor_hf", "transformers.optimization.Adafactor"),
    **_names("adamw-hf", "adamw_hf"),
    **_names("muon", "torch.optim.Muon"),
    **_names("lion", "lion_pytorch"),
    **_names(
        "adamw-8bit",
        "adamw_8bit",
        "adamw_bnb_8bit",
        "AdamW8bit",
        "bitsandbytes.optim.AdamW8bit",
        "bnb.optim.AdamW8bit",
        "adam8bit",
        "bitsandbytes.optim.Adam8bit",
        "bnb.optim.Adam8bit",
    ),
    **_names("adamw-bnb-32bit", "adamw_bnb_32bit", "bitsandbytes.optim.AdamW", "bitsandbytes.optim.AdamW32bit"),
    **_names("adamw-bnb-32bit", "AdamW32bit", "bitsandbytes.optim.Adam", "bitsandbytes.optim.Adam32bit"),
    **_names("paged-adamw", "bitsandbytes.optim.PagedAdam", "bitsandbytes.optim.PagedAdam32bit"),
    **_names("paged-adamw-8bit", "bitsandbytes.optim.PagedAdam8bit"),
    **_names("paged-adamw", "paged_adamw", "paged_adamw_32bit", "PagedAdamW", "bitsandbytes.optim.PagedAdamW"),
    **_names("paged-adamw", "bitsandbytes.optim.PagedAdamW32bit", "PagedAdamW32bit"),
    **_names("paged-adamw-8bit", "paged_adamw_8bit", "PagedAdamW8bit", "bitsandbytes.optim.PagedAdamW8bit"),
    **_names("lion-32bit", "lion_32bit", "bitsandbytes.optim.Lion", "bitsandbytes.optim.Lion32bit"),
    **_names("lion-8bit", "lion_8bit", "bitsandbytes.optim.Lion8bit"),
    **_names("paged-lion", "paged_lion_32bit", "bitsandbytes.optim.PagedLion"),
    **_names("paged-lion-8bit", "paged_lion_8bit", "bitsandbytes.optim.PagedLion8bit"),
    **_names("rmsprop-bnb", "rmsprop_bnb", "rmsprop_bnb_32bit", "bitsandbytes.optim.RMSprop"),
    **_names("rmsprop-8bit", "rmsprop_bnb_8bit", "bitsandbytes.optim.RMSprop8bit"),
    **_names("ademamix", "ademamix_32bit", "bitsandbytes.optim.AdEMAMix"),
    **_names("ademamix-8bit", "ademamix_8bit", "bitsandbytes.optim.AdEMAMix8bit"),
    **_names("paged-ademamix", "paged_ademamix_32bit", "bitsandbytes.optim.PagedAdEMAMix"),
    **_names("paged-ademamix-8bit", "paged_ademamix_8bit", "bitsandbytes.optim.PagedAdEMAMix8bit"),
    **_names("adamw-torchao-8bit", "adamw_torch_8bit", "ao_adamw_8bit", "torchao.optim.AdamW8bit"),
    **_names("adamw-torchao-8bit", "torchao.prototype.low_bit_optim.AdamW8bit"),
    **_names("adamw-torchao-4bit", "adamw_torch_4bit", "ao_adamw_4bit", "torchao.optim.AdamW4bit", "AdamW4bit"),
    **_names("adamw-torchao-4bit", "torchao.prototype.low_bit_optim.AdamW4bit"),
    **_names("adamw-torchao-fp8", "adamw_torch_fp8", "ao_adamw_fp8", "torchao.optim.AdamWFp8", "AdamWFp8"),
    **_names("adamw-bf16", "adamw_anyprecision"),
    **_names("adamw-apex", "adamw_apex_fused", "apex.optimizers.FusedAdam", "FusedAdam"),
    **_names("galore-adamw", "galore_adamw"),
    **_names("galore-adamw", "galore_adamw_layerwise", in_backward=True),
    **_names("galore-adamw-8bit", "galore_adamw_8bit"),
    **_names("galore-adamw-8bit", "galore_adamw_8bit_layerwise", in_backward=True),
    **_names("apollo-adamw", "apollo_adamw"),
    **_names("apollo-adamw", "apollo_adamw_layerwise", in_backward=True),
    **_names("schedule-free-adamw", "schedule_free_adamw"),
    **_names("schedule-free-radam", "schedule_free_radam"),
    **_names("schedule-free-sgd", "schedule_free_sgd"),
}

_NOT_HERE = "its states or its step are not described here"

REFUSED: Mapping[str, str] = {
    "adamw_torch_xla": "it runs on TPUs",
    "adamw_torch_npu_fused": "it runs on Ascend NPUs",
    "galore_adafactor": f"{_NOT_HERE}; galore-adamw is",
    "galore_adafactor_layerwise": f"{_NOT_HERE}; galore_adamw_layerwise is",
    "q_galore_adamw8bit": "it keeps the weights in 8 bits, which no row here does; galore-adamw-8bit is the nearest",
    "q_apollo_adamw": "it keeps the weights in 8 bits, which no row here does; apollo-adamw is the nearest",
    "q_apollo": "it keeps the weights in 8 bits, which no row here does; apollo-adamw is the nearest",
    "stable_adamw": f"{_NOT_HERE} (optimi's states in 16 bits have a third one); adamw is the nearest",
    "optimi_adamw": f"{_NOT_HERE} (optimi's states in 16 bits have a third one); adamw is the nearest",
    "adopt_adamw": f"{_NOT_HERE}; adamw keeps as many states",
    "came_pytorch": f"{_NOT_HERE}; adafactor-hf is the nearest",
    "came": f"{_NOT_HERE}; adafactor-hf is the nearest",
    "stableadamw": f"{_NOT_HERE} (optimi's states in 16 bits have a third one); adamw is the nearest",
    "adan": f"{_NOT_HERE}; it keeps a state more than adamw",
    "soap": f"{_NOT_HERE}",
    "shampoo": f"{_NOT_HERE}",
    "distributed_shampoo": f"{_NOT_HERE}",
    "nadam": f"{_NOT_HERE}; adamw keeps as many states",
    "radam": f"{_NOT_HERE}; adamw keeps as many states",
    "adadelta": f"{_NOT_HERE}; adamw keeps as many states",
    "adamax": f"{_NOT_HERE}; adamw keeps as many states",
    "asgd": f"{_NOT_HERE}; sgd-momentum keeps as many states",
    "rprop": f"{_NOT_HERE}; adamw keeps as many states",
    "sparse_adam": f"{_NOT_HERE}; it is for sparse gradients",
    "dion": f"{_NOT_HERE}; muon is the nearest",
    "muon_8bit": f"{_NOT_HERE}; muon keeps its momentum in the weights' dtype",
    "muon-8bit": f"{_NOT_HERE}; muon keeps its momentum in the weights' dtype",
    "muon_fp32": f"{_NOT_HERE}; muon keeps its momentum in the weights' dtype",
    "badam": "it trains a block at a time; --train-only names the blocks that are trained",
    "adam_mini": f"{_NOT_HERE}; adamw is an upper bound",
    "adam-mini": f"{_NOT_HERE}; adamw is an upper bound",
    "sinkgd": f"{_NOT_HERE}; sgd keeps no states either",
    "flash_adamw": f"{_NOT_HERE}; adamw-torchao-8bit is the nearest",
    "flash_adam": f"{_NOT_HERE}; adamw-torchao-8bit is the nearest",
    "flash_sgd": f"{_NOT_HERE}; sgd-momentum is an upper bound",
    "flash_sgdw": f"{_NOT_HERE}; sgd-momentum is an upper bound",
    "flash_lion": f"{_NOT_HERE}; lion-8bit is the nearest",
    "lbfgs": f"{_NOT_HERE}",
    "lamb": f"{_NOT_HERE}; adamw keeps as many states",
    "lars": f"{_NOT_HERE}; sgd-momentum keeps as many states",
    "lamb_8bit": f"{_NOT_HERE}; adamw-8bit keeps as many states",
    "lars_8bit": f"{_NOT_HERE}; lion-8bit keeps as many states",
    "sgd_8bit": f"{_NOT_HERE}; lion-8bit keeps as many states",
    "adagrad_8bit": f"{_NOT_HERE}; lion-8bit keeps as many states",
    "sophia": f"{_NOT_HERE}",
    "deepspeed_cpu_adam": "its states live in host memory; choose ZeRO with offloading",
    "cpu_adam": "its states live in host memory; choose ZeRO with offloading",
    "cpu_offload_optimizer": "its states live in host memory; paged-adamw keeps them there too",
    "optimizer_in_backward": "it is a way to step: choose --optimizer-in-backward, and the optimizer that it wraps",
    "onebitadam": f"{_NOT_HERE}",
}
"""Optimizers that a trainer accepts and memcalc does not compute, and why."""
