"""Rows of `measured/distributed*.jsonl`: one of several GPUs, and how a case reads as options.

Every row is one rank of a fake process group under PyTorch's own trackers (torch 2.14.1, transformers 5.24.0,
accelerate 1.15.0, DeepSpeed 0.19.6): `fully_shard`, DistributedDataParallel, FullyShardedDataParallel, a schedule of
torch.distributed.pipelining, or DeepSpeed's engine. A `hollow` row is DeepSpeed 0.19.8 on one GPU, counted by PyTorch's
real allocator on a device that computes nothing.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

from memcalc.common.sizes import rounded
from memcalc.models.spec import ModelSpec
from memcalc.parallel.layout import layout_of
from memcalc.parallel.zero3 import Zero3
from memcalc.peak.pipeline import PipelineRank, trace_rank
from memcalc.peak.sweep import Sweep
from memcalc.training.step import trace
from memcalc.training.traced_step import Step, Tracing
from support.measured_rows import standing, training_setup
from support.module_hooks import as_tracked, kept_leaves

ZERO_KEYS = (
    "reduce_bucket_size",
    "allgather_bucket_size",
    "overlap_comm",
    "reduce_scatter",
    "contiguous_gradients",
    "sub_group_size",
    "stage3_max_reuse_distance",
    "stage3_max_live_parameters",
    "stage3_param_persistence_threshold",
    "stage3_prefetch_bucket_size",
)
BARE = ("pp", "zero", "fsdp1")
"""Modes that were measured without the tracker's hooks on modules."""
RECIPES = {
    "fsdp2": "mixed-bf16",
    "fsdp1": "mixed-bf16",
    "ddp": "bf16-mixed",
    "tp": "bf16",
    "pp": "bf16",
    "zero": "bf16",
}


def options(case: dict[str, Any]) -> dict[str, Any]:
    """What a case says of several GPUs, as options; what it leaves out keeps its default."""
    mode = case["mode"]
    offload = case.get("offload") or ()
    names = ("optimizer", "parameters") if offload is True else [{"param": "parameters"}.get(x, x) for x in offload]
    said: dict[str, Any] = {
        "parallel": {"tp": None, "pp": None, "zero": f"zero{case.get('stage')}"}.get(mode, mode),
        "data_parallel_size": None if mode in ("tp", "pp") else case.get("world", 8),
        "data_parallel_replicas": case.get("replicate"),
        "tensor_parallel_size": case.get("tensor"),
        "sequence_parallel": case.get("tp_plan") == "sequence" or None,
        "loss_parallel": case.get("loss_parallel"),
        "pipeline_parallel_size": case.get("stages", 4) if mode == "pp" else None,
        "expert_parallel_size": case.get("expert"),
        "fsdp_wrap": case.get("wrap"),
        "fsdp_mixed_precision": "autocast" if mode == "fsdp2" and case.get("recipe") == "bf16-mixed" else None,
        "reshard_after_forward": case.get("reshard"),
        "reduce_dtype": case.get("reduce"),
        "sync_every_micro_step": not case["no_sync"] if "no_sync" in case else None,
        "cpu_offload": ",".join(names) or None,
        "ddp_bucket_mb": case.get("bucket_mb"),
        "gradient_as_bucket_view": case.get("bucket_view"),
        "static_graph": case.get("static_graph"),
        "find_unused_parameters": case.get("find_unused"),
        "pipeline_schedule": case.get("schedule"),
        "virtual_pipeline_size": case.get("virtual"),
        "microbatches": case.get("microbatches"),
        "pipeline_rank": case.get("rank"),
        "pipeline_keep_outputs": case.get("return_outputs"),
        "trainer": case.get("engine"),
        "max_grad_norm": 1.0 if case.get("clip") else None,
        **{f"zero_{key}": case[key] for key in ZERO_KEYS if key in case},
    }
    return {name: value for name, value in said.items() if value is not None}


def _pipeline(case: dict[str, Any], step: Step) -> dict[str, int]:
    """The rows know one phase for all micro-batches, and count the token ids of all of them on every rank."""
    assert isinstance(step.engine, PipelineRank)
    ids = rounded(8 * case["batch"] * case["seq"] * case.get("microbatches", 8)) - step.engine.ids
    ids -= sum(allocation.nbytes for allocation in step.tape.inputs if allocation.aliased)
    worst = max(step.engine.worst.values(), key=lambda found: found.nbytes)
    phase = next(name for name, found in step.engine.worst.items() if found is worst)
    found, _ = Sweep(step.tape).peaks()
    return {"pipeline": found[phase][0] + standing(step, phase) + ids, "step": standing(step, "step") + ids}


def answer(case: dict[str, Any]) -> dict[str, int]:
    """The peak of each phase of a case."""
    mode = case["mode"]
    recipe = case.get("recipe", RECIPES[mode])
    single = {**case, "recipe": {"mixed-bf16": "bf16-mixed"}.get(recipe, recipe), "options": options(case)}
    if mode == "zero" and "fused" not in case:
        single["fused"] = True
    setup = training_setup(single)
    spec = ModelSpec.from_config(case["config"])
    own = layout_of(setup, spec.config)
    tracked = not case.get("hollow")
    with as_tracked(hooked=mode not in BARE) if tracked else nullcontext():
        if own.pipeline > 1:
            step = trace_rank(spec, setup, own, own.rank or 0, tracing=Tracing(like_tracker=True))
        else:
            step = trace(spec, setup, layout=own, tracing=Tracing(like_tracker=tracked))
    found, _ = Sweep(step.tape).peaks()
    if own.pipeline > 1:
        return _pipeline(case, step)
    peaks = {phase: found[phase][0] + standing(step, phase) for phase in ("forward", "backward")}
    if case.get("clip") and mode != "zero":
        peaks["clip"] = standing(step, "clip")
    peaks["step"] = standing(step, "step")
    if mode not in BARE:
        kept = kept_leaves(step)
        once = kept["step"] - kept["forward"]
        for phase, nbytes in kept.items():
            peaks[phase] += nbytes + (once * setup.grad_accum if mode == "ddp" else 0)  # three steps, not two
    if mode in ("zero", "fsdp1"):  # these rows count the token ids
        peaks = {phase: nbytes + step.input_bytes for phase, nbytes in peaks.items()}
    if case.get("stage") == 3 and "param" in (case.get("offload") or ()):
        # The tracker goes on counting shards that have moved to the host (no tensor on the device holds them).
        assert isinstance(step.engine, Zero3)
        moved = rounded(2 * sum(step.engine.chunks))
        peaks = {phase: nbytes + moved for phase, nbytes in peaks.items()}
    return peaks
