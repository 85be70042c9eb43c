"""How a job is laid out over GPUs: the axes, and the ways of the library that divides."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Parallel = Literal["none", "ddp", "fsdp2", "fsdp1", "zero1", "zero2", "zero3", "megatron"]
Wrap = Literal["blocks", "root", "parts", "plan"]
Schedule = Literal["gpipe", "1f1b", "interleaved"]
Offloaded = Literal["optimizer", "parameters"]


@dataclass(frozen=True)
class ZeroOptions:
    """The keys of DeepSpeed's `zero_optimization`, by their own names (deepspeed/runtime/zero/config.py)."""

    reduce_bucket_size: int = 500_000_000
    allgather_bucket_size: int = 500_000_000
    overlap_comm: bool | None = None
    reduce_scatter: bool = True
    contiguous_gradients: bool = True
    round_robin_gradients: bool = False
    sub_group_size: int = 1_000_000_000
    stage3_max_reuse_distance: int = 1_000_000_000
    stage3_max_live_parameters: int = 1_000_000_000
    stage3_param_persistence_threshold: int = 100_000
    stage3_prefetch_bucket_size: int = 50_000_000
    hpz_partition_size: int = 1


@dataclass(frozen=True)
class DeviceMap:
    """A word of Transformers' `device_map`, and what weights may take of each device in bytes, GPUs first.

    asked: the user said how much that is (`max_memory`).
    """

    word: str
    room: tuple[tuple[int | str, float], ...]
    asked: bool

    @property
    def gpus(self) -> int:
        """How many GPUs there are."""
        return sum(isinstance(device, int) for device, _ in self.room)


@dataclass(frozen=True)
class ParallelSetup:
    """A layout over GPUs. Sizes of axes are numbers of ranks; a size of 1 on every axis is a single GPU."""

    engine: Parallel = "none"
    data: int = 1
    """Ranks that hold different batches; with sharding, the shards of one replica."""
    replicas: int = 1
    """Copies of the sharded model (HSDP)."""
    tensor: int = 1
    sequence: bool = False
    """Whether the residual stream is sharded over the tensor-parallel ranks along the sequence."""
    loss_parallel: bool = False
    context: int = 1
    """Ranks that share every sequence."""
    context_rank: int = 0
    """The one of them that is traced."""
    gathers_keys: bool = True
    """Whether they gather all keys and values at once, instead of passing them on."""
    ulysses: bool = False
    """Whether they exchange heads in attention instead (DeepSpeed-Ulysses)."""
    pipeline: int = 1
    expert: int = 1
    expert_imbalance: float = 1.0
    """Rows that the most loaded expert rank receives, as a multiple of an even share."""
    # FSDP
    wrap: Wrap = "blocks"
    reshard: bool | None = None
    """None: torch's default, every group but the root."""
    peft: bool = False
    """Whether Accelerate wraps a model with adapters: under FSDP1 every trained leaf is a unit of its own (peft's
    `fsdp_auto_wrap_policy`), under FSDP2 the final norm is not found, and stays with the root."""
    backward_prefetch: bool = True
    """Whether FSDP1 gathers the next unit in backward ahead of its use."""
    autocast: bool = False
    """Whether mixed precision is torch's autocast around the model, not FSDP's own policy."""
    reduce_dtype: str | None = None
    sync_every_micro_step: bool = False
    offload: tuple[Offloaded, ...] = ()
    # DDP
    bucket_mb: int | None = None
    gradient_as_bucket_view: bool = False
    static_graph: bool = False
    find_unused_parameters: bool = False
    # DeepSpeed
    zero: ZeroOptions = ZeroOptions()
    zero_of_frozen: ZeroOptions = ZeroOptions()
    """Those of a model beside the trained one, for which "auto" is DeepSpeed's default."""
    # pipeline
    schedule: Schedule = "1f1b"
    virtual: int = 1
    microbatches: int = 8
    rank: int | None = None
    """The pipeline rank that is asked for; None is the most loaded one."""
    stage: int | None = None
    """The stage that is traced, among those of the pipeline rank."""
    keep_outputs: bool = True
    """Whether the last stage keeps the logits of every micro-batch (`return_outputs`)."""
    # one process
    device_map: DeviceMap | None = None
    """The GPUs of one process that the modules of a model are spread over."""
    # Megatron-Core
    recompute_block: bool = False
    """Whether the first layers of a stage alone are checkpointed, not all of them in groups."""
    recompute_layers: int = 1
    recompute_modules: tuple[str, ...] = ("core_attn",)
    """What selective checkpointing runs again."""
    # around the loop
    accelerate: bool = False
    """Whether Accelerate prepares the model: autocast inside it, outputs converted to fp32."""
    clip: bool = False
    """Whether gradients are clipped by their norm."""

    @property
    def alone(self) -> bool:
        """Whether nothing is divided, copied or sent, and the loop is a plain one."""
        one = self.data * self.replicas * self.tensor * self.context * self.pipeline == 1
        return one and not (self.engine != "none" or self.expert > 1 or self.accelerate)

    @property
    def gpus(self) -> int:
        """GPUs of the whole job."""
        cards = 1 if self.device_map is None else self.device_map.gpus
        return self.data * self.replicas * self.tensor * self.context * self.pipeline * cards

    @property
    def shards(self) -> int:
        """Ranks that share one replica of weights, gradients and states: those of the data and of the sequence."""
        return self.data * self.context

    @property
    def batches(self) -> int:
        """Micro-batches that run at the same time, each on ranks of its own."""
        return self.data * self.replicas


GPUS_OF_A_NODE = 8

SINGLE = ParallelSetup()
