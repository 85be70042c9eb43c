"""DeepSpeed's JSON file, as transformers 5 fills it.

Source: deepspeed 0.19 (runtime/config.py, runtime/zero/config.py).
`auto` follows the trainer. The number of GPUs is never in the file.
"""

from __future__ import annotations

import os
import re
from typing import Any

from memcalc.common.escaping import quoted
from memcalc.errors import ConfigError
from memcalc.run_configs import option_names as our
from memcalc.run_configs.json_text import load_json
from memcalc.run_configs.keys import Key, Keys, anything, flag, harmless, mapping, number, table, text, whole
from memcalc.run_configs.mapping import Given, Mapping
from memcalc.run_configs.optimizer_names import spelled
from memcalc.run_configs.presets import PRESETS
from memcalc.run_configs.sharding import Sharding


def auto(kind: Any) -> Any:
    """A kind that lets `auto` through."""
    return lambda raw: "auto" if isinstance(raw, str) and raw.strip().lower() == "auto" else kind(raw)


KEYS = table(
    Key("train_micro_batch_size_per_gpu", auto(whole), None, our.BATCH, "micro-batch of one GPU"),
    Key("gradient_accumulation_steps", auto(whole), None, our.GRAD_ACCUM, "micro-batches per step"),
    Key("train_batch_size", auto(whole), None, "", "micro-batch times accumulation times GPUs"),
    Key("zero_optimization", anything, {}, our.PARALLEL, "what is sharded"),
    Key(
        "bf16",
        anything,
        {},
        our.PRECISION,
        "module in bf16, fp32 master copy and states in shards",
        other=("bfloat16",),
    ),
    Key("fp16", anything, {}, our.PRECISION, "module in fp16, fp32 master copy and states in shards"),
    Key("data_types", mapping, {}, "", "dtype that gradients are summed in"),
    Key("optimizer", mapping, {}, our.OPTIMIZER, "an optimizer of DeepSpeed's own"),
    Key("tensor_parallel", mapping, {}, our.TENSOR_PARALLEL, "AutoTP"),
    Key("zero_force_ds_cpu_optimizer", flag, True, "", "states on the host are stepped by DeepSpeedCPUAdam"),
    Key("zero_allow_untested_optimizer", flag, False, "", "lets the trainer's own optimizer through"),
    Key("pipeline", anything, {}, "", "pipeline stages of DeepSpeed's own"),
)

ZERO = table(
    Key("stage", whole, 0, our.PARALLEL, "1 states, 2 and gradients, 3 and parameters"),
    Key("offload_optimizer", anything, None, our.CPU_OFFLOAD, "where states live"),
    Key("offload_param", anything, None, our.CPU_OFFLOAD, "where shards of parameters live"),
    Key("cpu_offload", flag, False, our.CPU_OFFLOAD, "the old name of offload_optimizer: cpu", "before 0.4"),
    Key("reduce_bucket_size", auto(number), 5e8, "", "elements of the gradient bucket; auto is hidden²"),
    Key("allgather_bucket_size", auto(number), 5e8, "", "elements of the gathering bucket"),
    Key("overlap_comm", auto(flag), None, "", "two gradient buckets; on by itself in stage 3"),
    Key("contiguous_gradients", auto(flag), True, "", "gradients copied into one buffer"),
    Key("reduce_scatter", auto(flag), True, "", "reduce-scatter instead of all-reduce"),
    Key("round_robin_gradients", flag, False, "", "gradients spread in another order"),
    Key(
        "stage3_prefetch_bucket_size", auto(number), 5e7, "", "elements gathered ahead", other=("prefetch_bucket_size",)
    ),
    Key(
        "stage3_param_persistence_threshold",
        auto(number),
        1e5,
        "",
        "parameters up to this size stay whole",
        other=("param_persistence_threshold",),
    ),
    Key(
        "stage3_max_live_parameters", auto(number), 1e9, "", "elements gathered at once", other=("max_live_parameters",)
    ),
    Key("stage3_max_reuse_distance", auto(number), 1e9, "", "kept for reuse", other=("max_reuse_distance",)),
    Key("sub_group_size", auto(number), 1e9, "", "elements stepped at once"),
    Key("zero_hpz_partition_size", whole, 1, "", "ZeRO++: a second copy of the shards in the node"),
    Key("zero_quantized_weights", flag, False, "", "ZeRO++: gathered in 8 bits"),
    Key("zero_quantized_gradients", flag, False, "", "ZeRO++: reduced in 4 bits"),
    Key("mics_shard_size", whole, -1, "", "MiCS: GPUs that share one copy"),
)

ENABLED = table(Key("enabled", auto(flag), False, our.PRECISION, "whether it is on"))

HARMLESS = harmless(
    "gradient_clipping prescale_gradients gradient_predivide_factor communication_data_type sparse_gradients scheduler "
    "steps_per_print wall_clock_breakdown flops_profiler comms_logger dump_state memory_breakdown tensorboard wandb "
    "csv_monitor checkpoint elasticity autotuning activation_checkpointing aio comment hybrid_engine seed "
    "zero_allow_untested_optimizer disable_allgather comms_config amp load_universal_checkpoint",
    "_.*|.*_comment",
)
ZERO_HARMLESS = harmless(
    "allgather_partitions stage3_gather_16bit_weights_on_model_save gather_16bit_weights_on_model_save "
    "stage3_gather_fp16_weights_on_model_save load_from_fp32_weights elastic_checkpoint ignore_unused_parameters "
    "stage3_use_all_reduce_for_fetch_params memory_efficient_linear use_multi_rank_bucket_allreduce leaf_module "
    "stage3_module_granularity_threshold log_trace_cache_warnings pipeline_loading_checkpoint override_module_apply "
    "zeropp_loco_param mics_hierarchical_params_gather legacy_stage1 "
    "model_persistence_threshold "
    "stage3_model_persistence_threshold use_all_reduce_for_fetch_params module_granularity_threshold"
)

_PASSED_ON = (
    "reduce_bucket_size",
    "allgather_bucket_size",
    "overlap_comm",
    "reduce_scatter",
    "contiguous_gradients",
    "round_robin_gradients",
    "stage3_prefetch_bucket_size",
    "stage3_param_persistence_threshold",
    "stage3_max_live_parameters",
    "stage3_max_reuse_distance",
    "sub_group_size",
    "zero_hpz_partition_size",
)
"""Keys of `zero_optimization` that are options of memcalc; those of stage 3 act there only."""


def is_deepspeed(values: dict[str, Any]) -> bool:
    """Whether a mapping is a DeepSpeed file."""
    return (
        "zero_optimization" in values
        or "train_micro_batch_size_per_gpu" in values
        or any(
            isinstance(values.get(name), dict) and "enabled" in values[name] for name in ("bf16", "fp16", "bfloat16")
        )
    )


def read(values: dict[str, Any], where: str, out: Mapping, given: Given | None = None) -> Sharding:
    """What a DeepSpeed file says. Raises ConfigError."""
    keys = Keys(KEYS, values, where, out, HARMLESS)
    found = Sharding("zero", where=where, given=given)
    zero_values = keys.value("zero_optimization")
    if isinstance(zero_values, bool):  # the spelling of the first releases
        zero_values = {"stage": int(zero_values)}
    if not isinstance(zero_values, dict):
        raise ConfigError(f"zero_optimization in {where} needs a mapping with a stage: correct it.")
    zero = Keys(ZERO, zero_values, f"zero_optimization of {where}", out, ZERO_HARMLESS)
    found.stage = zero.value("stage")
    if found.stage not in (0, 1, 2, 3):
        raise ConfigError(f"DeepSpeed has no ZeRO stage {found.stage} ({where}): use 0, 1, 2 or 3.")
    found.given = given or Given("zero_optimization.stage", found.stage, found.stage, not zero.has("stage"))
    for name, option in (("train_micro_batch_size_per_gpu", "batch"), ("gradient_accumulation_steps", "grad_accum")):
        value = keys.value(name)
        setattr(found, option, value if isinstance(value, int) else None)
    total = keys.value("train_batch_size")
    found.total_batch = total if isinstance(total, int) else None
    found.precision = _precision(keys, where)
    found.offload = _offload(zero, found, keys, out)
    _optimizer(keys, found)
    _zero_options(zero, found)
    if keys.value("data_types").get("grad_accum_dtype") not in (None, "bf16", "fp16"):
        out.lack("data_types.grad_accum_dtype is not modelled: gradients are summed in the module's dtype")
    size = keys.value("tensor_parallel").get("autotp_size")
    if isinstance(size, int) and size > 1:
        found.sizes[our.TENSOR_PARALLEL] = size
    if keys.has("pipeline"):
        out.lack("pipeline stages of DeepSpeed's own are not modelled")
    for name in ("zero_quantized_weights", "zero_quantized_gradients"):
        if zero.value(name):
            out.lack(f"{name} (ZeRO++) is not modelled: weights and gradients are counted in their own dtype")
    if zero.value("mics_shard_size") > 0:
        out.lack("mics_shard_size (MiCS) is not modelled: weights are shared by all ranks")
    keys.finish()
    zero.finish()
    return found


def _precision(keys: Keys, where: str) -> str:
    states = {}
    for name in ("bf16", "fp16"):
        value = keys.value(name)
        block = value if isinstance(value, dict) else {"enabled": value}
        states[name] = Keys(ENABLED, block, f"{name} of {where}", keys.out).value("enabled")
    if states["bf16"] is True and states["fp16"] is True:
        raise ConfigError(f"{where} enables both bf16 and fp16: DeepSpeed takes one of them.")
    for name, state in states.items():
        if state is True:
            return name
    return "auto" if "auto" in states.values() else "fp32"


def device(given: Given) -> str:
    """Where something is offloaded: cpu, nvme, or empty. Raises ConfigError."""
    value = given.value
    name = value.get("device", "none") if isinstance(value, dict) else value
    if name is True:
        return "cpu"
    if name in (None, False, "none", "None"):
        return ""
    if name not in ("cpu", "nvme"):
        raise ConfigError(f"{given.key} needs a device: cpu, nvme or none, not {quoted(name)}.")
    return str(name)


def _offload(zero: Keys, found: Sharding, keys: Keys, out: Mapping) -> tuple[str, ...]:
    kept = []
    for name, what in (("offload_optimizer", "optimizer"), ("offload_param", "parameters")):
        given = zero.get(name)
        place = device(given)
        if name == "offload_optimizer" and not place and zero.value("cpu_offload"):
            place = "cpu"
        if place == "nvme":
            out.assume(f"{name} to nvme: its host buffers are counted as host memory is (cpu)")
        if place and what == "parameters" and found.stage < 3:
            out.drop(given, f"only ZeRO stage 3 shards parameters, and this is stage {found.stage}")
        elif place and found.stage == 0:
            out.drop(given, "ZeRO stage 0 shards nothing that could be offloaded")
        elif place:
            kept.append(what)
    return tuple(kept)


def _optimizer(keys: Keys, found: Sharding) -> None:
    kind = keys.value("optimizer").get("type")
    if kind is not None:
        found.optimizer = str(kind)
        if found.optimizer.lower() not in ("adam", "adamw"):
            spelled(found.optimizer)


def _zero_options(zero: Keys, found: Sharding) -> None:
    for name in _PASSED_ON:
        given = zero.get(name)
        if found.stage != 3 and (name.startswith("stage3") or name in ("sub_group_size", "zero_hpz_partition_size")):
            zero.out.drop(given, f"it acts in ZeRO stage 3, and this is stage {found.stage}")
            continue
        if found.stage == 3 and name == "round_robin_gradients":
            zero.out.drop(given, "it acts in ZeRO stages 1 and 2, and this is stage 3")
            continue
        if given.default or given.value == "auto" or found.stage == 0:
            continue
        value = given.value
        if name == "sub_group_size" and value < 1:
            zero.out.assume("sub_group_size 0 is taken as DeepSpeed's default")
            continue
        found.options[our.ZERO_PREFIX + name.removeprefix("zero_")] = int(value) if isinstance(value, float) else value
    _auto_sizes(zero, found)


def _auto_sizes(zero: Keys, found: Sharding) -> None:
    """Sizes that Trainer fills from hidden_size; the others stay DeepSpeed's, and say so where one is filled."""
    sizes = ["reduce_bucket_size"]
    if found.stage == 3:
        sizes += ["stage3_prefetch_bucket_size", "stage3_param_persistence_threshold"]
    given = {name: zero.get(name) for name in sizes}
    if found.stage == 0 or not any(one.value == "auto" for one in given.values()):
        return
    found.options[our.ZERO_AUTO] = True
    for name, one in given.items():
        if one.default:
            found.options[our.ZERO_PREFIX + name] = int(one.value)


def named(reference: Any, where: str, out: Mapping, framework: str) -> Sharding | None:
    """The sharding that a trainer's `deepspeed:` names: a mapping, or the name of a preset that is not at hand.

    Returns None where the file is a stranger's: it is asked for.
    """
    if isinstance(reference, dict):
        return read(reference, f"deepspeed of {where}", out)
    if isinstance(reference, str) and reference.lstrip().startswith("{"):
        return read(load_json(reference, f"deepspeed of {where}"), f"deepspeed of {where}", out)
    if not isinstance(reference, str):
        raise ConfigError(
            f"deepspeed in {where} needs a file's name or a mapping, not {quoted(reference)}: correct it."
        )
    name = text(reference)
    base = os.path.basename(name.replace("\\", "/"))
    owner = "llamafactory" if base.startswith("ds_z") else framework
    for known in (base, base.removesuffix(".json")):
        preset = PRESETS.get(owner, {}).get(known)
        if preset is not None:
            out.assume(f"deepspeed: {base} is not among the files; took {owner}'s preset of that name")
            return read(preset, f"{owner}'s {base}", Mapping(), Given("deepspeed", name, base))
    match = re.search(r"(?:zero|z|stage|ds)[_-]?(?:stage)?[_-]?([0-3])(?!\d)", base.lower())
    stage = None if match is None else int(match[1])
    if stage is None:
        out.ask(f"deepspeed: {base} is not among the files: give it too")
        return None
    out.assume(
        f"deepspeed: {base} is not among the files; its name says ZeRO stage {stage}, the rest is DeepSpeed's default"
    )
    offload: tuple[str, ...] = ()
    if "offload" in base.lower() and stage:
        offload = ("optimizer", "parameters") if stage == 3 else ("optimizer",)
        out.assume(f"its name says offloading: took {' and '.join(offload)} on the host")
    given = Given("deepspeed", name, base)
    return Sharding("zero", stage=stage, precision="auto", where=base, given=given, offload=offload)
