"""Rows of `measured/distributed*.jsonl`: one of several GPUs, and how a case reads as options.

Every row is one rank of a fake process group under PyTorch's own trackers (torch 2.14.1, transformers 5.24.0,
accelerate 1.15.0, DeepSpeed 0.19.6): `fully_shard`, DistributedDataParallel, FullyShardedDataParallel, a schedule of
torch.distributed.pipelining, or DeepSpeed's engine.
"""

from __future__ import annotations

from typing import Any

from memcalc.common.sizes import rounded
from memcalc.models.spec import ModelSpec
from memcalc.parallel.setup import ParallelSetup, ZeroOptions
from memcalc.parallel.zero3 import Zero3
from memcalc.peak.pipeline import PipelineRank, trace_rank
from memcalc.peak.sweep import Sweep
from memcalc.training.step import Step, trace
from support.measured_rows import standing, training_setup
from support.module_hooks import as_tracked

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


def layout(case: dict[str, Any]) -> ParallelSetup:
    """The layout that a case was run in."""
    mode = case["mode"]
    recipe = case.get("recipe", RECIPES[mode])
    engine = {"tp": "none", "pp": "none", "zero": f"zero{case.get('stage')}"}.get(mode, mode)
    offload = case.get("offload") or ()
    return ParallelSetup(
        engine=engine,  # type: ignore[arg-type]
        data=1 if mode in ("tp", "pp") else case.get("world", 8),
        replicas=case.get("replicate", 1),
        tensor=case.get("tensor", 1),
        sequence=case.get("tp_plan") == "sequence",
        loss_parallel=case.get("loss_parallel", False),
        pipeline=case.get("stages", 4) if mode == "pp" else 1,
        expert=case.get("expert", 1),
        wrap=case.get("wrap", "blocks"),
        reshard=case.get("reshard"),
        autocast=recipe == "bf16-mixed",
        reduce_dtype=case.get("reduce"),
        sync_every_micro_step=not case.get("no_sync", True),
        offload=("optimizer", "parameters")
        if offload is True
        else tuple({"param": "parameters"}.get(what, what) for what in offload),  # type: ignore[arg-type]
        bucket_mb=case.get("bucket_mb"),
        gradient_as_bucket_view=case.get("bucket_view", False),
        static_graph=case.get("static_graph", False),
        find_unused_parameters=case.get("find_unused", False),
        zero=ZeroOptions(**{key: case[key] for key in ZERO_KEYS if key in case}),
        schedule=case.get("schedule", "1f1b"),
        virtual=case.get("virtual", 1),
        microbatches=case.get("microbatches", 8),
        rank=case.get("rank", 0) if mode == "pp" else None,
        keep_outputs=case.get("return_outputs", True),
        accelerate=case.get("engine") == "accelerate",
        clip=bool(case.get("clip")),
    )


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
    options = {
        **case,
        "recipe": {"mixed-bf16": "bf16-mixed"}.get(recipe, recipe),
        "padding": case.get("padding", False),
    }
    if mode == "zero" and "fused" not in case:
        options["fused"] = True
    setup = training_setup(options)
    if case.get("lora") and mode in ("fsdp2", "fsdp1", "zero") and recipe == "bf16" and not case.get("engine"):
        setup = setup.model_copy(update={"lora_dtype": "bf16"})
    spec = ModelSpec.from_config(case["config"])
    own = layout(case)
    with as_tracked(hooked=mode not in BARE):
        if own.pipeline > 1:
            step = trace_rank(spec, setup, own, own.rank or 0, like_tracker=True)
        else:
            step = trace(spec, setup, layout=own, like_tracker=True)
    found, _ = Sweep(step.tape).peaks()
    if own.pipeline > 1:
        return _pipeline(case, step)
    peaks = {phase: found[phase][0] + standing(step, phase) for phase in ("forward", "backward")}
    if case.get("clip") and mode != "zero":
        peaks["clip"] = standing(step, "clip")
    peaks["step"] = standing(step, "step")
    if mode in ("zero", "fsdp1"):  # these rows count the token ids
        peaks = {phase: nbytes + step.input_bytes for phase, nbytes in peaks.items()}
    if case.get("stage") == 3 and "param" in (case.get("offload") or ()):
        # The tracker goes on counting shards that have moved to the host (no tensor on the device holds them).
        assert isinstance(step.engine, Zero3)
        moved = rounded(2 * sum(step.engine.chunks))
        peaks = {phase: nbytes + moved for phase, nbytes in peaks.items()}
    return peaks
