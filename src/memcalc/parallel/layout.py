"""The layout that a setup's options ask for, checked."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, get_args

from memcalc.errors import UsageError
from memcalc.parallel.beside_engines import beside_engine
from memcalc.parallel.setup import SINGLE, DeviceMap, Offloaded, Parallel, ParallelSetup, ZeroOptions
from memcalc.setup.defaults import DEFAULT_SEQ_LEN
from memcalc.setup.device_map_options import read_max_memory
from memcalc.setup.parallel_options import ParallelOptions
from memcalc.setup.setup import InferenceSetup, TrainingSetup
from memcalc.tables.optimizers import optimizer
from memcalc.units import parse_size

if TYPE_CHECKING:
    from memcalc.tables.gpus import Gpu

_FSDP: tuple[Parallel, ...] = ("fsdp2", "fsdp1")
_ZERO: tuple[Parallel, ...] = ("zero1", "zero2", "zero3")

_BELONGS: Mapping[str, tuple[Parallel, ...]] = {
    "data_parallel_replicas": ("fsdp2",),
    "fsdp_wrap": _FSDP,
    "fsdp_mixed_precision": _FSDP,
    "reshard_after_forward": _FSDP,
    "reduce_dtype": _FSDP,
    "sync_every_micro_step": ("ddp", *_FSDP),
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
    "pipeline": "pipeline_parallel_size",
    "expert": "expert_parallel_size",
}
"""The option of each axis."""

_AXES: Mapping[Parallel, tuple[str, ...]] = {
    "none": ("tensor", "pipeline"),
    "ddp": ("pipeline",),
    "fsdp2": ("tensor", "context", "pipeline", "expert"),
    "fsdp1": (),
    "zero1": (),
    "zero2": (),
    "zero3": (),
    "megatron": ("tensor", "pipeline"),
}
"""Axes that may stand beside each engine's data parallel."""


def free_bytes(setup: TrainingSetup | InferenceSetup, gpu: Gpu) -> int:
    """What a process finds free on `gpu` once its CUDA context is there (`torch.cuda.mem_get_info`)."""
    from memcalc.tables.cuda_contexts import context_of  # only a GPU that is named asks
    from memcalc.tables.overheads import CUDA_CONTEXT_INFERENCE, CUDA_CONTEXT_TRAINING

    if setup.cuda_context is not None:
        return gpu.usable_bytes - parse_size(setup.cuda_context)
    measured = CUDA_CONTEXT_TRAINING if isinstance(setup, TrainingSetup) else CUDA_CONTEXT_INFERENCE
    return gpu.usable_bytes - (context_of(gpu) or (measured.nbytes, ""))[0]


def device_map_of(setup: TrainingSetup | InferenceSetup, free: int | None) -> DeviceMap | None:
    """The device map that a setup asks for on GPUs with `free` bytes (None: not known); None where it asks for none.

    Raises UsageError where nothing says how many GPUs there are, or what they may take cannot be read.
    """
    if setup.device_map is None:
        if setup.max_memory is not None:
            raise UsageError("--max-memory says what --device-map may fill; add --device-map auto, or leave it out.")
        return None
    if setup.max_memory is not None:
        room = read_max_memory(setup.max_memory, setup.gpus)
        return DeviceMap(setup.device_map, tuple(room.items()), asked=True)
    if setup.gpus is None:
        raise UsageError(
            f"--device-map {setup.device_map} spreads a model over GPUs; say how many with --gpus, or what each may "
            "take with --max-memory."
        )
    each = float("inf") if free is None else max(0, free)
    return DeviceMap(
        setup.device_map, (*((gpu, each) for gpu in range(setup.gpus)), ("cpu", float("inf"))), asked=False
    )


def layout_of(setup: TrainingSetup, config: Mapping[str, Any] | None = None, free: int | None = None) -> ParallelSetup:
    """The layout of a setup's options; `config` is the model's, for sizes that follow from it.

    `free` is what each GPU has for one process, where that is known: a device map goes by it.

    Raises UsageError, in one sentence, where sizes do not multiply or an engine lacks what is asked of it.
    """
    if (device_map := device_map_of(setup, free)) is not None:
        for sentence in _beside_device_map(setup):
            raise UsageError(sentence)
        return ParallelSetup(device_map=device_map)
    ranks = setup.tensor_parallel_size * setup.context_parallel_size * setup.pipeline_parallel_size
    data = _data(setup, ranks)
    copies = data * setup.data_parallel_replicas
    default: Parallel = "fsdp2" if setup.context_parallel_size > 1 else "ddp" if copies > 1 else "none"
    engine = setup.parallel or default
    for sentence in _refused(setup, engine):
        raise UsageError(sentence)
    if copies * setup.context_parallel_size == 1 and engine in (*_FSDP, "ddp"):
        engine = "none"  # nothing is shared: the single GPU, to the byte (DeepSpeed and Megatron keep master copies)
    if engine == "none" and copies > 1:
        raise UsageError(f"--parallel none leaves {copies} ranks with batches of their own; use ddp, or fewer --gpus.")
    if copies * ranks == 1 and engine == "none" and setup.expert_parallel_size == 1 and setup.trainer != "accelerate":
        return SINGLE
    in_trainer = engine == "fsdp2" and setup.trainer_used in ("hf", "trl")  # which lets Accelerate wrap the model
    return ParallelSetup(
        engine=engine,
        data=data,
        replicas=setup.data_parallel_replicas,
        tensor=setup.tensor_parallel_size,
        sequence=setup.sequence_parallel,
        loss_parallel=setup.loss_parallel,
        context=setup.context_parallel_size,
        gathers_keys=setup.context_parallel_rotate_method == "allgather",
        pipeline=setup.pipeline_parallel_size,
        expert=setup.expert_parallel_size,
        expert_imbalance=setup.expert_imbalance,
        wrap="plan" if in_trainer and "fsdp_wrap" not in setup.model_fields_set else setup.fsdp_wrap,
        reshard=setup.reshard_after_forward,
        autocast=setup.fsdp_mixed_precision == "autocast",
        reduce_dtype=setup.reduce_dtype,
        sync_every_micro_step=setup.sync_every_micro_step,
        offload=_offloaded(setup),
        bucket_mb=setup.ddp_bucket_mb,
        gradient_as_bucket_view=setup.gradient_as_bucket_view,
        static_graph=setup.static_graph,
        find_unused_parameters=setup.find_unused_parameters,
        zero=_zero(setup, config or {}),
        schedule=setup.pipeline_schedule,
        virtual=setup.virtual_pipeline_size,
        microbatches=setup.microbatches,
        rank=setup.pipeline_rank,
        keep_outputs=setup.pipeline_keep_outputs,
        recompute_block=setup.recompute_method == "block",
        recompute_layers=setup.recompute_num_layers or 1,
        recompute_modules=_recomputed(setup),
        accelerate=setup.trainer == "accelerate" or in_trainer,
        clip=bool(setup.max_grad_norm),
    )


def _data(setup: TrainingSetup, ranks: int) -> int:
    """Data-parallel ranks: those asked for, or what the GPUs leave. Raises UsageError where sizes do not multiply."""
    per_replica = ranks * setup.data_parallel_replicas
    if setup.data_parallel_size is not None:
        total = per_replica * setup.data_parallel_size
        if setup.gpus is not None and setup.gpus != total:
            raise UsageError(
                f"the sizes of the axes multiply to {total} GPUs, but --gpus is {setup.gpus}; make them agree, or "
                "leave --gpus out."
            )
        return setup.data_parallel_size
    if setup.gpus is None:
        return 1
    if setup.gpus % per_replica:
        raise UsageError(
            f"--gpus {setup.gpus} is no multiple of the {per_replica} GPUs that the other sizes multiply to; change "
            "one of them."
        )
    return setup.gpus // per_replica


def _offloaded(setup: TrainingSetup) -> tuple[Offloaded, ...]:
    names = [name.strip() for name in (setup.cpu_offload or "").split(",") if name.strip()]
    for name in names:
        if name not in get_args(Offloaded):
            raise UsageError(
                f"--cpu-offload cannot be {name!r}: choose optimizer, parameters, or optimizer,parameters."
            )
    return tuple(what for what in get_args(Offloaded) if what in names)


def _recomputed(setup: TrainingSetup) -> tuple[str, ...]:
    names = [name.strip() for name in (setup.recompute_modules or "core_attn").split(",")]
    for name in names:
        if name not in ("core_attn", "mlp"):
            raise UsageError(f"--recompute-modules cannot be {name!r}: choose core_attn, mlp, or core_attn,mlp.")
    return tuple(names)


def _zero(setup: TrainingSetup, config: Mapping[str, Any]) -> ZeroOptions:
    """DeepSpeed's sizes: those given, then HF Trainer's for 'auto' (transformers/integrations/deepspeed.py)."""
    sizes: dict[str, Any] = {}
    hidden = config.get("hidden_size") or config.get("d_model") or config.get("n_embd")
    if setup.zero_auto:
        if not isinstance(hidden, int):
            raise UsageError("--zero-auto takes sizes from the model's hidden_size, which its config does not have.")
        sizes = {
            "reduce_bucket_size": hidden * hidden,
            "stage3_prefetch_bucket_size": int(0.9 * hidden * hidden),
            "stage3_param_persistence_threshold": 10 * hidden,
        }
    for name in ZeroOptions.__dataclass_fields__:
        given = getattr(setup, f"zero_{name}")
        if given is not None and (f"zero_{name}" in setup.model_fields_set or name not in sizes):
            sizes[name] = given
    return ZeroOptions(**sizes)


def _refused(setup: TrainingSetup, engine: Parallel) -> Iterator[str]:
    """What an engine does not have, or what has no effect."""
    for name, engines in _BELONGS.items():
        if name in setup.model_fields_set and engine not in engines:
            option = f"--{name.replace('_', '-')}"
            yield f"{option} belongs to --parallel {' or '.join(engines)}, not to {engine}; leave one of them out."
    for axis, name in _SIZES.items():
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
    in_backward = setup.optimizer_in_backward or optimizer(setup.optimizer).in_backward
    if engine != "none" and in_backward:
        yield f"--parallel {engine} needs all gradients before the optimizer steps; {_without_its_step(setup)}."
    if "optimizer" in _offloaded(setup) and engine == "fsdp2" and "parameters" not in _offloaded(setup):
        yield "FSDP2 offloads parameters, and gradients and states with them: use --cpu-offload optimizer,parameters."
    if "parameters" in _offloaded(setup) and engine in ("zero1", "zero2"):
        yield f"--parallel {engine} keeps whole parameters on every GPU; use zero3 to offload them."


def _without_its_step(setup: TrainingSetup) -> str:
    """What to do about an optimizer that steps in backward."""
    if setup.optimizer_in_backward:
        return "leave out --optimizer-in-backward"
    return f"--optimizer {setup.optimizer} steps in backward: use another, such as adamw"


def _beside_device_map(setup: TrainingSetup) -> Iterator[str]:
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
    frozen = objective in ("distillation", "gkd") or setup.reference_used in ("shared", "copy")
    if frozen and engine in ("fsdp1", "zero3"):
        yield (
            f"--parallel {engine} is not described for the frozen model of --objective {objective}; use --parallel "
            "fsdp2, zero2 or ddp."
        )


def _of_context(setup: TrainingSetup) -> Iterator[str]:
    """What ranks that share a sequence do not have."""
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
