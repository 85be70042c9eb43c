"""What the person wants to run: every option once, with its meaning. The command line is generated from these fields."""

from typing import Annotated, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from memcalc.errors import UsageError

Precision = Literal["fp32", "bf16", "fp16", "mixed-bf16", "mixed-fp16"]
Attention = Literal["eager", "sdpa", "flash"]
OptimizerImpl = Literal["foreach", "for-loop", "fused"]

DEFAULT_SEQ_LEN = 256
"""Tokens per sequence when the user names none (the example of the documentation page)."""

PositiveInt = Annotated[int, Field(ge=1, le=2**40)]


class _Setup(BaseModel):
    """Options that training and inference share."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    batch: PositiveInt = Field(1, description="Micro-batch size: sequences per GPU and forward pass.")
    seq_len: PositiveInt | None = Field(
        None, description=f"Sequence length in tokens (source length of an encoder-decoder). [default: {DEFAULT_SEQ_LEN}]"
    )
    attention: Attention = Field("sdpa", description="Attention implementation.")
    padding_mask: bool = Field(False, description="Sequences are padded, so a real mask reaches attention.")
    cuda_context: str | None = Field(
        None, description="Size of the CUDA context outside the allocator, such as 500MiB. [default: by GPU]"
    )
    cublas_workspace: str | None = Field(
        None, description="Size of one cuBLAS workspace, such as 8MiB. [default: by GPU generation]"
    )
    allocator_reserve: float | None = Field(
        None, ge=0, le=4, description="Reserved but unallocated memory, as a fraction of what is allocated. [default: 0.02]"
    )


class TrainingSetup(_Setup):
    """One optimizer step of training on one GPU.

    Sizes are counts (sequences, tokens), never bytes. Every field is an option of the command line by the same name.
    """

    precision: Precision = Field("mixed-bf16", description="Precision recipe: which dtype weights, compute and states have.")
    activation_checkpointing: Literal["none", "full"] = Field(
        "none", description="Recompute activations in backward: none, or full (each block keeps only its input)."
    )
    optimizer: str = Field("adamw", description="Optimizer; `memcalc optimizers` lists them.")
    optimizer_impl: OptimizerImpl = Field("foreach", description="Implementation of the optimizer step in PyTorch.")
    grad_accum: PositiveInt = Field(1, description="Gradient accumulation steps: micro-batches per optimizer step.")
    hold_outputs: bool = Field(False, description="The loop keeps the model's outputs (the logits) through backward.")

    @model_validator(mode="after")
    def _cross_check(self) -> Self:
        if self.optimizer_impl == "fused" and self.optimizer == "adafactor":
            raise UsageError("adafactor has no fused implementation in PyTorch; use --optimizer-impl foreach or for-loop.")
        return self


class InferenceSetup(_Setup):
    """Prefill of a prompt and decoding of one token on one GPU."""

    dtype: Literal["fp32", "bf16", "fp16"] = Field("bf16", description="Dtype that the weights are loaded in.")
