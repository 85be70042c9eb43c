"""Accelerate's launch file. Source: accelerate 1.15 (commands/config, utils/dataclasses.py), TRL's shipped files."""

from __future__ import annotations

import os
from typing import Any

from memcalc.errors import ConfigError
from memcalc.run_configs import deepspeed
from memcalc.run_configs import option_names as our
from memcalc.run_configs.keys import Key, Keys, anything, flag, harmless, mapping, names, table, text, whole
from memcalc.run_configs.mapping import Given, Mapping
from memcalc.run_configs.presets import ACCELERATE
from memcalc.run_configs.sharding import Sharding

KEYS = table(
    Key("distributed_type", text, "NO", our.PARALLEL, "the engine"),
    Key("num_processes", whole, None, our.GPUS, "GPUs of all machines"),
    Key("num_machines", whole, 1, "", "machines"),
    Key("mixed_precision", text, None, our.PRECISION, "autocast; a Trainer's own bf16 and fp16 go before it"),
    Key("fp16", flag, False, our.PRECISION, "the old name of mixed_precision: fp16"),
    Key("fsdp_config", mapping, {}, our.PARALLEL, "FSDP's ways"),
    Key("deepspeed_config", mapping, {}, our.PARALLEL, "ZeRO's ways"),
    Key("megatron_lm_config", mapping, {}, our.PARALLEL, "Megatron-LM's ways"),
    Key("parallelism_config", mapping, {}, "", "sizes of the device mesh"),
    Key("fp8_config", mapping, {}, "", "fp8 linear layers"),
    Key("gradient_accumulation_steps", whole, None, our.GRAD_ACCUM, "micro-batches per step"),
    Key("use_cpu", flag, False, "", "no GPU at all"),
    Key("dynamo_config", anything, {}, "", "torch.compile"),
)


_STRATEGIES = {"1": "FULL_SHARD", "2": "SHARD_GRAD_OP", "3": "NO_SHARD", "4": "HYBRID_SHARD", "5": "HYBRID_SHARD_ZERO2"}


def _reshard(raw: Any) -> bool:
    """True or false, or the name of a strategy, as version 1 has it."""
    word = str(raw).upper()
    if word in _STRATEGIES.values():
        return word not in ("SHARD_GRAD_OP", "HYBRID_SHARD_ZERO2")
    return flag(raw)


FSDP = table(
    Key("fsdp_version", whole, 1, our.PARALLEL, "1 unless it says 2"),
    Key("fsdp_sharding_strategy", text, "FULL_SHARD", our.RESHARD, "what is sharded (version 1)"),
    Key("fsdp_reshard_after_forward", _reshard, None, our.RESHARD, "shard again after forward"),
    Key("fsdp_offload_params", flag, False, our.CPU_OFFLOAD, "shards, gradients and states on the host"),
    Key("fsdp_activation_checkpointing", flag, False, our.CHECKPOINTING, "FSDP's own checkpointing"),
    Key("fsdp_auto_wrap_policy", text, None, "", "what is a unit"),
    Key("fsdp_transformer_layer_cls_to_wrap", names, None, "", "the blocks"),
    Key("fsdp_min_num_params", whole, 100_000_000, "", "size of a unit with SIZE_BASED_WRAP"),
    Key("fsdp_backward_prefetch", text, "NO_PREFETCH", "", "one more unit in flight"),
    Key("fsdp_forward_prefetch", flag, False, "", "one more unit in flight"),
    Key("fsdp_use_orig_params", flag, True, "", "parameters are views of the flat one"),
)
DEEPSPEED = table(
    Key("zero_stage", whole, 2, our.PARALLEL, "ZeRO stage"),
    Key("offload_optimizer_device", text, "none", our.CPU_OFFLOAD, "where states live"),
    Key("offload_param_device", text, "none", our.CPU_OFFLOAD, "where shards of parameters live"),
    Key("gradient_accumulation_steps", deepspeed.auto(whole), None, our.GRAD_ACCUM, "micro-batches per step"),
    Key("deepspeed_config_file", text, None, "", "another file that says all of this"),
)

_MESH = "parallelism_config_"
HARMLESS = harmless(
    "compute_environment debug downcast_bf16 enable_cpu_affinity machine_rank main_training_function rdzv_backend "
    "same_network tpu_env tpu_use_cluster tpu_use_sudo main_process_ip main_process_port use_cpu gpu_ids "
    "deepspeed_hostfile commands command_file tpu_name tpu_zone ipex_config mpirun_config main_process_port "
    "dynamo_backend log_dir role rdzv_endpoint max_restarts monitor_interval tpu_vm profile base_job_name "
    "ec2_instance_type iam_role_name image_uri region py_version pytorch_version transformers_version "
    "sagemaker_inputs_file sagemaker_metrics_file additional_args use_ipex"
)
FSDP_HARMLESS = harmless(
    "fsdp_state_dict_type fsdp_cpu_ram_efficient_loading fsdp_sync_module_states fsdp_limit_all_gathers "
    "fsdp_backward_prefetch_policy"
)
DEEPSPEED_HARMLESS = harmless(
    "deepspeed_multinode_launcher zero3_init_flag zero3_save_16bit_model gradient_clipping deepspeed_hostfile "
    "deepspeed_exclusion_filter deepspeed_inclusion_filter deepspeed_moe_layer_cls_names"
)


def is_accelerate(values: dict[str, Any]) -> bool:
    """Whether a mapping is an Accelerate file."""
    return "distributed_type" in values or ("compute_environment" in values and "num_processes" in values)


def read(values: dict[str, Any], where: str, out: Mapping) -> tuple[Sharding, str]:
    """What an Accelerate file says: sharding, and the mixed precision of the script (empty: none).

    Raises ConfigError.
    """
    keys = Keys(KEYS, values, where, out, HARMLESS)
    kind = keys.get("distributed_type")
    found = Sharding(where=where, given=kind)
    name = str(kind.value).upper().replace("FALSE", "NO")
    precision = str(keys.value("mixed_precision") or ("fp16" if keys.value("fp16") else "no")).lower()
    precision = "" if precision in ("no", "false") else precision
    if name == "FSDP" or keys.value("fsdp_config"):
        fsdp(keys.value("fsdp_config"), where, out, found, 1)
    elif name == "DEEPSPEED":
        _deepspeed(keys.value("deepspeed_config"), where, out, found, precision)
    elif name == "MEGATRON_LM":
        _megatron(keys.value("megatron_lm_config"), found, out)
    elif name.startswith("MULTI_") and name not in ("MULTI_CPU",):
        found.kind = "ddp"
    elif name not in ("NO", "MULTI_CPU", "XLA", "TPU", "NO_DISTRIBUTED"):
        raise ConfigError(
            f"distributed_type {name[:40]!r} in {where} is none of Accelerate's: NO, MULTI_GPU, FSDP, DEEPSPEED or "
            f"MEGATRON_LM."
        )
    processes = keys.value("num_processes")
    if processes is not None and processes >= 1:
        found.world, found.world_from = processes, f"num_processes of {where}"
    elif name == "NO":
        found.world, found.world_from = (1, "distributed_type NO") if keys.has("num_processes") else (None, "")
    accumulation = keys.value("gradient_accumulation_steps")
    found.grad_accum = found.grad_accum or accumulation
    _mesh(keys.value("parallelism_config"), found, where)
    if keys.value("fp8_config") and precision == "fp8":
        backend = str(keys.value("fp8_config").get("backend", "AO"))
        out.lack(f"fp8 linear layers ({backend[:20]}) are not modelled: the estimate is of bf16 autocast")
    if keys.has("dynamo_config") and keys.value("dynamo_config"):
        out.lack("torch.compile is not modelled: the estimate is of eager modules")
    keys.finish()
    return found, precision


def fsdp(values: dict[str, Any], where: str, out: Mapping, found: Sharding, default_version: int) -> None:
    """FSDP's ways, with or without the prefix `fsdp_`."""
    prefixed = {k if k.startswith("fsdp_") else f"fsdp_{k}": v for k, v in values.items() if not k.startswith("_")}
    keys = Keys(FSDP, prefixed, f"fsdp_config of {where}", out, FSDP_HARMLESS)
    found.kind = "fsdp"
    version = keys.get("fsdp_version")
    found.version = default_version if version.default else version.value
    if found.version not in (1, 2):
        raise ConfigError(f"fsdp_version in {where} is {found.version}: FSDP has versions 1 and 2.")
    strategy = str(keys.value("fsdp_sharding_strategy")).upper()
    strategy = _STRATEGIES.get(strategy, strategy)
    reshard = keys.value("fsdp_reshard_after_forward")
    if found.version == 2:
        found.reshard = True if reshard is None else bool(reshard)
        if keys.has("fsdp_sharding_strategy") and reshard is not None:
            out.drop(keys.get("fsdp_sharding_strategy"), "version 2 has reshard_after_forward in its place")
        elif keys.has("fsdp_sharding_strategy"):
            found.reshard = strategy not in ("SHARD_GRAD_OP", "HYBRID_SHARD_ZERO2")
    else:
        found.reshard = strategy not in ("SHARD_GRAD_OP", "HYBRID_SHARD_ZERO2")
        if strategy == "NO_SHARD":
            found.kind = "ddp"
        if strategy.startswith("HYBRID"):
            out.ask("HYBRID_SHARD shards inside a node: give --data-parallel-replicas and --data-parallel-size")
    if keys.value("fsdp_offload_params"):
        found.offload = ("parameters",)
    found.checkpointing = keys.value("fsdp_activation_checkpointing") or None
    for name in (
        "fsdp_auto_wrap_policy",
        "fsdp_transformer_layer_cls_to_wrap",
        "fsdp_use_orig_params",
        "fsdp_backward_prefetch",
        "fsdp_forward_prefetch",
        "fsdp_min_num_params",
    ):
        given = keys.get(name)
        if not given.default:
            out.note(given)
    keys.finish()


def _deepspeed(values: dict[str, Any], where: str, out: Mapping, found: Sharding, precision: str) -> None:
    keys = Keys(DEEPSPEED, values, f"deepspeed_config of {where}", out, DEEPSPEED_HARMLESS)
    found.kind = "zero"
    other = keys.get("deepspeed_config_file")
    if not other.default:
        read_there = deepspeed.named(other.value, where, out, "")
        found.stage = 2 if read_there is None else read_there.stage
        found.precision = "auto"
        found.wrong = os.path.basename(str(other.value))
        keys.finish()
        return
    found.stage = keys.value("zero_stage")
    if found.stage not in (0, 1, 2, 3):
        raise ConfigError(f"zero_stage in {where} is {found.stage}: DeepSpeed has stages 0 to 3.")
    found.precision = precision or "auto"
    offloaded = []
    for name, what in (("offload_optimizer_device", "optimizer"), ("offload_param_device", "parameters")):
        given = keys.get(name)
        if deepspeed.device(given):
            if what == "parameters" and found.stage < 3:
                out.drop(given, f"only ZeRO stage 3 shards parameters, and this is stage {found.stage}")
            else:
                offloaded.append(what)
    found.offload = tuple(offloaded)
    accumulation = keys.value("gradient_accumulation_steps")
    found.grad_accum = accumulation if isinstance(accumulation, int) else None
    keys.finish()


def _megatron(values: dict[str, Any], found: Sharding, out: Mapping) -> None:
    found.kind = "megatron"
    out.lack("Accelerate's Megatron-LM plugin: its sizes are taken, its own ways are not modelled")
    for name, option in (("tp_degree", our.TENSOR_PARALLEL), ("pp_degree", our.PIPELINE_PARALLEL)):
        size = values.get(f"megatron_lm_{name}")
        if size is not None:
            found.sizes[option] = whole(size)


def _mesh(values: dict[str, Any], found: Sharding, where: str) -> None:
    sizes = {}
    for key, value in values.items():
        name = key.removeprefix(_MESH)
        if name.endswith("_size"):
            try:
                sizes[name.removesuffix("_size")] = whole(value)
            except ValueError:
                raise ConfigError(f"{key} in {where} needs a whole number: correct it.") from None
    for name, option in (("tp", our.TENSOR_PARALLEL), ("cp", our.CONTEXT_PARALLEL), ("sp", our.SEQUENCE_PARALLEL_SIZE)):
        if sizes.get(name, 1) > 1:
            found.sizes[option] = sizes[name]
    if sizes.get("dp_replicate", 1) > 1:
        found.sizes[our.REPLICAS] = sizes["dp_replicate"]
    if sizes.get("dp_shard", 1) > 1:
        found.sizes[our.DATA_PARALLEL] = sizes["dp_shard"]
    product = 1
    for size in sizes.values():
        product *= max(size, 1)
    if sizes and found.world is not None and product > 1 and product != found.world:
        raise ConfigError(
            f"the sizes of parallelism_config in {where} multiply to {product}, but num_processes is {found.world}: "
            "make them agree."
        )


def named(reference: str, where: str, out: Mapping) -> tuple[Sharding, str] | None:
    """The preset of an Accelerate file that is not at hand, by its name."""
    base = os.path.basename(reference).removesuffix(".yaml").removesuffix(".yml")
    preset = ACCELERATE.get(base)
    if preset is None:
        out.ask(f"the Accelerate file {os.path.basename(reference)} is not among the files: give it too")
        return None
    out.assume(f"{os.path.basename(reference)} is not among the files; took the shipped Accelerate file of that name")
    found, precision = read(preset, os.path.basename(reference), Mapping())
    found.given = Given("--config_file", reference, base)
    return found, precision
