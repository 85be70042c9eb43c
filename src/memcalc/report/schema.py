"""The answer: what every renderer may read, and the JSON contract of the command line."""

import json
from collections.abc import Iterator
from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from memcalc.common.assumption import Assumption
from memcalc.common.version import TORCH, TRANSFORMERS, VERSION
from memcalc.report.contract import Bytes, Contract
from memcalc.report.gpu_schema import Cluster, GpuFit, RankPeak, Remedies, Serving
from memcalc.report.setup_schema import setup_schema
from memcalc.tables.overheads import ALLOCATOR_RESERVE_PART, OUTSIDE_THE_ALLOCATOR


class Part(Contract):
    """One named share of a row, alive at the peak."""

    name: str = Field(description="What it is, for people.")
    bytes: Bytes = Field(description="Bytes alive at the peak.")


class Component(Contract):
    """One row of the box."""

    peak_bytes: Bytes = Field(
        description="Bytes of this row alive at the peak of the whole process; the sum of its parts."
    )
    max_bytes: Bytes = Field(description="The most bytes that this row holds at any moment.")
    bytes_per_parameter: float | None = Field(
        description="max_bytes over all parameters of the model; null where the row does not grow with the parameters."
    )
    parts: tuple[Part, ...] = Field(description="What the row is made of at the peak.")

    @model_validator(mode="after")
    def _adds_up(self) -> Self:
        if sum(part.bytes for part in self.parts) != self.peak_bytes:
            raise ValueError(f"the parts do not sum to peak_bytes {self.peak_bytes}: {self.parts}")
        if self.max_bytes < self.peak_bytes:
            raise ValueError(f"max_bytes {self.max_bytes} is below peak_bytes {self.peak_bytes}")
        return self


class Components(Contract):
    """The six rows of the box, in its order. Their peak_bytes sum to peak.process_bytes."""

    model_weights: Component = Field(description="Parameters and buffers, and every further copy of them.")
    optimizer_states: Component = Field(description="What the optimizer keeps between steps.")
    gradients: Component = Field(description="Parameter gradients.")
    activations: Component = Field(
        description="Tensors of the forward pass that are kept for backward, or recomputed for it."
    )
    temporary_tensors: Component = Field(
        description="Short-lived: logits copies, activation gradients, optimizer step."
    )
    other_overhead: Component = Field(
        description="CUDA context, library workspaces, inputs, allocator reserve, caches."
    )

    def rows(self) -> Iterator[tuple[str, Component]]:
        """Name and component of each row, in the order of the box."""
        for name in type(self).model_fields:
            yield name, getattr(self, name)


class Parameters(Contract):
    """How many parameters the model has. A tied weight counts once."""

    total: int = Field(ge=0, description="All parameters.")
    trainable: int = Field(ge=0, description="Parameters that the optimizer updates; 0 in inference.")
    embedding: int = Field(ge=0, description="Parameters of the input embedding and of an output head of its own.")
    active: int = Field(ge=0, description="Parameters that one token meets: all of them, but for mixtures of experts.")


class Model(Contract):
    """The model that was estimated."""

    name: str = Field(description="Name of the file, repository or canonical shape.")
    family: str = Field(description="Family that described it: the model_type of its config.json.")
    parameters: Parameters = Field(description="Parameter counts.")


class Phase(Contract):
    """One phase of the job."""

    peak_bytes: Bytes = Field(
        description="Most live tensor bytes in this phase, each storage rounded up to 512 bytes; library workspaces, "
        "allocator reserve and CUDA context are not in it."
    )


class Phases(Contract):
    """The phases of a job, in their order."""

    def items(self) -> Iterator[tuple[str, Phase]]:
        """Name and phase."""
        for name in type(self).model_fields:
            if getattr(self, name) is not None:
                yield name, getattr(self, name)


class TrainingPhases(Phases):
    """The phases of one optimizer step, the second: optimizer states exist."""

    forward: Phase = Field(description="Forward pass and loss (of the last micro-batch, with gradient accumulation).")
    backward: Phase = Field(description="Backward pass.")
    step: Phase = Field(description="Optimizer step.")


class EncodingTrainingPhases(TrainingPhases):
    """The same of a denoiser whose latents or text embeddings are made in every step."""

    encode: Phase = Field(description="Autoencoder and text encoders make the denoiser's inputs.")

    def items(self) -> Iterator[tuple[str, Phase]]:
        """Name and phase, encode first."""
        yield "encode", self.encode
        yield from ((name, phase) for name, phase in super().items() if name != "encode")


class InferencePhases(Phases):
    """The phases of generation."""

    load: Phase | None = Field(
        None, description="Weights are loaded on the GPU; null unless this takes more than anything later."
    )
    prefill: Phase = Field(description="Forward pass over the prompt.")
    decode: Phase = Field(description="Forward pass of one further token.")


class PipelinePhases(Phases):
    """The phases of a diffusion pipeline. Where memcalc does not know its denoiser, only weights are counted."""

    encode: Phase = Field(description="Text and image encoders work on the prompt.")
    denoise: Phase = Field(description="The transformer or UNet denoises.")
    vae_decode: Phase = Field(description="The autoencoder makes the picture.")


class Peak(Contract):
    """When most memory is in use, and how much, by the three counters that people read."""

    phase: str = Field(description="Phase of the peak: a key of `phases`.")
    moment: str = Field(description="The moment in words, such as 'backward of block 31 of 32'.")
    allocated_bytes: Bytes = Field(description="torch.cuda.max_memory_allocated(): tensors and library workspaces.")
    reserved_bytes: Bytes = Field(description="torch.cuda.max_memory_reserved(): allocated and the allocator reserve.")
    process_bytes: Bytes = Field(description="What nvidia-smi shows for the process: reserved and the CUDA context.")


class MixedLengths(Contract):
    """What the allocator reserves in a run whose batches have many lengths (`--lengths`)."""

    distribution: str = Field(description="How the lengths of sequences are drawn.")
    seed: int = Field(ge=0, description="Seed of the draw.")
    shortest: int = Field(ge=1, description="Tokens of a sequence in the shortest micro-batch.")
    longest: int = Field(ge=1, description="Tokens of a sequence in the longest micro-batch, which the rows are of.")
    reserved_bytes: tuple[Bytes, ...] = Field(description="The most that is reserved in each step.")


class Versions(Contract):
    """The libraries that the numbers were measured with."""

    torch: str = Field(default=TORCH, description="Version of PyTorch.")
    transformers: str = Field(default=TRANSFORMERS, description="Version of Transformers.")


class Report(Contract):
    """The memory of one job on its most loaded GPU. All sizes are integer bytes."""

    schema_version: Literal[2] = Field(default=2, description="Version of this contract.")
    memcalc_version: str = Field(default=VERSION, description="Version of memcalc that made this report.")
    numbers_stand_for: Versions = Field(
        default_factory=Versions, description="The libraries whose memory the numbers are."
    )
    model: Model = Field(description="The model.")
    setup: Annotated[dict[str, Any], Field(json_schema_extra=setup_schema)] = Field(
        description="Every option with the value that was used."
    )
    assumptions: tuple[Assumption, ...] = Field(description="What the user did not say and memcalc took for granted.")
    components: Components = Field(description="The six rows of the box.")
    saved_for_backward_bytes: Bytes | None = Field(
        description="Bytes of the distinct storages that autograd keeps at the end of forward: parameters excluded, "
        "autocast weight copies included, not rounded; null in inference."
    )
    phases: EncodingTrainingPhases | TrainingPhases | InferencePhases | PipelinePhases = Field(
        description="Peak of each phase."
    )
    peak: Peak = Field(description="The peak of the whole job.")
    kv_cache_bytes: Bytes | None = Field(
        description="Bytes of the key-value cache after prefill; null in training and for pipelines."
    )
    gpu: GpuFit | None = Field(description="The GPU that was asked about; null where none was.")
    serving: Serving | None = Field(
        default=None, description="What the GPU can serve; null in training and where no GPU was asked about."
    )
    remedies: Remedies | None = Field(
        default=None,
        description="What makes a training job smaller that does not fit; null where it fits, and with --lengths.",
    )
    mixed_lengths: MixedLengths | None = Field(
        default=None, description="The run of many lengths that was simulated; null without --lengths."
    )
    cluster: Cluster | None = Field(default=None, description="The job on several GPUs; null on a single one.")
    ranks: tuple[RankPeak, ...] = Field(default=(), description="What each kind of rank holds; empty on a single GPU.")

    @model_validator(mode="after")
    def _adds_up(self) -> Self:
        overhead = {part.name: part.bytes for part in self.components.other_overhead.parts}
        total = sum(component.peak_bytes for _, component in self.components.rows())
        if total != self.peak.process_bytes:
            raise ValueError(f"the rows sum to {total}, not to process_bytes {self.peak.process_bytes}")
        if self.peak.reserved_bytes != total - sum(overhead.get(part, 0) for part in OUTSIDE_THE_ALLOCATOR):
            raise ValueError("process_bytes less the CUDA context and NCCL's buffers is not reserved_bytes")
        if self.peak.allocated_bytes != self.peak.reserved_bytes - overhead.get(ALLOCATOR_RESERVE_PART, 0):
            raise ValueError("reserved_bytes less the allocator reserve is not allocated_bytes")
        return self

    @property
    def training(self) -> bool:
        """Whether this is a training job (else inference)."""
        return isinstance(self.phases, TrainingPhases)

    def to_json(self) -> str:
        """One JSON object: what `--json` prints. ASCII, so that it survives every stream and acts on no terminal."""
        return json.dumps(self.model_dump(), indent=2)  # pydantic's own writer refuses lone surrogates of file names
