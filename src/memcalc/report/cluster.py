"""What a report says of a job on several GPUs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from memcalc.autograd.tape import GRADIENTS, OPTIMIZER, WEIGHTS
from memcalc.breakdown import BREAKDOWN
from memcalc.common.assumption import Assumption
from memcalc.parallel.setup import ParallelSetup
from memcalc.peak.ranks import phase_totals
from memcalc.report.gpu_schema import Cluster, RankPeak
from memcalc.setup.setup import TrainingSetup
from memcalc.training.traced_step import Step
from memcalc.units import format_bytes

GPUS_OF_A_NODE = 8

_AXES = {
    "replicas": "data parallel replicas",
    "data": "data parallel",
    "tensor": "tensor parallel",
    "context": "context parallel",
    "pipeline": "pipeline stages",
    "expert": "expert parallel",
}


def cluster(setup: TrainingSetup, layout: ParallelSetup, rank: int, step: Step) -> Cluster:
    """The layout, what one step takes in, and what a rank sends and keeps on its host."""
    micro_batches = layout.microbatches if layout.pipeline > 1 else setup.grad_accum
    sequences = setup.sequences * micro_batches * layout.batches
    host = sum(nbytes for _, nbytes in step.engine.host()) if step.engine is not None else 0
    return Cluster(
        gpus=layout.gpus,
        axes={words: size for name, words in _AXES.items() if (size := getattr(layout, name)) > 1},
        parallel=layout.engine,
        pipeline_rank=rank if layout.pipeline > 1 else None,
        sequences_per_step=sequences,
        tokens_per_step=sequences * step.seq_len if step.network.reads_text else None,
        sent_bytes=dict(sent(step, micro_batches)),
        host_bytes=host,
        node_host_bytes=host * min(layout.gpus, GPUS_OF_A_NODE),
    )


def sent(step: Step, micro_batches: int) -> Iterator[tuple[str, int]]:
    """Bytes that the rank sends in one step, by collective."""
    sizes: dict[str, int] = {}
    for (collective, last), nbytes in step.tape.sent.items():
        sizes[collective] = sizes.get(collective, 0) + nbytes * (1 if last else micro_batches)
    yield from sizes.items()


def rank_peaks(steps: Mapping[int, Step], layout: ParallelSetup) -> Iterator[RankPeak]:
    """What each kind of rank holds."""
    for rank, step in steps.items():
        rows = {
            row: sum(nbytes for _, nbytes in BREAKDOWN[row](step, "step")) for row in (WEIGHTS, OPTIMIZER, GRADIENTS)
        }
        totals = phase_totals(step)
        top = max(totals, key=lambda phase: totals[phase])
        yield RankPeak(
            pipeline_rank=rank if layout.pipeline > 1 else None,
            count=layout.gpus // (layout.pipeline * layout.context),
            model_weights_bytes=rows[WEIGHTS],
            optimizer_states_bytes=rows[OPTIMIZER],
            gradients_bytes=rows[GRADIENTS],
            phase=top,
            peak_bytes=totals[top],
        )


def communicators(layout: ParallelSetup) -> int:
    """Communicators that a rank is a member of: one for each axis that is used, and one more where experts move."""
    sizes = (layout.data, layout.replicas, layout.tensor, layout.context, layout.pipeline, layout.expert)
    return sum(size > 1 for size in sizes)


def assumed_of_cluster(layout: ParallelSetup, found: Cluster) -> Iterator[Assumption]:
    """Lines about what was taken for granted of several GPUs."""
    axes = " × ".join(f"{words} {size}" for words, size in found.axes.items())
    yield Assumption(
        "most_loaded_gpu", f"{layout.gpus} GPUs ({axes or 'one rank each'}): the report is for the most loaded one"
    )
    if layout.context > 1:
        yield Assumption(
            "context_parallel",
            f"context parallel as torch's context_parallel and Accelerate run it: rank {layout.context_rank} of each "
            f"{layout.context} is reported, causal work is balanced, weights are shared by FSDP2 over those ranks too",
        )
    if layout.engine == "megatron":
        yield Assumption(
            "megatron",
            "Megatron-Core 0.16: its own layers (attention by one kernel unless --attention eager), bf16 weights, fp32 "
            "gradients, states and fp32 weights over the data-parallel ranks, a fused optimizer that works in place "
            "(--parallel megatron)",
        )
    if layout.engine.startswith("zero"):
        yield Assumption(
            "deepspeed",
            "DeepSpeed 0.19.6 with torch's optimizer; mixed-bf16 is DeepSpeed's bf16, with fp32 master weights",
        )
    if found.host_bytes:
        yield Assumption(
            "host_memory_of_offload",
            f"host memory: {format_bytes(found.host_bytes)} for each process, {format_bytes(found.node_host_bytes)} "
            f"for a node of {min(layout.gpus, GPUS_OF_A_NODE)} GPUs (--cpu-offload)",
        )
