"""DeepSpeed and FSDP files that frameworks ship, by name: what a `deepspeed: NAME` stands for when it is not given.

Sources: axolotl deepspeed_configs/ (067b021c8), LLaMA-Factory examples/deepspeed/ (ff6d4d12e), ms-swift swift/config/
(3602360a5), TRL examples/accelerate_configs/ (1.10).
"""

from __future__ import annotations

from typing import Any

_AUTO: dict[str, Any] = {"bf16": {"enabled": "auto"}, "fp16": {"enabled": "auto"}}
_CPU = {"device": "cpu"}
_AUTO_BUCKETS = {
    "contiguous_gradients": True,
    "reduce_bucket_size": "auto",
    "stage3_prefetch_bucket_size": "auto",
    "stage3_param_persistence_threshold": "auto",
}


def _zero(precision: dict[str, Any], **zero: Any) -> dict[str, Any]:
    return {**precision, "zero_optimization": zero}


def _axolotl_zero3(**more: Any) -> dict[str, Any]:
    ways = {**_AUTO_BUCKETS, "sub_group_size": 0, "max_live_parameters": 0, "max_reuse_distance": 0}
    return {"stage": 3, "overlap_comm": True, **ways, **more}


def _buckets(stage: int, size: float, **more: Any) -> dict[str, Any]:
    both = {"allgather_bucket_size": size, "reduce_bucket_size": size}
    return _zero(_AUTO, stage=stage, overlap_comm=False, reduce_scatter=True, contiguous_gradients=True, **both, **more)


def _zero3(**more: Any) -> dict[str, Any]:
    ways = {"sub_group_size": 1e9, "stage3_max_live_parameters": 1e9, "stage3_max_reuse_distance": 1e9}
    return _zero(_AUTO, stage=3, overlap_comm=False, **_AUTO_BUCKETS, **ways, **more)


_BF16 = {"bf16": {"enabled": True}}
_ONE = _zero(_AUTO, stage=1, overlap_comm=True)
_TWO = _zero(_AUTO, stage=2, offload_optimizer=_CPU, contiguous_gradients=True, overlap_comm=True)

PRESETS: dict[str, dict[str, dict[str, Any]]] = {
    "axolotl": {
        "zero1.json": _ONE,
        "zero1_torch_compile.json": _ONE,
        "zero2.json": _TWO,
        "zero2_torch_compile.json": _TWO,
        "zero3.json": _zero(_AUTO, **_axolotl_zero3()),
        "zero3_bf16.json": _zero(_BF16, **_axolotl_zero3()),
        "zero3_bf16_cpuoffload_all.json": _zero(_BF16, **_axolotl_zero3(offload_optimizer=_CPU, offload_param=_CPU)),
        "zero3_bf16_cpuoffload_params.json": _zero(_BF16, **_axolotl_zero3(offload_param=_CPU)),
    },
    "llamafactory": {
        "ds_z0_config.json": _buckets(0, 5e8),
        "ds_z2_config.json": _buckets(2, 5e8, round_robin_gradients=True),
        "ds_z2_offload_config.json": _buckets(2, 5e8, round_robin_gradients=True, offload_optimizer=_CPU),
        "ds_z2_autotp_config.json": {**_buckets(2, 5e8), "tensor_parallel": {"autotp_size": 2}},
        "ds_z3_config.json": _zero3(),
        "ds_z3_offload_config.json": _zero3(offload_optimizer=_CPU, offload_param=_CPU),
        "ds_z3_fp8_config.json": _zero(
            {"bf16": {"enabled": "auto"}},
            stage=3,
            overlap_comm=False,
            contiguous_gradients=True,
            offload_optimizer=_CPU,
            sub_group_size=1e9,
            reduce_bucket_size=12845056,
            stage3_prefetch_bucket_size=11560550,
            stage3_param_persistence_threshold=35840,
            stage3_max_live_parameters=1e9,
            stage3_max_reuse_distance=1e9,
        ),
    },
    "msswift": {
        "zero0": _buckets(0, 2e8),
        "zero1": _buckets(1, 2e8),
        "zero2": _buckets(2, 2e8),
        "zero2_offload": _buckets(2, 2e8, offload_optimizer=_CPU),
        "zero3": _zero3(),
        "zero3_offload": _zero3(offload_optimizer=_CPU, offload_param=_CPU),
    },
}
"""`zero_optimization` and precision of each shipped DeepSpeed file, by framework and name."""

_LAUNCH = {"num_machines": 1, "num_processes": 8, "mixed_precision": "bf16"}
_FSDP = {
    "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
    "fsdp_offload_params": False,
    "fsdp_activation_checkpointing": False,
}

ACCELERATE: dict[str, dict[str, Any]] = {
    "multi_gpu": {**_LAUNCH, "distributed_type": "MULTI_GPU"},
    "single_gpu": {**_LAUNCH, "distributed_type": "NO", "num_processes": 1},
    **{
        f"{prefix}zero{stage}": {
            **_LAUNCH,
            "distributed_type": "DEEPSPEED",
            "deepspeed_config": {
                "zero_stage": stage,
                "offload_optimizer_device": "none",
                "offload_param_device": "none",
            },
        }
        for stage in (1, 2, 3)
        for prefix in ("", "deepspeed_")
    },
    "fsdp1": {**_LAUNCH, "distributed_type": "FSDP", "fsdp_config": {**_FSDP, "fsdp_sharding_strategy": "FULL_SHARD"}},
    "fsdp2": {
        **_LAUNCH,
        "distributed_type": "FSDP",
        "fsdp_config": {**_FSDP, "fsdp_version": 2, "fsdp_reshard_after_forward": True},
    },
    "fsdp_config_qlora": {
        **_LAUNCH,
        "num_processes": 2,
        "distributed_type": "FSDP",
        "fsdp_config": {**_FSDP, "fsdp_offload_params": True, "fsdp_sharding_strategy": "FULL_SHARD"},
    },
}
"""Accelerate files of TRL's examples and of PEFT's (fsdp_config_qlora), by name without `.yaml`."""
