"""What a report says of a job on several GPUs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from memcalc.autograd.tape import GRADIENTS, OPTIMIZER, WEIGHTS
from memcalc.breakdown import BREAKDOWN
from memcalc.common.assumption import Assumption
from memcalc.nn.stack import Stack
from memcalc.parallel.setup import GPUS_OF_A_NODE, DeviceMap, ParallelSetup
from memcalc.peak.ranks import phase_totals
from memcalc.report.gpu_schema import Cluster, RankPeak
from memcalc.setup.setup import InferenceSetup, TrainingSetup
from memcalc.tables.optimizers import spelled
from memcalc.training.traced_step import Step
from memcalc.units import format_bytes

_AXES = {
    "replicas": "data parallel replicas",
    "data": "data parallel",
    "tensor": "tensor parallel",
    "context": "context parallel",
    "pipeline": "pipeline stages",
    "expert": "expert parallel",
}


def _axes(layout: ParallelSetup) -> dict[str, int]:
    """The axes that are used, in words, with their sizes."""
    words = {**_AXES, "context": "sequence parallel"} if layout.ulysses else _AXES
    return {words[name]: size for name in words if (size := getattr(layout, name)) > 1}


def cluster(setup: TrainingSetup | InferenceSetup, layout: ParallelSetup, rank: int, step: Step) -> Cluster:
    """The layout, what one step takes in, and what a rank sends and keeps on its host."""
    if layout.device_map is not None:
        return _one_process(setup, layout, rank, step)
    if isinstance(setup, InferenceSetup):
        return _served(setup, layout, rank, step)
    micro_batches = layout.microbatches if layout.pipeline > 1 else setup.grad_accum
    sequences = setup.sequences * micro_batches * layout.batches
    host = sum(nbytes for _, nbytes in step.engine.host()) if step.engine is not None else 0
    return Cluster(
        gpus=layout.gpus,
        axes=_axes(layout),
        parallel=layout.engine,
        pipeline_rank=rank if layout.pipeline > 1 else None,
        sequences_per_step=sequences,
        tokens_per_step=sequences * step.seq_len if step.network.reads_text else None,
        sent_bytes=dict(sent(step, micro_batches)),
        host_bytes=host,
        node_host_bytes=host * min(layout.gpus, GPUS_OF_A_NODE),
    )


def _one_process(setup: TrainingSetup | InferenceSetup, layout: ParallelSetup, rank: int, step: Step) -> Cluster:
    """What is said of a process that has all GPUs."""
    assert layout.device_map is not None
    training = isinstance(setup, TrainingSetup)
    micro_batches = setup.grad_accum if isinstance(setup, TrainingSetup) else 1
    sequences = (setup.sequences if isinstance(setup, TrainingSetup) else setup.batch) * micro_batches
    host = 0 if step.placement is None else step.placement.host_bytes
    return Cluster(
        gpus=layout.gpus,
        axes={},
        parallel=f"device_map {layout.device_map.word}",
        pipeline_rank=None,
        gpu=rank,
        sequences_per_step=sequences,
        tokens_per_step=sequences * step.seq_len if step.network.reads_text else None,
        sent_bytes=dict(sent(step, micro_batches)) if training or step.tape.sent else {},
        host_bytes=host,
        node_host_bytes=host,
    )


def _served(setup: InferenceSetup, layout: ParallelSetup, rank: int, step: Step) -> Cluster:
    """What is said of a serving engine."""
    copies = setup.data_parallel_size or 1
    axes = _axes(layout)
    if setup.enable_dp_attention and copies > 1:
        axes["data parallel attention"] = copies
    sequences = setup.batch * copies
    return Cluster(
        gpus=layout.gpus,
        axes=axes,
        parallel=setup.engine,
        pipeline_rank=rank if layout.pipeline > 1 else None,
        sequences_per_step=sequences,
        tokens_per_step=sequences * step.seq_len if step.network.reads_text else None,
        sent_bytes=dict(_sent_by_engine(setup, layout, step)),
        host_bytes=0,
        node_host_bytes=0,
    )


def _sent_by_engine(setup: InferenceSetup, layout: ParallelSetup, step: Step) -> Iterator[tuple[str, int]]:
    """Megatron's two all-reduces of a block, and hidden states with their residual to the next stage."""
    norm = next((p for _, p in step.parameters if p.group == "norms"), None)
    if norm is None:
        return
    width = norm.shape[-1] * norm.dtype.itemsize
    tokens = setup.batch * (step.seq_len + 1)
    depth = sum(module.depth for _, module in step.network.modules() if isinstance(module, Stack))
    if layout.tensor > 1 and not setup.enable_dp_attention:
        yield "all-reduce", 2 * depth * 2 * tokens * width * (layout.tensor - 1) // layout.tensor
    if layout.pipeline > 1 and step.stage < layout.pipeline - 1:
        yield "send to the next stage", 2 * tokens * width


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
            gpu=None if layout.device_map is None else rank,
            count=1
            if layout.device_map is not None
            else layout.gpus // (layout.pipeline * (1 if layout.ulysses else layout.context)),
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


def assumed_of_cluster(
    setup: TrainingSetup | InferenceSetup, layout: ParallelSetup, found: Cluster
) -> Iterator[Assumption]:
    """Lines about what was taken for granted of several GPUs."""
    axes = " × ".join(f"{words} {size}" for words, size in found.axes.items())
    if layout.device_map is not None:
        yield from _assumed_of_device_map(layout.device_map, found)
        return
    yield Assumption(
        "most_loaded_gpu", f"{layout.gpus} GPUs ({axes or 'one rank each'}): the report is for the most loaded one"
    )
    if layout.ulysses:
        yield Assumption(
            "sequence_parallel",
            "sequence parallel as DeepSpeed-Ulysses runs it for Accelerate (sp_backend deepspeed): heads are exchanged "
            "in attention, weights are shared by ZeRO over those ranks too",
        )
    elif layout.context > 1:
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
    flat = layout.engine == "megatron" or layout.engine.startswith("zero")
    if flat and isinstance(setup, TrainingSetup) and spelled(setup.optimizer).row.startswith("adafactor"):
        yield Assumption(
            "adafactor_unfactored",
            f"--optimizer {setup.optimizer} keeps a whole variance: --parallel {layout.engine} gives it flat pieces of "
            "weights, which have no rows and columns",
        )
    if found.host_bytes:
        yield Assumption(
            "host_memory_of_offload",
            f"host memory: {format_bytes(found.host_bytes)} for each process, {format_bytes(found.node_host_bytes)} "
            f"for a node of {min(layout.gpus, GPUS_OF_A_NODE)} GPUs (--cpu-offload)",
        )


def _assumed_of_device_map(device_map: DeviceMap, found: Cluster) -> Iterator[Assumption]:
    yield Assumption(
        "most_loaded_gpu",
        f"one process with {found.gpus} GPU{'s' * (found.gpus > 1)} (device_map {device_map.word}, as Transformers "
        "5.24 and Accelerate 1.15 "
        "place modules and copy their inputs): the report is for the most loaded one",
    )
    if not device_map.asked and any(room == float("inf") for device, room in device_map.room if device != "cpu"):
        yield Assumption("device_map_room", "GPUs have room for the whole model (--gpu or --max-memory says how much)")
    if found.host_bytes:
        yield Assumption(
            "device_map_offload",
            f"{format_bytes(found.host_bytes)} of weights do not fit the GPUs and wait in host memory or on disk; each "
            "layer of them is brought to the first GPU when it runs",
        )
