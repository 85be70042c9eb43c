"""What the person wants to run: every option once, with its meaning. The command line reads these fields."""

from typing import Annotated, Literal

from memcalc.common.validation import Checked, Field
from memcalc.errors import UsageError
from memcalc.setup.conflicts import DEFAULT_SEQ_LEN as DEFAULT_SEQ_LEN
from memcalc.setup.conflicts import REFERRING, contradictions

Precision = Literal["fp32", "bf16", "fp16", "mixed-bf16", "mixed-fp16"]
Attention = Literal["eager", "sdpa", "flash"]
OptimizerImpl = Literal["foreach", "for-loop", "fused"]
Quantization = Literal["none", "nf4", "nf4-double", "fp4", "int8", "gptq-4", "awq-4", "fp8", "mxfp4"]
Objective = Literal["sft", "dpo", "kto", "reward", "grpo", "rloo", "ppo", "distillation", "gkd", "orpo", "cpo"]

PositiveInt = Annotated[int, Field(ge=1, le=2**40)]
Probability = Annotated[float, Field(ge=0, lt=1)]


class _Setup(Checked):
    """Options that training and inference share."""

    batch: PositiveInt = Field(
        1,
        description="Micro-batch size: sequences per GPU and forward pass (pairs of dpo and reward, prompts of grpo "
        "and ppo).",
    )
    seq_len: PositiveInt | None = Field(
        None,
        description=f"Sequence length in tokens (source length of an encoder-decoder). "
        f"[default: {DEFAULT_SEQ_LEN}, besides images]",
    )
    target_len: PositiveInt | None = Field(
        None, description="Target length of an encoder-decoder in tokens. [default: the source length]"
    )
    images: int = Field(1, ge=0, le=2**20, description="Images per sequence, where the model reads images.")
    image_size: PositiveInt | None = Field(
        None, description="Height and width of an image in pixels. [default: the config's, or 448 if any will do]"
    )
    expert_imbalance: float = Field(
        1.0, ge=1, description="Tokens of the most loaded expert group, as a multiple of an even spread."
    )
    attention: Attention = Field("sdpa", description="Attention implementation.")
    padding_mask: bool = Field(
        False,
        description="Sequences are padded to --seq-len, the longest of their micro-batch: padding takes what tokens "
        "take, and a real mask reaches attention.",
    )
    quantization: Quantization = Field(
        "none", description="Quantize the weights of linear layers when loading (embeddings, norms and head stay wide)."
    )
    cuda_context: str | None = Field(
        None, description="Size of the CUDA context outside the allocator, such as 500MiB. [default: by GPU]"
    )
    cublas_workspace: str | None = Field(
        None, description="Size of one cuBLAS workspace, such as 8MiB. [default: by GPU generation]"
    )
    allocator_reserve: float | None = Field(
        None,
        ge=0,
        le=4,
        description="Reserved but unallocated memory, as a fraction of what is allocated. [default: 0.02]",
    )


class TrainingSetup(_Setup):
    """One optimizer step of training on one GPU.

    Sizes are counts (sequences, tokens), never bytes. Every field is an option of the command line by the same name.
    """

    precision: Precision = Field(
        "mixed-bf16", description="Precision recipe: which dtype weights, compute and states have."
    )
    activation_checkpointing: Literal["none", "full", "selective"] = Field(
        "none",
        description="Recompute activations in backward: none, full (each block keeps only its input), or selective "
        "(scores and probabilities of attention only).",
    )
    checkpoint_every: PositiveInt = Field(1, description="With full checkpointing: checkpoint every N-th block only.")
    checkpoint_reentrant: bool = Field(
        False, description="Reentrant checkpointing (use_reentrant=True), PyTorch's old way."
    )
    activation_offload: bool = Field(False, description="Keep the tensors saved for backward in host memory.")
    autocast: Literal["bf16", "fp16"] | None = Field(
        None, description="Run forward under torch.autocast to this dtype although the weights are 16-bit already."
    )
    trainer: Literal["plain", "hf", "trl"] | None = Field(
        None, description="Training loop: plain, Hugging Face Trainer (hf), or TRL's trainers (trl)."
    )
    max_grad_norm: float | None = Field(None, ge=0, description="Clip gradients to this norm before the step.")
    optimizer: str = Field("adamw", description="Optimizer; `memcalc optimizers` lists them.")
    optimizer_impl: OptimizerImpl | None = Field(
        None, description="Implementation of the optimizer step. [default: the optimizer's own default on CUDA]"
    )
    optimizer_in_backward: bool = Field(
        False, description="Step each weight as soon as its gradient is there, and free the gradient at once."
    )
    galore_rank: PositiveInt = Field(128, description="Rank of the gradient projection of the galore optimizers.")
    grad_accum: PositiveInt = Field(1, description="Gradient accumulation steps: micro-batches per optimizer step.")
    hold_outputs: bool = Field(False, description="The loop keeps the model's outputs (the logits) through backward.")
    lora_rank: PositiveInt | None = Field(None, description="Train LoRA adapters of this rank on a frozen model.")
    lora_targets: str | None = Field(
        None,
        description="What gets adapters: all-linear, or module names with commas. [default: PEFT's for the family]",
    )
    lora_dtype: Literal["fp32", "bf16"] = Field("fp32", description="Dtype of the adapters (PEFT's default is fp32).")
    lora_dropout: Probability = Field(0.0, description="Dropout in front of the adapters.")
    lora_bias: Literal["none", "all", "lora-only", "adapter"] = Field(
        "none", description="Biases trained with LoRA: all, those of adapted layers, or new ones on the adapters' B."
    )
    dora: bool = Field(False, description="Weight-decomposed LoRA: train each adapted matrix's column norms too.")
    modules_to_save: str | None = Field(
        None, description="Modules trained in full beside LoRA as copies (embed_tokens,lm_head after adding tokens)."
    )
    kbit_prepare: bool = Field(
        True,
        description="LoRA on a quantized model: cast norms, embeddings and head to fp32 first, as PEFT's "
        "prepare_model_for_kbit_training does.",
    )
    train: str = Field(
        "all", description="Weights that are trained without LoRA: all, head, bias, last-N (blocks), or module names."
    )
    freeze: str | None = Field(None, description="Weights that are not trained: vision, embedding, or module names.")
    loss: Literal["eager", "fused-linear", "chunked", "cut"] = Field(
        "eager",
        description="Cross-entropy of a language model: Transformers' own, Liger's fused linear, in chunks of the "
        "logits, or cut cross-entropy.",
    )
    loss_chunks: PositiveInt = Field(8, description="Chunks of tokens of --loss chunked.")
    logits_to_keep: PositiveInt | None = Field(
        None, description="Compute logits and loss of the last N tokens of each sequence only."
    )
    label_smoothing: Probability = Field(0.0, description="Label smoothing, as Hugging Face Trainer computes it.")
    z_loss: bool = Field(False, description="Add the squared log-sum-exp of the logits to the loss.")
    kernels: Literal["eager", "liger"] = Field(
        "eager",
        description="Norms, rotary embedding and SwiGLU: eager modules or Liger's fused kernels (torch.compile is not "
        "modelled).",
    )
    objective: Objective = Field(
        "sft", description="What is trained for, as TRL's trainers run it (sft: the model's own loss)."
    )
    reference: Literal["shared", "copy", "precomputed", "none"] | None = Field(
        None,
        description="Reference model of dpo, grpo and ppo: shared (the trained model with its adapters off), a copy, "
        "log-probabilities precomputed, or none (grpo and ppo with beta 0). [default: shared with LoRA, else copy]",
    )
    generations: PositiveInt = Field(1, description="grpo and ppo: completions per prompt in a micro-batch.")
    completion_len: PositiveInt | None = Field(
        None, description="Tokens of each sequence that are the completion. [default: all of them]"
    )

    @property
    def reference_used(self) -> str:
        """The kind of reference model: the one asked for, else the default; none where the objective has none."""
        if self.objective not in REFERRING:
            return "none"
        return self.reference or ("copy" if self.lora_rank is None else "shared")

    def check(self) -> None:
        """Raise UsageError for the first pair of options that contradict each other."""
        for sentence in contradictions(self):
            raise UsageError(sentence)


def sequences(setup: TrainingSetup) -> int:
    """Sequences of a micro-batch: --batch counts pairs of a preference, and prompts of several completions."""
    return setup.batch * (2 if setup.objective in ("dpo", "reward", "orpo", "cpo") else setup.generations)


class InferenceSetup(_Setup):
    """Prefill of a prompt and decoding of one token on one GPU."""

    dtype: Literal["fp32", "bf16", "fp16"] | None = Field(
        None, description="Dtype that weights are loaded in. [default: the one that the config declares, else bf16]"
    )
    engine: Literal["transformers", "transformers-static", "vllm", "sglang", "tgi", "llama.cpp"] = Field(
        "transformers", description="Inference engine: how it keeps its caches and what it reserves."
    )
    kv_dtype: Literal["auto", "fp32", "bf16", "fp16", "fp8", "int8", "int4"] = Field(
        "auto", description="Dtype of the KV cache; auto is the dtype that the model computes in."
    )
    new_tokens: PositiveInt = Field(1, description="Tokens generated after the prompt; decode is the last of them.")
    num_beams: PositiveInt = Field(1, description="Beams of beam search: every sequence is decoded that many times.")
    logits: Literal["last", "all"] = Field("last", description="Tokens of the prompt whose logits prefill computes.")
    prefill_chunk: PositiveInt | None = Field(
        None, description="Tokens per forward pass of prefill. [default: the whole prompt]"
    )
    tensor_parallel: PositiveInt = Field(1, description="GPUs that share every layer; the report is for one of them.")
    utilization: float | None = Field(
        None, gt=0, le=1, description="Share of the GPU that a serving engine fills. [default: the engine's]"
    )
