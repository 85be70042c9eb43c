"""Options of training on several GPUs."""

from typing import Literal

from memcalc.setup.options import Options, option
from memcalc.setup.shared_options import PositiveInt

Parallel = Literal["none", "ddp", "fsdp2", "fsdp1", "zero1", "zero2", "zero3", "megatron"]


class ParallelOptions(Options):
    """How a job of `--mode training` is laid out over GPUs."""

    gpus: PositiveInt | None = option(
        "Parallel", None, "GPUs of the whole job.", unset="as many as the sizes of the axes multiply to"
    )
    parallel: Parallel | None = option(
        "Parallel", None, "What data-parallel ranks share, and whose way it is.", unset="ddp, where there are several"
    )
    data_parallel_size: PositiveInt | None = option(
        "Parallel",
        None,
        "Ranks with batches of their own; with sharding, the shards of one replica; of an engine, its copies.",
        unset="what --gpus leaves",
    )
    data_parallel_replicas: PositiveInt = option("Parallel", 1, "Copies of the sharded model (HSDP).")
    tensor_parallel_size: PositiveInt = option(
        "Parallel", 1, "GPUs that share every layer; the report is for one of them."
    )
    sequence_parallel: bool = option(
        "Parallel", False, "Shard the residual stream over the tensor-parallel ranks along the sequence."
    )
    loss_parallel: bool = option("Parallel", False, "Keep logits sharded over the vocabulary through the loss.")
    context_parallel_size: PositiveInt = option("Parallel", 1, "GPUs that share every sequence.")
    context_parallel_rotate_method: Literal["allgather", "alltoall"] = option(
        "Parallel", "allgather", "How those GPUs exchange keys and values: all at once, or one after another."
    )
    sequence_parallel_size: PositiveInt = option(
        "Parallel", 1, "GPUs that share every sequence under ZeRO, and heads in attention (DeepSpeed-Ulysses)."
    )
    pipeline_parallel_size: PositiveInt = option("Pipeline", 1, "Stages that the blocks are divided into.")
    pipeline_schedule: Literal["gpipe", "1f1b", "interleaved"] = option(
        "Pipeline", "1f1b", "In which order stages run micro-batches."
    )
    virtual_pipeline_size: PositiveInt = option("Pipeline", 1, "Stages of each rank, with the interleaved schedule.")
    microbatches: PositiveInt = option("Pipeline", 8, "Micro-batches of a pipeline in one step.")
    pipeline_rank: int | None = option(
        "Pipeline", None, "Rank of the pipeline to report.", unset="the most loaded one", ge=0
    )
    pipeline_keep_outputs: bool = option(
        "Pipeline", True, "The last stage keeps the logits of every micro-batch (torch's return_outputs)."
    )
    expert_parallel_size: PositiveInt = option("Parallel", 1, "GPUs that the experts of a layer are spread over.")
    expert_imbalance: float = option(
        "Parallel",
        1.0,
        "Tokens that the most loaded expert rank receives, as a multiple of an even share (dropless).",
        ge=1,
    )
    fsdp_wrap: Literal["blocks", "root", "parts", "plan"] = option(
        "FSDP and DDP",
        "blocks",
        "What FSDP gathers together: each block and the rest; the whole model; embedding and head apart too; or as "
        "Transformers' and Accelerate's plan has it.",
    )
    fsdp_mixed_precision: Literal["policy", "autocast"] = option(
        "FSDP and DDP",
        "policy",
        "How FSDP does mixed precision: it gathers in 16 bits, or torch.autocast is around it.",
    )
    reshard_after_forward: bool | None = option(
        "FSDP and DDP", None, "Free gathered weights after forward.", unset="all but the root's, as torch has it"
    )
    reduce_dtype: Literal["fp32", "bf16"] | None = option(
        "FSDP and DDP", None, "Dtype of FSDP's reduction.", unset="fp32 with a policy, else that of the gradients"
    )
    sync_every_micro_step: bool = option(
        "FSDP and DDP", False, "Reduce gradients after every micro-batch, not only after the last (no no_sync)."
    )
    cpu_offload: str | None = option(
        "Parallel", None, "What lies in host memory between its uses: optimizer, parameters, or both.", unset="nothing"
    )
    ddp_bucket_mb: PositiveInt | None = option(
        "FSDP and DDP", None, "MiB of a bucket of DDP, the first one included.", unset="25, and 1 for the first"
    )
    gradient_as_bucket_view: bool = option("FSDP and DDP", False, "Gradients are views of DDP's buckets.")
    static_graph: bool = option("FSDP and DDP", False, "DDP's static_graph.")
    find_unused_parameters: bool = option("FSDP and DDP", False, "DDP's find_unused_parameters.")
    zero_auto: bool = option("DeepSpeed", False, "Fill DeepSpeed's sizes as HF Trainer fills 'auto'.")
    zero_reduce_bucket_size: PositiveInt | None = option(
        "DeepSpeed", None, "DeepSpeed's reduce_bucket_size, in elements.", unset="5e8"
    )
    zero_allgather_bucket_size: PositiveInt | None = option(
        "DeepSpeed", None, "DeepSpeed's allgather_bucket_size, in elements.", unset="5e8"
    )
    zero_overlap_comm: bool | None = option(
        "DeepSpeed", None, "DeepSpeed's overlap_comm.", unset="no for stages 1 and 2, yes for 3"
    )
    zero_reduce_scatter: bool = option("DeepSpeed", True, "DeepSpeed's reduce_scatter.")
    zero_contiguous_gradients: bool = option("DeepSpeed", True, "DeepSpeed's contiguous_gradients.")
    zero_round_robin_gradients: bool = option("DeepSpeed", False, "DeepSpeed's round_robin_gradients.")
    zero_sub_group_size: PositiveInt | None = option(
        "DeepSpeed", None, "DeepSpeed's sub_group_size, in elements.", unset="1e9"
    )
    zero_stage3_max_reuse_distance: int | None = option(
        "DeepSpeed", None, "DeepSpeed's stage3_max_reuse_distance, in elements.", unset="1e9", ge=0
    )
    zero_stage3_max_live_parameters: int | None = option(
        "DeepSpeed", None, "DeepSpeed's stage3_max_live_parameters, in elements.", unset="1e9", ge=0
    )
    zero_stage3_param_persistence_threshold: int | None = option(
        "DeepSpeed", None, "DeepSpeed's stage3_param_persistence_threshold, in elements.", unset="1e5", ge=0
    )
    zero_stage3_prefetch_bucket_size: int | None = option(
        "DeepSpeed", None, "DeepSpeed's stage3_prefetch_bucket_size, in elements.", unset="5e7", ge=0
    )
    zero_hpz_partition_size: PositiveInt | None = option(
        "DeepSpeed", None, "DeepSpeed's zero_hpz_partition_size (ZeRO++): GPUs that share a second copy.", unset="1"
    )
    recompute_method: Literal["uniform", "block"] | None = option(
        "Megatron",
        None,
        "With full checkpointing: all layers in groups that run again together, or the first layers of a stage alone.",
        unset="uniform",
    )
    recompute_num_layers: PositiveInt | None = option(
        "Megatron", None, "Layers of a group, or layers of a stage that are checkpointed.", unset="1"
    )
    recompute_modules: str | None = option(
        "Megatron", None, "With selective checkpointing: what runs again, of core_attn and mlp.", unset="core_attn"
    )
    ranks: Literal["most-loaded", "all"] = option(
        "Pipeline", "most-loaded", "Ranks of a pipeline that `ranks` lists: the first and the last, or all."
    )
    nccl_buffers: str | None = option(
        "GPU", None, "Size of NCCL's buffers outside the allocator, such as 1GiB.", unset="by communicators"
    )
