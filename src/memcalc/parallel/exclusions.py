"""What engines and axes of several GPUs do not have, or what has no effect beside them: a sentence each."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import get_args

from memcalc.errors import UsageError
from memcalc.parallel.beside_engines import beside_engine
from memcalc.parallel.setup import Offloaded, Parallel
from memcalc.setup.defaults import DEFAULT_SEQ_LEN
from memcalc.setup.parallel_options import ParallelOptions
from memcalc.setup.setup import TrainingSetup
from memcalc.tables.optimizers import optimizer

FSDP: tuple[Parallel, ...] = ("fsdp2", "fsdp1")
_ZERO: tuple[Parallel, ...] = ("zero1", "zero2", "zero3")

_BELONGS: Mapping[str, tuple[Parallel, ...]] = {
    "data_parallel_replicas": ("fsdp2",),
    "fsdp_wrap": FSDP,
    "fsdp_mixed_precision": FSDP,
    "reshard_after_forward": FSDP,
    "reduce_dtype": FSDP,
    "sync_every_micro_step": ("ddp", *FSDP),
    "cpu_offload": ("fsdp2", *_ZERO),
    "ddp_bucket_mb": ("ddp",),
    "gradient_as_bucket_view": ("ddp",),
    "static_graph": ("ddp",),
    "find_unused_parameters": ("ddp",),
    "recompute_method": ("megatron",),
    "recompute_num_layers": ("megatron",),
    "recompute_modules": ("megatron",),
    **{name: _ZERO for name in ParallelOptions.model_fields if name.startswith("zero_")},
    **{name: ("zero3",) for name in ParallelOptions.model_fields if name.startswith("zero_stage3_")},
    "zero_sub_group_size": ("zero3",),
    "zero_hpz_partition_size": ("zero3",),
    "zero_round_robin_gradients": ("zero1", "zero2"),
}
"""The engines that have an option."""

_PIPELINED = (
    "pipeline_schedule",
    "microbatches",
    "pipeline_rank",
    "pipeline_keep_outputs",
    "virtual_pipeline_size",
    "ranks",
)

_SIZES = {
    "tensor": "tensor_parallel_size",
    "context": "context_parallel_size",
    "sequence": "sequence_parallel_size",
    "pipeline": "pipeline_parallel_size",
    "expert": "expert_parallel_size",
}
"""The option of each axis."""

_AXES: Mapping[Parallel, tuple[str, ...]] = {
    "none": ("tensor", "pipeline"),
    "ddp": ("pipeline",),
    "fsdp2": ("tensor", "context", "pipeline", "expert"),
    "fsdp1": (),
    "zero1": ("sequence",),
    "zero2": ("sequence",),
    "zero3": ("sequence",),
    "megatron": ("tensor", "pipeline"),
}
"""Axes that may stand beside each engine's data parallel."""


def offloaded(setup: TrainingSetup) -> tuple[Offloaded, ...]:
    """What `--cpu-offload` names, in one order. Raises UsageError for a name that is none."""
    names = [name.strip() for name in (setup.cpu_offload or "").split(",") if name.strip()]
    for name in names:
        if name not in get_args(Offloaded):
            raise UsageError(
                f"--cpu-offload cannot be {name!r}: choose optimizer, parameters, or optimizer,parameters."
            )
    return tuple(what for what in get_args(Offloaded) if what in names)


def refused(setup: TrainingSetup, engine: Parallel, shards: int) -> Iterator[str]:
    """What an engine whose weights `shards` ranks share does not have, or what has no effect."""
    for name, engines in _BELONGS.items():
        if name == "data_parallel_replicas" and setup.data_parallel_replicas == 1:
            continue  # a size of 1 on any axis is a single GPU
        if name in setup.model_fields_set and engine not in engines:
            option = f"--{name.replace('_', '-')}"
            yield f"{option} belongs to --parallel {' or '.join(engines)}, not to {engine}; leave one of them out."
    for axis, name in _SIZES.items():
        if axis == "context" and engine == "megatron" and setup.context_parallel_size > 1:
            yield (
                "--context-parallel-size is Transformer Engine's in Megatron-Core (its own attention refuses it), "
                "which is not computed; take --parallel fsdp2."
            )
        if getattr(setup, name) > 1 and axis not in _AXES[engine]:
            yield (
                f"--parallel {engine} has no --{axis}-parallel-size as memcalc knows it; leave it out, or take "
                f"{' or '.join(name for name, axes in _AXES.items() if axis in axes and name not in (engine, 'none'))}."
            )
    yield from beside_engine(setup, engine)
    yield from _of_context(setup)
    yield from _of_objective(setup, engine)
    if engine == "megatron":
        yield from _of_megatron(setup)
    if setup.sequence_parallel and setup.tensor_parallel_size == 1:
        yield "--sequence-parallel shards over tensor-parallel ranks, but there is one; add --tensor-parallel-size."
    if setup.sequence_parallel and (setup.seq_len or DEFAULT_SEQ_LEN) % setup.tensor_parallel_size:
        yield (
            f"--sequence-parallel cuts sequences of {setup.seq_len or DEFAULT_SEQ_LEN} tokens into "
            f"{setup.tensor_parallel_size} parts, which does not work out; change --seq-len."
        )
    if setup.sequence_parallel and engine != "megatron" and (setup.padding_mask or setup.attention == "eager"):
        yield "--sequence-parallel is described without masks: leave out --padding-mask and --attention eager."
    if setup.loss_parallel and not setup.sequence_parallel:
        yield "--loss-parallel belongs to the plan of --sequence-parallel; add it, or leave --loss-parallel out."
    for name in _PIPELINED:
        if name in setup.model_fields_set and setup.pipeline_parallel_size == 1:
            option = f"--{name.replace('_', '-')}"
            yield f"{option} is about pipelines, but there is one stage; add --pipeline-parallel-size."
    yield from _of_pipeline(setup)
    if engine in _ZERO and setup.quantization != "none" and engine == "zero3":
        yield (
            "ZeRO-3 does not shard weights that bitsandbytes or a packed format holds; leave out --quantization, or "
            "use --parallel zero2."
        )
    if (setup.zero_hpz_partition_size or 1) > 1 and shards % (setup.zero_hpz_partition_size or 1):
        yield (
            f"--zero-hpz-partition-size {setup.zero_hpz_partition_size} does not divide the {shards} GPUs that share "
            "the weights; change it."
        )
    in_backward = setup.optimizer_in_backward or optimizer(setup.optimizer).in_backward
    if engine != "none" and in_backward:
        yield f"--parallel {engine} needs all gradients before the optimizer steps; {_without_its_step(setup)}."
    if "optimizer" in offloaded(setup) and engine == "fsdp2" and "parameters" not in offloaded(setup):
        yield "FSDP2 offloads parameters, and gradients and states with them: use --cpu-offload optimizer,parameters."
    if "parameters" in offloaded(setup) and engine in ("zero1", "zero2"):
        yield f"--parallel {engine} keeps whole parameters on every GPU; use zero3 to offload them."


def _without_its_step(setup: TrainingSetup) -> str:
    """What to do about an optimizer that steps in backward."""
    if setup.optimizer_in_backward:
        return "leave out --optimizer-in-backward"
    return f"--optimizer {setup.optimizer} steps in backward: use another, such as adamw"


def beside_device_map(setup: TrainingSetup) -> Iterator[str]:
    """What a model that one process spreads over GPUs cannot have."""
    others = ("parallel", "data_parallel_size", "data_parallel_replicas", *_SIZES.values(), *_BELONGS, *_PIPELINED)
    for name in others:
        if name in setup.model_fields_set:
            yield (
                f"--device-map spreads a model in one process, and --{name.replace('_', '-')} is about several "
                "processes; leave one of them out."
            )
    if setup.objective != "sft" or setup.trainer_used not in ("plain", "hf"):
        yield (
            "--device-map is described for --objective sft in a plain loop and under Hugging Face Trainer; leave out "
            "--objective and --trainer, or --device-map."
        )
    if setup.optimizer_in_backward or optimizer(setup.optimizer).in_backward:
        yield f"--device-map is described for optimizers that step after backward; {_without_its_step(setup)}."


def _of_megatron(setup: TrainingSetup) -> Iterator[str]:
    """What Megatron-Core does not have, or memcalc does not know of it."""
    if setup.lora_rank is not None or setup.precision == "fp32" or setup.quantization != "none":
        yield "--parallel megatron is described for full training in 16 bits; leave out what asks for else."
    if setup.kernels != "eager" or setup.loss_implementation != "eager":
        yield "--parallel megatron has kernels and a loss of its own; leave out --kernels and --loss-implementation."
    if setup.trainer_used != "plain":
        yield f"--parallel megatron has a loop of its own, not that of --trainer {setup.trainer_used}; leave that out."
    if setup.padding_mask or setup.packing:
        yield "--parallel megatron is described for rows without padding; leave out --padding-mask and --packing."
    if setup.checkpoint_every_n_blocks > 1 or setup.activation_offloading:
        yield (
            "--parallel megatron checkpoints by --recompute-method and --recompute-num-layers; leave out "
            "--checkpoint-every-n-blocks and --activation-offloading."
        )
    if setup.loss_parallel:
        yield "--parallel megatron always keeps logits divided by words; leave out --loss-parallel."
    if setup.pipeline_parallel_size > 1 and setup.pipeline_schedule == "gpipe":
        yield "Megatron-Core has no GPipe; use --pipeline-schedule 1f1b or interleaved."
    if setup.pipeline_parallel_size > 1 and "pipeline_keep_outputs" in setup.model_fields_set:
        yield "Megatron-Core keeps no outputs of its last stage; leave out --pipeline-keep-outputs."
    for name, mode in (("method", "full"), ("num_layers", "full"), ("modules", "selective")):
        if f"recompute_{name}" in setup.model_fields_set and setup.activation_checkpointing != mode:
            option = f"--recompute-{name.replace('_', '-')}"
            yield f"{option} says how --activation-checkpointing {mode} is done; add that, or leave {option} out."


def _of_objective(setup: TrainingSetup, engine: Parallel) -> Iterator[str]:
    """Objectives whose models an engine divides in a way that memcalc does not know."""
    objective = setup.objective
    if objective == "sft" or engine in ("none", "ddp"):
        return
    if engine == "megatron":
        yield f"--parallel megatron has a loop for --objective sft alone, not for {objective}; use fsdp2 or ddp."
    if objective == "ppo":
        yield f"--parallel {engine} is not described for ppo, which trains two models; use --parallel ddp."


def _of_context(setup: TrainingSetup) -> Iterator[str]:
    """What ranks that share a sequence do not have."""
    if setup.sequence_parallel_size > 1:
        yield from _of_ulysses(setup)
    size = setup.context_parallel_size
    if size == 1:
        if "context_parallel_rotate_method" in setup.model_fields_set:
            yield (
                "--context-parallel-rotate-method is about ranks that share a sequence, but there is one; add "
                "--context-parallel-size."
            )
        return
    length = setup.seq_len or DEFAULT_SEQ_LEN
    if length % (2 * size):
        yield (
            f"--context-parallel-size {size} gives each rank two chunks of a sequence, and {length} tokens are no "
            f"multiple of {2 * size}; change --seq-len."
        )
    if setup.padding_mask or setup.packing or setup.attention != "sdpa":
        yield (
            "--context-parallel-size attends with sdpa and without masks; leave out --padding-mask, --packing and "
            "--attention."
        )
    if max(setup.pipeline_parallel_size, setup.expert_parallel_size) > 1:
        yield (
            "--context-parallel-size is described beside data and tensor parallel, not beside pipelines or experts; "
            "leave out --pipeline-parallel-size and --expert-parallel-size."
        )
    if setup.sequence_parallel:
        yield (
            "--context-parallel-size beside tensor parallel is described for Transformers' plan; leave out "
            "--sequence-parallel."
        )
    if setup.objective != "sft":
        yield f"--context-parallel-size is described for --objective sft only, not for {setup.objective}; leave it out."


def _of_ulysses(setup: TrainingSetup) -> Iterator[str]:
    """What ranks that share a sequence and exchange heads do not have."""
    size, length = setup.sequence_parallel_size, setup.seq_len or DEFAULT_SEQ_LEN
    if length % size:
        yield f"--sequence-parallel-size {size} does not divide sequences of {length} tokens; change --seq-len."
    if setup.padding_mask or setup.packing or setup.attention != "sdpa":
        yield (
            "--sequence-parallel-size attends with sdpa and without masks; leave out --padding-mask, --packing and "
            "--attention."
        )
    if setup.objective != "sft" or setup.trainer_used == "trl":
        yield (
            "--sequence-parallel-size is described for --objective sft in a plain loop and under Hugging Face Trainer; "
            "leave out --objective and --trainer trl, or --sequence-parallel-size."
        )


def _of_pipeline(setup: TrainingSetup) -> Iterator[str]:
    stages = setup.pipeline_parallel_size
    if stages == 1:
        return
    if setup.virtual_pipeline_size > 1 and setup.pipeline_schedule != "interleaved":
        yield (
            "--virtual-pipeline-size belongs to --pipeline-schedule interleaved; add it, or leave "
            "--virtual-pipeline-size out."
        )
    if setup.pipeline_rank is not None and setup.pipeline_rank >= stages:
        yield f"--pipeline-rank {setup.pipeline_rank} is none of the {stages} ranks, which count from 0."
    if setup.grad_accum > 1:
        yield "--grad-accum counts micro-batches without a pipeline; with one, --microbatches does."
    if setup.objective != "sft":
        yield f"a pipeline is described for --objective sft only, not for {setup.objective}."
