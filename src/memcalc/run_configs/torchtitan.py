"""torchtitan's TOML. Source: torchtitan 0.2.2 (config/job_config.py); later releases take Python functions alone."""

from __future__ import annotations

from typing import Any

from memcalc.errors import ConfigError
from memcalc.run_configs import option_names as our
from memcalc.run_configs import training
from memcalc.run_configs.context import Context
from memcalc.run_configs.hf_trainer import launched
from memcalc.run_configs.keys import Key, Keys, count, flag, harmless, names, table, text, whole
from memcalc.run_configs.mapping import Given
from memcalc.run_configs.sharding import Sharding

KEYS = table(
    Key("model.name", text, "llama3", "model", "family"),
    Key("model.flavor", text, "debugmodel", "model", "size"),
    Key("model.converters", names, [], "", "float8 and mx act only when they are named here"),
    Key(
        "training.local_batch_size",
        count,
        8,
        our.BATCH,
        "sequences per GPU and forward pass",
        other=("training.batch_size",),
    ),
    Key("training.seq_len", count, 2048, our.SEQ_LEN, "tokens of a row; the stream is packed"),
    Key("training.global_batch_size", whole, -1, our.GRAD_ACCUM, "sequences of a step over all GPUs"),
    Key("training.dtype", text, "float32", our.PRECISION, "dtype of the shards"),
    Key("training.mixed_precision_param", text, "bfloat16", our.PRECISION, "dtype that parameters are gathered in"),
    Key("training.mixed_precision_reduce", text, "float32", "", "dtype that gradients are reduced in"),
    Key("training.enable_cpu_offload", flag, False, our.CPU_OFFLOAD, "shards, gradients and states on the host"),
    Key("training.compile", flag, False, "", "torch.compile", "0.1"),
    Key("optimizer.name", text, "AdamW", our.OPTIMIZER, "the optimizer"),
    Key("optimizer.implementation", text, "fused", our.OPTIMIZER_IMPL, "how it steps"),
    Key(
        "optimizer.early_step_in_backward", flag, False, our.OPTIMIZER_IN_BACKWARD, "each weight is stepped in backward"
    ),
    Key("activation_checkpoint.mode", text, "selective", our.CHECKPOINTING, "none, selective, full or memory_budget"),
    Key("activation_checkpoint.selective_ac_option", text, "2", our.CHECKPOINT_EVERY, "every N-th block, or op"),
    Key(
        "parallelism.data_parallel_shard_degree", whole, -1, our.DATA_PARALLEL, "GPUs that share one copy; -1: the rest"
    ),
    Key("parallelism.data_parallel_replicate_degree", whole, 1, our.REPLICAS, "copies of the sharded model"),
    Key(
        "parallelism.fsdp_reshard_after_forward",
        text,
        "default",
        our.RESHARD,
        "default: yes, but never with a pipeline",
    ),
    Key("parallelism.tensor_parallel_degree", whole, 1, our.TENSOR_PARALLEL, "GPUs that share every layer"),
    Key("parallelism.disable_loss_parallel", flag, False, our.LOSS_PARALLEL, "logits whole on every GPU"),
    Key("parallelism.pipeline_parallel_degree", whole, 1, our.PIPELINE_PARALLEL, "stages"),
    Key("parallelism.pipeline_parallel_schedule", text, "1F1B", our.PIPELINE_SCHEDULE, "order of the micro-batches"),
    Key("parallelism.pipeline_parallel_microbatch_size", whole, 1, our.BATCH, "sequences of one micro-batch"),
    Key("parallelism.context_parallel_degree", whole, 1, our.CONTEXT_PARALLEL, "GPUs that share a sequence"),
    Key("parallelism.expert_parallel_degree", whole, 1, our.EXPERT_PARALLEL, "GPUs that share the experts"),
    Key("parallelism.expert_tensor_parallel_degree", whole, 1, "", "GPUs that share each expert"),
    Key("compile.enable", flag, False, "", "torch.compile"),
    Key("compile.components", names, ["model", "loss"], "", "what is compiled"),
    Key("validation.enable", flag, False, "", "validation with a batch of its own"),
    Key("validation.local_batch_size", count, 8, "", "batch of validation"),
    Key("validation.seq_len", count, 2048, "", "length of validation"),
)
HARMLESS = harmless(
    "",
    r"(job|profiling|metrics|lr_scheduler|checkpoint|comm|memory_estimation|fault_tolerance|experimental|debug|quantize"
    r"|float8|mx|validation|training\.dataloader|model|optimizer|activation_checkpoint|compile)\..*",
    r"training\.(dataset\w*|max_norm|steps|gc_\w+|seed|deterministic|data_parallel\w*|warmup_steps|classifer_free_guidance_prob|img_size|test_mode|guidance|max_num_images|\w+_tokens|max_patches\w*|patch_size|packing_buffer_size|num_images\w*|spatial_merge_size)",
    r"parallelism\.\w+",
)


def is_torchtitan(values: dict[str, Any]) -> bool:
    """Whether the tables of a TOML file are torchtitan's."""
    return isinstance(values.get("training"), dict) and bool({"parallelism", "model", "job"} & values.keys())


def read(context: Context) -> None:
    """A torchtitan job. Raises ConfigError."""
    out = context.out
    keys = Keys(KEYS, dict(_flat(context.values)), context.where, out, HARMLESS)
    out.model = f"{keys.value('model.name')} {keys.value('model.flavor')}"
    out.note(keys.get("model.flavor"), "the shape is torchtitan's: --model names the same model elsewhere")
    out.take(our.OBJECTIVE, "sft", Given("loss", None, "sft", True), "cross-entropy on a packed stream")
    found = _sharding(context, keys)
    _precision(keys, found)
    stages = keys.value("parallelism.pipeline_parallel_degree")
    rows = keys.get("training.local_batch_size")
    if stages > 1:
        micro = keys.get("parallelism.pipeline_parallel_microbatch_size")
        number = max(1, rows.value // micro.value)
        out.take(our.MICROBATCHES, number, rows, f"{rows.value} sequences in micro-batches of {micro.value}")
        rows = micro
    training.batch(out, rows, keys.get("training.seq_len"), packing="rows")
    training.attention(out, Given("attention", None, None, True))
    _accumulation(keys, found)
    _optimizer(keys)
    _checkpointing(keys)
    if keys.value("training.compile") or keys.value("compile.enable"):
        out.lack("torch.compile is not modelled: the estimate is of eager modules")
    if keys.value("model.converters"):
        out.lack(
            f"converters {','.join(keys.value('model.converters'))[:40]} are not modelled: linear layers are taken "
            f"in bf16"
        )
    for name in ("compile.components", "training.mixed_precision_reduce"):
        keys.get(name)
    training.loop(out, "plain", "torchtitan")
    keys.finish()
    context.finish(found)


def _flat(values: dict[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    found: list[tuple[str, Any]] = []
    for key, value in values.items():
        name = f"{prefix}{key}"
        found.extend(_flat(value, f"{name}.") if isinstance(value, dict) else [(name, value)])
    return found


def _sharding(context: Context, keys: Keys) -> Sharding:
    found = Sharding("fsdp", version=2, where=context.where, given=keys.get("parallelism.data_parallel_shard_degree"))
    launched(context, found)
    shards = keys.value("parallelism.data_parallel_shard_degree")
    sizes = {
        option: keys.value(f"parallelism.{name}")
        for name, option in (
            ("data_parallel_replicate_degree", our.REPLICAS),
            ("tensor_parallel_degree", our.TENSOR_PARALLEL),
            ("pipeline_parallel_degree", our.PIPELINE_PARALLEL),
            ("context_parallel_degree", our.CONTEXT_PARALLEL),
            ("expert_parallel_degree", our.EXPERT_PARALLEL),
        )
    }
    for option, size in sizes.items():
        if size < 1:
            raise ConfigError(f"a size of {option.replace('_', ' ')} in {keys.where} is {size}: it needs at least 1.")
        if size > 1:
            found.sizes[option] = size
    if sizes[our.TENSOR_PARALLEL] > 1:
        keys.out.take(
            our.SEQUENCE_PARALLEL, True, keys.get("parallelism.tensor_parallel_degree"), "with sequence parallel"
        )
        loss = keys.get("parallelism.disable_loss_parallel")
        keys.out.take(our.LOSS_PARALLEL, not loss.value, loss, "logits stay sharded through the loss")
    if sizes[our.PIPELINE_PARALLEL] > 1:
        schedule = keys.get("parallelism.pipeline_parallel_schedule")
        name = {"1f1b": "1f1b", "gpipe": "gpipe", "interleaved1f1b": "interleaved"}.get(
            str(schedule.value).lower(), str(schedule.value).lower()
        )
        keys.out.take(our.PIPELINE_SCHEDULE, name, schedule)
    if shards > 1:
        found.sizes[our.DATA_PARALLEL] = shards
    known = 1
    for option, size in sizes.items():
        known *= 1 if option == our.EXPERT_PARALLEL else size
    if shards > 0 and found.world is None:
        found.world, found.world_from = shards * known, "the degrees of the file"
    reshard = keys.get("parallelism.fsdp_reshard_after_forward")
    found.reshard = (
        sizes[our.PIPELINE_PARALLEL] == 1 if str(reshard.value) == "default" else str(reshard.value) == "always"
    )
    keys.out.take(our.FSDP_WRAP, "plan", Given("FSDP's units", None, "plan", True), "norm and head are a unit apart")
    if keys.value("training.enable_cpu_offload"):
        found.offload = ("parameters",)
    return found


def _precision(keys: Keys, found: Sharding) -> None:
    shards, compute = keys.get("training.dtype"), keys.get("training.mixed_precision_param")
    weights, autocast = training.dtype(shards), training.dtype(compute)
    if weights == autocast:
        training.precision(keys.out, shards, weights=weights, autocast="", sharding=found, pure=True)
    else:
        training.precision(
            keys.out, compute, weights=weights, autocast="" if autocast == "fp32" else autocast, sharding=found
        )


def _accumulation(keys: Keys, found: Sharding) -> None:
    total, rows = keys.get("training.global_batch_size"), keys.value("training.local_batch_size")
    if total.value <= 0:
        keys.out.take(our.GRAD_ACCUM, 1, Given(total.key, total.raw, 1, total.default, "no accumulation"))
        return
    share = (
        found.sizes.get(our.TENSOR_PARALLEL, 1)
        * found.sizes.get(our.PIPELINE_PARALLEL, 1)
        * found.sizes.get(our.CONTEXT_PARALLEL, 1)
    )
    if found.world is None:
        keys.out.ask("global_batch_size sets accumulation by the number of GPUs: give --gpus N and --grad-accum N")
        return
    keys.out.take(our.GRAD_ACCUM, max(1, total.value // (rows * max(1, found.world // share))), total)


def _optimizer(keys: Keys) -> None:
    given, implementation = keys.get("optimizer.name"), keys.get("optimizer.implementation")
    word = str(implementation.value)
    if word not in ("fused", "foreach", "for-loop"):
        raise ConfigError(
            f"optimizer.implementation in {keys.where} is none of fused, foreach and for-loop: correct it."
        )
    training.optimizer(keys.out, given, implementation=word)
    if keys.value("optimizer.early_step_in_backward"):
        keys.take("optimizer.early_step_in_backward")


def _checkpointing(keys: Keys) -> None:
    mode, option = keys.get("activation_checkpoint.mode"), keys.get("activation_checkpoint.selective_ac_option")
    kind = str(mode.value).lower()
    plain = Given("use_reentrant", False, False, True)
    if kind == "selective" and str(option.value) == "op":
        keys.out.take(our.CHECKPOINTING, "selective", mode, "by operation: every other product and attention are kept")
        keys.out.lack(
            "selective checkpointing by operation is not modelled: taken as memcalc's selective, which keeps more"
        )
        keys.out.take(our.REENTRANT, False, plain)
        keys.out.note(option)
    elif kind == "selective":
        try:
            every = int(str(option.value))
        except ValueError:
            raise ConfigError(f"selective_ac_option in {keys.where} needs op or a number: correct it.") from None
        training.checkpointing(keys.out, option, every > 0, plain, every=max(1, every))
    elif kind in ("none", "full"):
        training.checkpointing(keys.out, mode, kind == "full", plain)
    elif kind == "memory_budget":
        keys.out.lack("activation_checkpoint.mode memory_budget is not modelled: taken as none, an upper bound")
        training.checkpointing(keys.out, mode, False)
    else:
        raise ConfigError(
            f"activation_checkpoint.mode in {keys.where} is none of none, selective, full and memory_budget: "
            f"correct it."
        )
