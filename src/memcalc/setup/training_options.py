"""Options of one optimizer step of training."""

from typing import Annotated, Literal

from pydantic import Field

from memcalc.setup.defaults import FUSED_HEAD
from memcalc.setup.options import option
from memcalc.setup.parallel_options import ParallelOptions
from memcalc.setup.shared_options import PositiveInt, Probability, SharedOptions

Precision = Literal["fp32", "bf16", "fp16", "mixed-bf16", "mixed-fp16"]
OptimizerImpl = Literal["foreach", "for-loop", "fused"]
Objective = Literal["sft", "dpo", "kto", "reward", "grpo", "rloo", "ppo", "distillation", "gkd", "orpo", "cpo"]


class TrainingOptions(ParallelOptions, SharedOptions):
    """The options of `--mode training`."""

    trainer: Literal["plain", "accelerate", "hf", "trl", "diffusers"] | None = option(
        "Batch",
        None,
        "Training loop: plain PyTorch, one that Accelerate prepares, Hugging Face Trainer (hf), TRL's trainers (trl), "
        "or diffusers' scripts, with what each keeps and its defaults.",
        unset="plain for sft, trl for other objectives, diffusers for denoisers",
    )

    pad_to_multiple_of: PositiveInt = option(
        "Batch", 1, "The collator pads sequences up to a multiple of this (pad_to_multiple_of)."
    )
    lengths: str | None = option(
        "Batch",
        None,
        "Lengths of sequences that differ: 512..4096, or a file with one a line (a tokenized dataset's). Every "
        "micro-batch is as long as its longest, and what the allocator reserves after --max-steps is simulated.",
        unset="all have --seq-len tokens",
    )
    max_steps: PositiveInt = option("Batch", 30, "With --lengths: optimizer steps that are simulated.")
    seed: Annotated[int, Field(ge=0, lt=2**63)] = option("Batch", 0, "With --lengths: seed of the draw.")
    packing: bool = option(
        "Batch",
        False,
        "Rows of --seq-len tokens hold several samples (TRL's packing, DataCollatorWithFlattening with --batch 1): "
        "positions come with them, and eager attention and sdpa get a block-wise mask.",
    )
    precision: Precision = option(
        "Precision", "mixed-bf16", "Precision recipe: which dtype weights, compute and states have."
    )
    autocast: Literal["bf16", "fp16"] | None = option(
        "Precision",
        None,
        "Run forward under torch.autocast to this dtype although the weights are 16-bit already, as bf16=True does "
        "with a 16-bit checkpoint.",
        unset="as --precision says",
    )
    kernels: Literal["eager", "liger"] = option(
        "Kernels",
        "eager",
        "Norms, rotary embedding and SwiGLU: eager modules or Liger's fused kernels (torch.compile is not modelled).",
    )

    liger_kernels: str = option(
        "Kernels",
        "all",
        "Which kernels --kernels liger puts in: all, or names with commas of rope, rms_norm, swiglu (Trainer's "
        "liger_kernel_config).",
    )

    activation_checkpointing: Literal["none", "full", "selective"] = option(
        "Checkpointing",
        "none",
        "Recompute activations in backward: none, full (each block keeps only its input), or selective (scores and "
        "probabilities of attention only).",
    )
    checkpoint_every_n_blocks: PositiveInt = option(
        "Checkpointing", 1, "With full checkpointing: checkpoint every N-th block only."
    )
    checkpoint_reentrant: bool = option(
        "Checkpointing", False, "Reentrant checkpointing (use_reentrant=True), PyTorch's old way."
    )
    activation_offloading: bool = option("Checkpointing", False, "Keep the tensors saved for backward in host memory.")

    optimizer: str = option("Optimizer", "adamw", "Optimizer; `memcalc optimizers` lists them.")
    optimizer_impl: OptimizerImpl | None = option(
        "Optimizer", None, "Implementation of the optimizer step.", unset="the optimizer's own default on CUDA"
    )
    optimizer_in_backward: bool = option(
        "Optimizer", False, "Step each weight as soon as its gradient is there, and free the gradient at once."
    )
    max_grad_norm: Annotated[float, Field(ge=0)] | None = option(
        "Optimizer",
        None,
        "Clip gradients to this norm before the step; 0 clips nothing.",
        unset="1.0 with --trainer hf or trl, else none",
    )
    galore_rank: PositiveInt = option("Optimizer", 128, "Rank of the gradient projection of the galore optimizers.")
    grad_accum: PositiveInt = option("Optimizer", 1, "Gradient accumulation steps: micro-batches per optimizer step.")
    train_only: str = option(
        "Optimizer", "all", "Weights that are trained without LoRA: all, head, bias, last-N (blocks), or module names."
    )
    float8_recipe: Literal["none", "tensorwise"] = option(
        "Precision",
        "none",
        "torchao's float8 training: the products of linear layers in 8 bits, by this recipe of Float8LinearConfig.",
    )
    frozen_dtype: Literal["bf16", "fp16"] | None = option(
        "Precision",
        None,
        "Dtype of weights that are not trained, where those that are trained stay in fp32 (--train-only, --freeze).",
        unset="that of the others",
    )
    freeze: str | None = option("Optimizer", None, "Weights that are not trained: vision, embedding, or module names.")

    lora_rank: PositiveInt | None = option("LoRA", None, "Train LoRA adapters of this rank on a frozen model.")
    lora_targets: str | None = option(
        "LoRA",
        None,
        "What gets adapters: all-linear, module names with commas, or one regular expression.",
        unset="PEFT's for the family",
    )
    lora_exclude_modules: str | None = option(
        "LoRA", None, "Modules among the targets that get no adapter: names with commas, or one regular expression."
    )
    lora_layers_to_transform: str | None = option(
        "LoRA", None, "Layers whose targets get adapters, such as 0,1 or 16-31.", unset="all"
    )
    lora_rank_pattern: str | None = option(
        "LoRA", None, "Ranks of their own for some targets, by name or pattern, such as q_proj=32,o_proj=8."
    )
    lora_target_parameters: str | None = option(
        "LoRA", None, "Parameters of experts that get adapters, such as mlp.experts.gate_up_proj,mlp.experts.down_proj."
    )
    peft_type: str = option(
        "LoRA", "lora", "Kind of adapter: lora, rslora or lora+, which take the same memory; others are not computed."
    )
    lora_dtype: Literal["fp32", "bf16"] = option("LoRA", "fp32", "Dtype of the adapters (PEFT's default is fp32).")
    lora_dropout: Probability = option("LoRA", 0.0, "Dropout in front of the adapters.")
    lora_bias: Literal["none", "all", "lora-only", "adapter"] = option(
        "LoRA", "none", "Biases trained with LoRA: all, those of adapted layers, or new ones on the adapters' B."
    )
    dora: bool = option("LoRA", False, "Weight-decomposed LoRA: train each adapted matrix's column norms too.")
    modules_to_save: str | None = option(
        "LoRA", None, "Modules trained in full beside LoRA as copies (embed_tokens,lm_head after adding tokens)."
    )
    use_ema: bool = option(
        "Diffusion components",
        False,
        "Keep an exponential moving average of a denoiser's weights on the GPU: a copy of them.",
    )
    train_text_encoder: bool = option(
        "Diffusion components",
        False,
        "Train the text encoders too, in full or with adapters of their own (Stable Diffusion, SDXL, FLUX.1).",
    )
    controlnet: bool = option(
        "Diffusion components",
        False,
        "Train a ControlNet made from the denoiser, which is frozen (Stable Diffusion, SDXL, FLUX.1).",
    )
    textual_inversion: bool = option(
        "Diffusion components", False, "Train the embedding of new words alone (Stable Diffusion 1 and 2)."
    )
    cache_latents: bool = option(
        "Diffusion components",
        True,
        "Latents were made before training; otherwise the autoencoder is on the GPU and runs in every step.",
    )
    cache_text_embeddings: bool = option(
        "Diffusion components",
        True,
        "Text embeddings were made before training; otherwise the text encoders are on the GPU and run in every step.",
    )
    vae_dtype: Literal["fp32", "bf16", "fp16"] | None = option(
        "Diffusion components",
        None,
        "Dtype of the autoencoder.",
        unset="--dtype or the stored one; in training the script's",
    )
    prepare_kbit_training: bool = option(
        "Precision",
        True,
        "LoRA on a quantized model: cast norms, embeddings and head to fp32 first, as PEFT's "
        "prepare_model_for_kbit_training does.",
    )

    loss_implementation: Literal["eager", "liger", "liger-cross-entropy", "chunked", "cut-cross-entropy", "tiled"] = (
        option(
            "Loss",
            "eager",
            "Cross-entropy of a language model: Transformers' own, Liger's fused linear, Liger's kernel that "
            "overwrites logits (as flash-attn's), in chunks of logits, cut cross-entropy, or TRL's head in tiles.",
        )
    )
    loss_num_chunks: PositiveInt = option("Loss", 8, "Chunks of tokens of --loss-implementation chunked.")
    logits_to_keep: PositiveInt | None = option(
        "Loss", None, "Compute logits and loss of the last N tokens of each sequence only.", unset="all tokens"
    )
    keep_logits: bool = option("Loss", False, "The loop keeps the model's outputs (the logits) through backward.")
    label_smoothing: Probability = option("Loss", 0.0, "Label smoothing, as Hugging Face Trainer computes it.")
    z_loss: bool = option("Loss", False, "Add the squared log-sum-exp of the logits to the loss.")

    objective: Objective = option(
        "Objective", "sft", "What is trained for, as TRL's trainers run it (sft: the model's own loss)."
    )
    reference_model: Literal["shared", "copy", "precomputed", "none"] | None = option(
        "Objective",
        None,
        "Reference model of dpo, kto, grpo, rloo and ppo: shared (the trained model with its adapters off), a copy, "
        "log-probabilities precomputed, or none (grpo and ppo with beta 0).",
        unset="none for grpo in TRL, else shared with LoRA, else copy",
    )
    num_generations: PositiveInt = option(
        "Objective", 1, "Completions per prompt in a micro-batch of grpo, rloo and ppo."
    )
    max_completion_length: PositiveInt | None = option(
        "Objective", None, "Tokens of each sequence that are the completion.", unset="all of them"
    )

    @property
    def trainer_used(self) -> str:
        """The training loop: the one asked for, else TRL's for the objectives that it has, else a plain one."""
        return self.trainer or ("plain" if self.objective in ("sft", "ppo") else "trl")

    @property
    def uses_fused_head(self) -> bool:
        """Whether labels are scored in tiles by TRL's fused head, so that full logits never exist."""
        tiled = self.loss_implementation == "tiled"
        return tiled or (self.trainer_used == "trl" and self.objective in ("sft", *FUSED_HEAD))
