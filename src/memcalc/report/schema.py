"""The answer: what every renderer may read, and the JSON contract of the command line.

Frozen standard dataclasses: pydantic reads their `metadata` and writes the JSON Schema (`json_schema`), but building a
report does not cost the import of pydantic, which alone would take longer than the estimate.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from memcalc.tables.overheads import ALLOCATOR_RESERVE_PART, OUTSIDE_THE_ALLOCATOR


def _says(description: str, **constraints: int) -> dict[str, Any]:
    """A field's meaning, and the bounds of its value, for the JSON Schema."""
    return {"description": description, **constraints}


@dataclass(frozen=True, kw_only=True)
class Part:
    """One named share of a row, alive at the peak."""

    name: str = field(metadata=_says("What it is, for people."))
    bytes: int = field(metadata=_says("Bytes alive at the peak.", ge=0))


@dataclass(frozen=True, kw_only=True)
class Component:
    """One row of the box."""

    peak_bytes: int = field(
        metadata=_says("Bytes of this row alive at the peak of the whole process; the sum of its parts.", ge=0)
    )
    max_bytes: int = field(metadata=_says("The most bytes that this row holds at any moment.", ge=0))
    bytes_per_parameter: float | None = field(
        metadata=_says(
            "max_bytes over all parameters of the model; null where the row does not grow with the parameters."
        )
    )
    parts: tuple[Part, ...] = field(metadata=_says("What the row is made of at the peak."))

    def __post_init__(self) -> None:
        if sum(part.bytes for part in self.parts) != self.peak_bytes:
            raise ValueError(f"the parts do not sum to peak_bytes {self.peak_bytes}: {self.parts}")
        if self.max_bytes < self.peak_bytes:
            raise ValueError(f"max_bytes {self.max_bytes} is below peak_bytes {self.peak_bytes}")


@dataclass(frozen=True, kw_only=True)
class Components:
    """The six rows of the box, in its order. Their peak_bytes sum to peak.process_bytes."""

    model_weights: Component = field(metadata=_says("Parameters and buffers, and every further copy of them."))
    optimizer_states: Component = field(metadata=_says("What the optimizer keeps between steps."))
    gradients: Component = field(metadata=_says("Parameter gradients."))
    activations: Component = field(
        metadata=_says("Tensors of the forward pass that are kept for backward, or recomputed for it.")
    )
    temporary_tensors: Component = field(
        metadata=_says("Short-lived: logits copies, activation gradients, optimizer step.")
    )
    other_overhead: Component = field(
        metadata=_says("CUDA context, library workspaces, inputs, allocator reserve, caches.")
    )

    def rows(self) -> Iterator[tuple[str, Component]]:
        """Name and component of each row, in the order of the box."""
        for name in self.__dataclass_fields__:
            yield name, getattr(self, name)


@dataclass(frozen=True, kw_only=True)
class Parameters:
    """How many parameters the model has. A tied weight counts once."""

    total: int = field(metadata=_says("All parameters.", ge=0))
    trainable: int = field(metadata=_says("Parameters that the optimizer updates; 0 in inference.", ge=0))
    embedding: int = field(metadata=_says("Parameters of the input embedding and of an output head of its own.", ge=0))
    active: int = field(
        metadata=_says("Parameters that one token meets: all of them, but for mixtures of experts.", ge=0)
    )


@dataclass(frozen=True, kw_only=True)
class Model:
    """The model that was estimated."""

    name: str = field(metadata=_says("Name of the file, repository or canonical shape."))
    family: str = field(metadata=_says("Family that described it: the model_type of its config.json."))
    parameters: Parameters = field(metadata=_says("Parameter counts."))


@dataclass(frozen=True, kw_only=True)
class Phase:
    """One phase of the job."""

    peak_bytes: int = field(
        metadata=_says(
            "Most live tensor bytes in this phase, each storage rounded up to 512 bytes; library workspaces, allocator "
            "reserve and CUDA context are not in it.",
            ge=0,
        )
    )


@dataclass(frozen=True, kw_only=True)
class TrainingPhases:
    """The phases of one optimizer step, the second: optimizer states exist."""

    forward: Phase = field(
        metadata=_says("Forward pass and loss (of the last micro-batch, with gradient accumulation).")
    )
    backward: Phase = field(metadata=_says("Backward pass."))
    step: Phase = field(metadata=_says("Optimizer step."))


@dataclass(frozen=True, kw_only=True)
class InferencePhases:
    """The phases of generation."""

    prefill: Phase = field(metadata=_says("Forward pass over the prompt."))
    decode: Phase = field(metadata=_says("Forward pass of one further token."))


@dataclass(frozen=True, kw_only=True)
class PipelinePhases:
    """The phases of a diffusion pipeline. Where memcalc does not know its denoiser, only weights are counted."""

    encode: Phase = field(metadata=_says("Text and image encoders work on the prompt."))
    denoise: Phase = field(metadata=_says("The transformer or UNet denoises."))
    decode: Phase = field(metadata=_says("The autoencoder makes the picture."))


@dataclass(frozen=True, kw_only=True)
class Peak:
    """When most memory is in use, and how much, by the three counters that people read."""

    phase: str = field(metadata=_says("Phase of the peak: a key of `phases`."))
    moment: str = field(metadata=_says("The moment in words, such as 'backward of block 31 of 32'."))
    allocated_bytes: int = field(
        metadata=_says("torch.cuda.max_memory_allocated(): tensors and library workspaces.", ge=0)
    )
    reserved_bytes: int = field(
        metadata=_says("torch.cuda.max_memory_reserved(): allocated and the allocator reserve.", ge=0)
    )
    process_bytes: int = field(
        metadata=_says("What nvidia-smi shows for the process: reserved and the CUDA context.", ge=0)
    )


@dataclass(frozen=True, kw_only=True)
class GpuFit:
    """Whether the job fits the GPU that was asked about."""

    name: str = field(metadata=_says("Name of the GPU."))
    total_bytes: int = field(metadata=_says("Its memory in bytes, as the driver reports it.", ge=0))
    usable_bytes: int = field(metadata=_says("What CUDA reports of it, which is all that a process can have.", ge=0))
    fits: bool = field(
        metadata=_says("Whether peak.process_bytes is at most usable_bytes, or the engine's share of it.")
    )
    free_bytes: int = field(metadata=_says("That less peak.process_bytes; negative where it does not fit."))


@dataclass(frozen=True, kw_only=True)
class Serving:
    """How much of this job the GPU can serve. 0 where not even one sequence or token fits."""

    largest_batch: int = field(metadata=_says("The most sequences of setup.seq_len tokens at once.", ge=0))
    longest_context: int = field(
        metadata=_says("The most tokens of a single sequence; 0 for a model of images alone.", ge=0)
    )
    occupied_bytes: int = field(
        metadata=_says("What the engine will take of the GPU: its pool fills what it may, whatever is needed.", ge=0)
    )


@dataclass(frozen=True, kw_only=True)
class RankPeak:
    """What one kind of rank holds."""

    pipeline_rank: int | None = field(metadata=_says("Its rank in the pipeline; null where there is none."))
    count: int = field(metadata=_says("How many GPUs hold about as much.", ge=1))
    model_weights_bytes: int = field(metadata=_says("Weights and buffers.", ge=0))
    optimizer_states_bytes: int = field(metadata=_says("Optimizer states and master weights.", ge=0))
    gradients_bytes: int = field(metadata=_says("Gradients that stand in the optimizer step.", ge=0))
    phase: str = field(metadata=_says("The phase of its peak."))
    peak_bytes: int = field(metadata=_says("Tensor bytes at its peak, as in `phases`.", ge=0))


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """A job on several GPUs: how it is laid out, what a step takes in, what a rank sends and keeps on its host."""

    gpus: int = field(metadata=_says("GPUs of the whole job.", ge=1))
    axes: dict[str, int] = field(metadata=_says("Sizes of the axes that are used, by name."))
    parallel: str = field(metadata=_says("The engine of the data-parallel ranks."))
    pipeline_rank: int | None = field(metadata=_says("The pipeline rank that is reported; null without a pipeline."))
    sequences_per_step: int = field(
        metadata=_says("Sequences of one optimizer step, of all ranks (global batch).", ge=1)
    )
    tokens_per_step: int | None = field(metadata=_says("Tokens of one optimizer step; null where no text is read."))
    sent_bytes: dict[str, int] = field(
        metadata=_says("Bytes that the rank sends in one step with ring algorithms, by collective.")
    )
    host_bytes: int = field(metadata=_says("Bytes that the rank keeps in host memory.", ge=0))
    node_host_bytes: int = field(metadata=_says("The same for all ranks of a node of eight GPUs.", ge=0))


@dataclass(frozen=True, kw_only=True)
class Report:
    """The memory of one job on its most loaded GPU. All sizes are integer bytes."""

    schema_version: Literal[1] = field(default=1, metadata=_says("Version of this contract."))
    model: Model = field(metadata=_says("The model."))
    setup: dict[str, Any] = field(metadata=_says("Every option with the value that was used."))
    assumptions: tuple[str, ...] = field(
        metadata=_says("What the user did not say and memcalc took for granted, a line each.")
    )
    components: Components = field(metadata=_says("The six rows of the box."))
    saved_for_backward_bytes: int | None = field(
        metadata=_says(
            "Bytes of the distinct storages that autograd keeps at the end of forward: parameters excluded, autocast "
            "weight copies included, not rounded; null in inference."
        )
    )
    phases: TrainingPhases | InferencePhases | PipelinePhases = field(metadata=_says("Peak of each phase."))
    peak: Peak = field(metadata=_says("The peak of the whole job."))
    kv_cache_bytes: int | None = field(
        metadata=_says("Bytes of the key-value cache after prefill; null in training and for pipelines.")
    )
    gpu: GpuFit | None = field(metadata=_says("The GPU that was asked about; null where none was."))
    serving: Serving | None = field(
        default=None, metadata=_says("What the GPU can serve; absent in training and where no GPU was asked about.")
    )
    cluster: Cluster | None = field(default=None, metadata=_says("The job on several GPUs; absent on a single one."))
    ranks: tuple[RankPeak, ...] = field(
        default=(), metadata=_says("What each kind of rank holds; absent on a single GPU.")
    )

    def __post_init__(self) -> None:
        overhead = {part.name: part.bytes for part in self.components.other_overhead.parts}
        total = sum(component.peak_bytes for _, component in self.components.rows())
        if total != self.peak.process_bytes:
            raise ValueError(f"the rows sum to {total}, not to process_bytes {self.peak.process_bytes}")
        if self.peak.reserved_bytes != total - sum(overhead.get(part, 0) for part in OUTSIDE_THE_ALLOCATOR):
            raise ValueError("process_bytes less the CUDA context and NCCL's buffers is not reserved_bytes")
        if self.peak.allocated_bytes != self.peak.reserved_bytes - overhead.get(ALLOCATOR_RESERVE_PART, 0):
            raise ValueError("reserved_bytes less the allocator reserve is not allocated_bytes")

    @property
    def training(self) -> bool:
        """Whether this is a training job (else inference)."""
        return isinstance(self.phases, TrainingPhases)

    def to_dict(self) -> dict[str, Any]:
        """The contract as plain objects: what `--json` prints."""
        contract = asdict(self)
        if self.serving is None:
            del contract["serving"]
        if self.cluster is None:
            del contract["cluster"], contract["ranks"]
        return contract


def json_schema() -> dict[str, Any]:
    """JSON Schema of `Report.to_dict()`, written by pydantic."""
    from pydantic import TypeAdapter

    schema = TypeAdapter(Report).json_schema(mode="serialization")
    schema["required"] = [name for name in schema["properties"] if name != "serving"]
    for definition in (schema, *schema["$defs"].values()):
        definition["additionalProperties"] = False
    return schema
