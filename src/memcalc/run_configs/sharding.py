"""How a run is spread over GPUs, whichever file says so, and what that does to precision."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from memcalc.run_configs import option_names as our
from memcalc.run_configs.mapping import Given, Mapping


@dataclass
class Sharding:
    """One engine and its ways. `kind` is "", ddp, fsdp or zero; sizes are GPUs; None is «not in the files»."""

    kind: str = ""
    version: int = 0
    stage: int = 0
    world: int | None = None
    world_from: str = ""
    offload: tuple[str, ...] = ()
    reshard: bool | None = None
    checkpointing: bool | None = None
    reentrant: bool | None = None
    precision: str = ""
    """bf16, fp16, fp32 or auto as the engine's own file says; empty: it says nothing."""
    batch: int | None = None
    grad_accum: int | None = None
    total_batch: int | None = None
    optimizer: str = ""
    sizes: dict[str, int] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)
    where: str = ""
    given: Given | None = None
    wrong: str = ""

    @property
    def name(self) -> str:
        """The value of our --parallel."""
        return {"fsdp": f"fsdp{self.version}", "zero": f"zero{self.stage}", "ddp": "ddp", "megatron": "megatron"}.get(
            self.kind, ""
        )

    @property
    def shards(self) -> bool:
        """Whether weights, gradients or states are divided."""
        return self.kind == "fsdp" or (self.kind == "zero" and self.stage > 0)


def apply(out: Mapping, sharding: Sharding) -> None:
    """Set the parallel options."""
    name = sharding.name
    if name == "zero0":
        name = "ddp"
        out.assume("ZeRO stage 0 shards nothing: taken as data-parallel copies (ddp)")
    world = sharding.world
    if world is not None:
        out.take(our.GPUS, world, Given("world size", world, world, False, f"from {sharding.world_from}"))
    if world == 1 and sharding.kind == "ddp":
        name = ""
    if name:
        given = sharding.given or Given(name, name, name)
        out.take(our.PARALLEL, name, given, _words(sharding))
        if world is None:
            out.ask("the number of GPUs is in none of the files: give --gpus N, or the launch line or Accelerate file")
    elif world is None:
        out.assume("the number of GPUs is not in the file: taken as one (--gpus N says otherwise)")
    if name == "ddp" and out.setup.get(our.TRAINER) in ("hf", "trl"):
        _accelerated(out)
    if name == "fsdp2" and out.setup.get(our.TRAINER) in ("hf", "trl") and sharding.reshard is not False:
        out.take(our.FSDP_WRAP, "plan", Given("FSDP's units", None, "plan", True), "as Accelerate's plan has them")
    for option, value in sharding.sizes.items():
        if value > 1:
            out.take(option, value, Given(option, value, value))
    if name.startswith("fsdp") and sharding.reshard is not None:
        out.take(our.RESHARD, sharding.reshard, Given(our.RESHARD, sharding.reshard, sharding.reshard))
    if sharding.offload and name:
        out.take(our.CPU_OFFLOAD, ",".join(sharding.offload), Given("cpu offload", ",".join(sharding.offload), ""))
    for option, value in sharding.options.items():
        out.take(option, value, Given(option.removeprefix(our.ZERO_PREFIX), value, value))


def _accelerated(out: Mapping) -> None:
    """DDP as Accelerate and Trainer set it up."""
    if our.DDP_BUCKET not in out.setup:
        given = Given("DDP's buckets", 25, 25, True)
        out.take(our.DDP_BUCKET, 25, given, "Accelerate's, the first one too")
    if out.setup.get(our.CHECKPOINTING, "none") == "none":
        given = Given("ddp_find_unused_parameters", None, True, True)
        out.take(our.FIND_UNUSED, True, given, "Trainer's default without checkpointing")


def _words(sharding: Sharding) -> str:
    if sharding.kind == "zero":
        return f"DeepSpeed ZeRO stage {sharding.stage}"
    if sharding.kind == "fsdp":
        return f"FSDP version {sharding.version}"
    return "DistributedDataParallel"
