"""The layout that a setup's options ask for, checked."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from memcalc.errors import UsageError
from memcalc.parallel.exclusions import FSDP, beside_device_map, offloaded, refused
from memcalc.parallel.setup import SINGLE, DeviceMap, Parallel, ParallelSetup, ZeroOptions
from memcalc.setup.device_map_options import read_max_memory
from memcalc.setup.setup import InferenceSetup, TrainingSetup
from memcalc.units import parse_size

if TYPE_CHECKING:
    from memcalc.tables.gpus import Gpu


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
        for sentence in beside_device_map(setup):
            raise UsageError(sentence)
        return ParallelSetup(device_map=device_map)
    context = setup.context_parallel_size * setup.sequence_parallel_size
    ranks = setup.tensor_parallel_size * context * setup.pipeline_parallel_size
    data = _data(setup, ranks)
    copies = data * setup.data_parallel_replicas
    default: Parallel = "ddp" if copies > 1 else "none"
    if context > 1:
        default = "zero3" if setup.sequence_parallel_size > 1 else "fsdp2"
    engine = setup.parallel or default
    for sentence in refused(setup, engine, data * context):
        raise UsageError(sentence)
    if copies * context == 1 and engine in (*FSDP, "ddp"):
        engine = "none"  # nothing is shared: the single GPU, to the byte (DeepSpeed and Megatron keep master copies)
    if engine == "none" and copies > 1:
        raise UsageError(f"--parallel none leaves {copies} ranks with batches of their own; use ddp, or fewer --gpus.")
    if copies * ranks == 1 and engine == "none" and setup.expert_parallel_size == 1 and setup.trainer != "accelerate":
        return SINGLE
    prepared = setup.trainer_used != "plain"  # Accelerate wraps the model
    wrapped = "fsdp_wrap" in setup.model_fields_set  # in a way that was asked for
    in_trainer = engine == "fsdp2" and setup.trainer_used in ("hf", "trl")
    return ParallelSetup(
        engine=engine,
        data=data,
        replicas=setup.data_parallel_replicas,
        tensor=setup.tensor_parallel_size,
        sequence=setup.sequence_parallel,
        loss_parallel=setup.loss_parallel,
        context=context,
        ulysses=setup.sequence_parallel_size > 1,
        gathers_keys=setup.context_parallel_rotate_method == "allgather",
        pipeline=setup.pipeline_parallel_size,
        expert=setup.expert_parallel_size,
        expert_imbalance=setup.expert_imbalance,
        wrap="plan" if engine == "fsdp2" and prepared and not wrapped else setup.fsdp_wrap,
        reshard=setup.reshard_after_forward,
        peft=prepared and setup.lora_rank is not None and not wrapped,
        backward_prefetch=not prepared,
        autocast=setup.fsdp_mixed_precision == "autocast",
        reduce_dtype=setup.reduce_dtype,
        sync_every_micro_step=setup.sync_every_micro_step,
        offload=offloaded(setup),
        bucket_mb=setup.ddp_bucket_mb,
        gradient_as_bucket_view=setup.gradient_as_bucket_view,
        static_graph=setup.static_graph,
        find_unused_parameters=setup.find_unused_parameters,
        zero=_zero(setup, config or {}),
        zero_of_frozen=_zero(setup, None),
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


def _recomputed(setup: TrainingSetup) -> tuple[str, ...]:
    names = [name.strip() for name in (setup.recompute_modules or "core_attn").split(",")]
    for name in names:
        if name not in ("core_attn", "mlp"):
            raise UsageError(f"--recompute-modules cannot be {name!r}: choose core_attn, mlp, or core_attn,mlp.")
    return tuple(names)


def _zero(setup: TrainingSetup, config: Mapping[str, Any] | None) -> ZeroOptions:
    """DeepSpeed's sizes: those given, then HF Trainer's for 'auto' (transformers/integrations/deepspeed.py).

    Without a `config`, 'auto' is DeepSpeed's default.
    """
    sizes: dict[str, Any] = {}
    if setup.zero_auto and config is not None:
        hidden = config.get("hidden_size") or config.get("d_model") or config.get("n_embd")
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
