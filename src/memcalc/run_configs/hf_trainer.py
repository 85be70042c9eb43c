"""TrainingArguments of Transformers: a YAML or JSON file for HfArgumentParser, or a command line.

Source: transformers 5.24 (training_args.py); what changed with version 5 is said in `since`.
"""

from __future__ import annotations

from typing import Any

from memcalc.errors import ConfigError
from memcalc.run_configs import accelerate, deepspeed, training
from memcalc.run_configs import option_names as our
from memcalc.run_configs.context import Context
from memcalc.run_configs.keys import Keys, mapping
from memcalc.run_configs.known_keys.hf_keys import HARMLESS, KEYS
from memcalc.run_configs.mapping import Given, Mapping
from memcalc.run_configs.sharding import Sharding
from memcalc.setup.conflicts import GRADIENT_PROJECTING


def sharding(context: Context, keys: Keys, framework: str, default_version: int = 2) -> Sharding:
    """What the trainer's own keys and the other files say about GPUs, put together. Raises ConfigError."""
    out, found = context.out, context.sharding or Sharding()
    fsdp, fsdp_config = keys.get("fsdp"), keys.get("fsdp_config")
    named = keys.get("deepspeed")
    if named.value not in (None, "", False) and not (found.kind == "zero" and found.where and not found.wrong):
        own = deepspeed.named(named.value, keys.where, out, framework)
        found = _with_world(own, found) if own is not None else found
    elif named.value not in (None, "", False):
        out.note(named, f"read from {found.where}")
    fsdp_on = fsdp.value not in (None, "", False, [], "false", "False")
    if fsdp_on or (fsdp_config.value and fsdp.default and framework == "axolotl"):
        if found.kind == "zero":
            raise ConfigError("fsdp and deepspeed exclude each other: keep one of them.")
        if found.kind != "fsdp":
            found = _with_world(_fsdp(fsdp, fsdp_config, keys, out, default_version), found)
    elif fsdp_config.value and not fsdp_config.default and fsdp.value in (None, "", []):
        out.drop(fsdp_config, "fsdp is not set")
    for name, option in (("tp_size", our.TENSOR_PARALLEL), ("cp_size", our.CONTEXT_PARALLEL)):
        size = keys.value("parallelism_config").get(name)
        if isinstance(size, int) and size > 1:
            found.sizes[option] = size
    launched(context, found)
    training.conflict(
        out, "gradient_accumulation_steps", _said(keys, "gradient_accumulation_steps"), found.grad_accum, found.where
    )
    rows = _said(keys, "per_device_train_batch_size")
    if found.total_batch and rows and found.world and _said(keys, "gradient_accumulation_steps") is None:
        share = max(1, found.total_batch // (rows * found.world))
        keys.values["gradient_accumulation_steps"] = share
        out.assume(f"train_batch_size {found.total_batch} over {found.world} GPUs makes {share} accumulation steps")
    training.conflict(out, "the micro-batch", _said(keys, "per_device_train_batch_size"), found.batch, found.where)
    return found


def _said(keys: Keys, name: str) -> Any:
    given = keys.get(name) if name in keys.rows else None
    return None if given is None or given.default else given.value


def launched(context: Context, found: Sharding) -> None:
    """The number of GPUs that the launch line says; several without an engine are DDP."""
    if context.world is not None:
        found.world, found.world_from = context.world, context.world_from
    if not found.kind and found.world is not None and found.world > 1:
        found.kind = "ddp"


def _with_world(own: Sharding, other: Sharding) -> Sharding:
    own.world, own.world_from = other.world, other.world_from
    own.sizes = {**other.sizes, **own.sizes}
    own.grad_accum = own.grad_accum or other.grad_accum
    return own


def _fsdp(fsdp: Given, config: Given, keys: Keys, out: Mapping, default_version: int) -> Sharding:
    found = Sharding(where=keys.where, given=fsdp if not fsdp.default else config)
    values = config.value if isinstance(config.value, dict) else {}
    if isinstance(config.value, str) and config.value.strip().startswith("{"):
        values = mapping(config.value)
    elif isinstance(config.value, str):
        out.ask("fsdp_config names a file that is not among the files: give it too")
    accelerate.fsdp(values, keys.where, out, found, default_version)
    words = fsdp.value if isinstance(fsdp.value, (list, tuple)) else str(fsdp.value or "").replace(",", " ").split()
    words = [str(word).lower() for word in words]
    if "shard_grad_op" in words or "hybrid_shard_zero2" in words:
        found.reshard = False
    if "offload" in words:
        found.offload = ("parameters",)
    if "no_shard" in words:
        found.kind = "ddp"
    return found


def autocast(keys: Keys, framework: str = "the trainer") -> tuple[str, Given]:
    """The dtype of autocast (empty: none), and the key that says it. Raises ConfigError for both."""
    bf16, fp16 = keys.get("bf16"), keys.get("fp16")
    if bf16.value and fp16.value and not (bf16.default or fp16.default):
        raise ConfigError(f"{keys.where} sets both bf16 and fp16: {framework} takes one of them.")
    if fp16.value and not fp16.default:
        return "fp16", fp16
    return ("bf16" if bf16.value else ""), bf16


def common(context: Context, keys: Keys, found: Sharding, *, reentrant: bool = False) -> None:
    """Keys that mean the same in every framework on Trainer: accumulation, optimizer, checkpointing, Liger and more."""
    out = context.out
    accumulation = keys.take("gradient_accumulation_steps")
    optimizer(keys, found, accumulation.value)
    checkpointing(keys, found, reentrant)
    smoothing = keys.get("label_smoothing_factor")
    if smoothing.value:
        out.take(our.LABEL_SMOOTHING, smoothing.value, smoothing)
    rest(keys)


def optimizer(keys: Keys, found: Sharding, accumulation: int) -> None:
    """`optim` with its arguments; DeepSpeed's own optimizer goes before it."""
    given = keys.get("optim") if "optim" in keys.rows else keys.get("optimizer")
    if found.optimizer:
        keys.out.drop(given, f"{found.where} has an optimizer of its own")
        on_host = "optimizer" in found.offload
        given = Given(
            "optimizer.type", found.optimizer, "adamw" if found.optimizer.lower() == "adam" else found.optimizer
        )
        training.optimizer(keys.out, given, implementation="" if on_host else "fused", accumulation=accumulation)
        return
    training.optimizer(keys.out, given, accumulation=accumulation)
    if keys.out.setup.get(our.OPTIMIZER) in GRADIENT_PROJECTING and "optim_args" in keys.rows:
        rank = galore_rank(keys.value("optim_args"))
        keys.out.take(our.GALORE_RANK, rank, keys.get("optim_args"), f"rank {rank}")


def galore_rank(arguments: Any) -> int:
    """`rank=` of optim_args; 128 when absent."""
    if isinstance(arguments, str):
        arguments = dict(part.split("=", 1) for part in arguments.replace(" ", "").split(",") if "=" in part)
    rank = arguments.get("rank", 128) if isinstance(arguments, dict) else 128
    return int(rank) if str(rank).isdigit() and int(rank) > 0 else 128


def checkpointing(keys: Keys, found: Sharding, reentrant: bool) -> None:
    """`activation_checkpointing`, with FSDP's own where that is on."""
    on, kwargs = keys.get("activation_checkpointing"), keys.get("activation_checkpointing_kwargs")
    if found.checkpointing and on.value and not on.default:
        keys.out.assume(
            "checkpointing is on twice, in the trainer and in FSDP: recent Trainers refuse that; taken once"
        )
    if found.checkpointing and not (on.value and not on.default):
        given = Given("fsdp_activation_checkpointing", True, True)
        training.checkpointing(keys.out, given, True, Given("use_reentrant", False, False, True))
        return
    how = training.use_reentrant(kwargs, reentrant, "reentrant" if reentrant else "non-reentrant")
    values = kwargs.value if isinstance(kwargs.value, dict) else {}
    every = values.get("every_n_layers", 1)
    training.checkpointing(keys.out, on, bool(on.value), how, every=every if isinstance(every, int) else 1)
    if on.value and values.get("offload"):
        keys.out.take(our.ACTIVATION_OFFLOADING, True, kwargs, "checkpointed inputs in host memory")
    if not on.value and not kwargs.default and kwargs.value:
        keys.out.drop(kwargs, "checkpointing is off")


def rest(keys: Keys) -> None:
    """Keys that change memory in ways that are not modelled."""
    out = keys.out
    if keys.value("torch_compile"):
        out.lack("torch_compile is not modelled: the estimate is of eager modules")
    if keys.value("auto_find_batch_size"):
        out.assume("auto_find_batch_size: the batch is halved until it fits, so it cannot be known; took the one given")
    if "ddp_bucket_cap_mb" in keys.rows and keys.has("ddp_bucket_cap_mb"):
        keys.take("ddp_bucket_cap_mb")
    if keys.value("accelerator_config").get("split_batches"):
        out.assume("split_batches: the batch of the file is the total of all processes; taken as it stands")
    if keys.has("group_by_length") and keys.value("group_by_length"):
        out.assume("group_by_length: the longest samples meet in one batch")
    for name in ("per_device_eval_batch_size", "torch_empty_cache_steps", "optim_target_modules", "optim_args"):
        if name in keys.rows:
            keys.get(name)


def read(context: Context) -> None:
    """TrainingArguments with a script of which only its keys are known. Raises ConfigError."""
    out = context.out
    keys = Keys(context.rows or KEYS, context.values, context.where, out, HARMLESS)
    model = keys.get("model_name_or_path")
    out.model = model.value
    if model.default:
        out.ask("the model is in none of the files: give --model PATH, ID or COUNT")
    found = sharding(context, keys, "hf")
    dtype, given = autocast(keys)
    kwargs = keys.value("model_init_kwargs")
    named = kwargs.get("dtype", kwargs.get("torch_dtype"))
    loaded = keys.get("dtype") if named is None else Given("model_init_kwargs.dtype", named, named)
    weights = loaded_dtype(out, loaded, dtype)
    training.precision(out, given, weights=weights, autocast=dtype, sharding=found)
    cap = keys.get("max_seq_length")
    padded = keys.get("pad_to_max_length") if "pad_to_max_length" in keys.rows else None
    training.batch(out, keys.get("per_device_train_batch_size"), cap)
    if padded is not None and padded.value:
        out.note(padded)
    training.attention(out, keys.get("attn_implementation"))
    common(context, keys, found)
    if keys.value("use_liger_kernel"):
        training.liger(out, keys.get("use_liger_kernel"), chosen=keys.get("liger_kernel_config"))
    task(keys)
    out.take(our.OBJECTIVE, "sft", Given("objective", None, "sft", True), "the model's own loss")
    training.loop(out, "hf", "Trainer")
    keys.finish()
    context.finish(found)


def loaded_dtype(out: Mapping, loaded: Given, autocast: str) -> str:
    """The dtype that weights load in: what is said, else the checkpoint's own (Transformers 5), which bf16 hints at."""
    named = "auto" if loaded.value is None else training.dtype(loaded)
    if named != "auto":
        return named
    weights = "bf16" if autocast == "bf16" else "fp32"
    out.assume(
        f"weights load in the checkpoint's own dtype (Transformers 5; fp32 before): taken as {weights}; --precision "
        f"says otherwise"
    )
    return weights


def task(keys: Keys) -> None:
    """GLUE's script: a classifier of two classes unless the task has others."""
    given = keys.get("task_name") if "task_name" in keys.rows else None
    if given is None or given.default:
        return
    labels = {"mnli": 3, "stsb": 1}.get(str(given.value).lower(), 2)
    keys.out.take(our.TASK, "sequence-classification", given, "a GLUE task is a sequence classifier")
    keys.out.take(our.NUM_LABELS, labels, given, f"classes of {given.shown}")
