"""What the report says of the GPU that was asked about, and of jobs on several."""

from typing import Any

from pydantic import Field

from memcalc.report.contract import Bytes, Contract


class GpuFit(Contract):
    """Whether the job fits the GPU that was asked about."""

    name: str = Field(description="Name of the GPU.")
    total_bytes: Bytes = Field(description="Its memory in bytes, as the driver reports it.")
    usable_bytes: Bytes = Field(
        description="What the job may take of it: what CUDA reports, or the share of that which a serving engine is "
        "told to fill (--gpu-memory-utilization)."
    )
    fits: bool = Field(description="Whether peak.process_bytes is at most usable_bytes.")
    free_bytes: int = Field(description="usable_bytes less peak.process_bytes; negative where it does not fit.")
    needed_bytes: Bytes | None = Field(
        default=None,
        description="The smallest memory of such a GPU on which the job runs, CUDA context included: where it is full, "
        "cached segments go back and the allocator tries again. Exact to 0.1 %; null where the allocator is not "
        "simulated; in the library `with_needed_bytes()` finds it.",
    )

    @classmethod
    def of(cls, name: str, total_bytes: int, usable_bytes: int, process_bytes: int) -> "GpuFit":
        """How a process of `process_bytes` bytes fits."""
        free = usable_bytes - process_bytes
        return cls(name=name, total_bytes=total_bytes, usable_bytes=usable_bytes, fits=free >= 0, free_bytes=free)


class EnginePool(Contract):
    """The pool of pages that vLLM makes when it starts, and what the rest of its share of the GPU goes to."""

    budget_bytes: Bytes = Field(description="The share of the GPU: total times gpu_memory_utilization.")
    weights_bytes: Bytes = Field(description="Weights, with the table of its rotary embedding.")
    activations_bytes: Bytes = Field(description="Peak of the profile run.")
    non_torch_bytes: Bytes = Field(description="Memory outside torch that appears while it starts.")
    cuda_graphs_bytes: Bytes = Field(description="CUDA graphs.")
    graphs_in_budget: bool = Field(
        description="Whether CUDA graphs are taken off the budget; if not, they come on top of it."
    )
    pool_bytes: int = Field(description="What is left for pages: 'Available KV cache memory'; negative if nothing is.")
    pool_tokens: int = Field(ge=0, description="Tokens that the pool holds: 'GPU KV cache size'.")
    profiled_tokens: int = Field(ge=1, description="Tokens of the profile run: max_num_batched_tokens.")
    profiled_sequences: int = Field(ge=1, description="Sequences that it samples for: max_num_seqs.")
    smallest_utilization: float | None = Field(
        description="The smallest gpu_memory_utilization that holds the job, in hundredths; null if none does."
    )


class Serving(Contract):
    """How much of this job the GPU can serve. 0 where not even one sequence or token fits."""

    largest_batch: int = Field(ge=0, description="The most sequences of setup.seq_len tokens at once.")
    longest_context: int = Field(
        ge=0, description="The most tokens of a single sequence; 0 for a model that takes images only."
    )
    engine_reserved_bytes: Bytes = Field(
        description="What the engine will take of the GPU: its pool fills what it may, whatever is needed."
    )
    pool: EnginePool | None = Field(
        description="The pool that vLLM makes; null for another engine, and for a model without a cache."
    )


class RemedyOffer(Contract):
    """A change that makes the job smaller by itself."""

    name: str = Field(description="What it is.")
    cost: str = Field(description="What one pays for it.")
    options: dict[str, Any] = Field(description="The options of `setup` that change, with their values.")
    change: str = Field(description="The same as options of the command line, or as keys of the run file.")
    saved_bytes: Bytes = Field(description="What the process then needs less: the difference of two estimates.")
    fits: bool = Field(description="Whether the job fits with it.")


class Remedies(Contract):
    """What makes a job smaller that does not fit."""

    alone: tuple[RemedyOffer, ...] = Field(description="What helps by itself, those that cost least first.")
    together: dict[str, Any] | None = Field(
        description="Options of the first combination that fits; null where none does."
    )
    change: str | None = Field(description="The same in the words of `alone`.")
    process_bytes: Bytes | None = Field(description="What the process then needs.")
    fewest_gpus: int | None = Field(
        description="GPUs that have to share the job as it is, by FSDP2 unless it is sharded already; null where no "
        "number is enough."
    )


class RankPeak(Contract):
    """What one kind of rank holds."""

    pipeline_rank: int | None = Field(description="Its rank in the pipeline; null where there is none.")
    gpu: int | None = Field(
        default=None, description="Its index in a process that spreads a model over several GPUs; else null."
    )
    count: int = Field(ge=1, description="How many GPUs hold about as much.")
    model_weights_bytes: Bytes = Field(description="Weights and buffers.")
    optimizer_states_bytes: Bytes = Field(description="Optimizer states and master weights.")
    gradients_bytes: Bytes = Field(description="Gradients that stand in the optimizer step.")
    phase: str = Field(description="The phase of its peak.")
    peak_bytes: Bytes = Field(description="Tensor bytes at its peak, as in `phases`.")


class Cluster(Contract):
    """A job on several GPUs: how it is laid out, what a step takes in, what a rank sends and keeps on its host."""

    gpus: int = Field(ge=1, description="GPUs of the whole job.")
    axes: dict[str, int] = Field(description="Sizes of the axes that are used, by name.")
    parallel: str = Field(
        description="The engine of the data-parallel ranks; 'device_map auto' and others where one process has all "
        "GPUs; the engine that serves."
    )
    pipeline_rank: int | None = Field(description="The pipeline rank that is reported; null without a pipeline.")
    gpu: int | None = Field(
        default=None, description="Index of the GPU that is reported, where one process has all of them; else null."
    )
    sequences_per_step: int = Field(
        ge=1, description="Sequences of one optimizer step, of all ranks (global batch); of inference, those served."
    )
    tokens_per_step: int | None = Field(
        description="Tokens of one optimizer step, or of the prompts; null where no text is read."
    )
    sent_bytes: dict[str, int] = Field(
        description="Bytes that the rank sends in one step with ring algorithms, by collective; of inference, in "
        "prefill and the decoding of one token."
    )
    host_bytes: Bytes = Field(description="Bytes that the rank keeps in host memory.")
    node_host_bytes: Bytes = Field(description="The same for all ranks of a node of eight GPUs.")
