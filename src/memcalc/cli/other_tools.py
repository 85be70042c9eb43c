"""Options of other tools, answered by meaning: what the person wants is said in options of memcalc, or not computed.

Sources: the option lists of Transformers' Trainer, TRL, PEFT, axolotl, LLaMA-Factory, Unsloth, DeepSpeed, Accelerate,
torchtune, vLLM, SGLang, Text Generation Inference and llama.cpp.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

_SHARDING = (
    "weights, gradients and states are divided over GPUs with {--parallel}, such as --parallel fsdp2 or zero3, and "
    "{--data-parallel-size}"
)

_MEANINGS: tuple[tuple[str, str], ...] = (
    # training
    (
        "per-device-train-batch-size per-device-batch-size micro-batch-size micro-batch train-micro-batch-size-per-gpu "
        "micro-batch-size-per-gpu ppo-micro-batch-size-per-gpu batch-size train-batch-size bs mbs n-batch-size",
        "the sequences of one GPU in one forward pass are {--batch}",
    ),
    ("gradient-accumulation-steps gradient-accumulation grad-accum-steps ga accumulate-grad-batches", "{--grad-accum}"),
    (
        "max-seq-length max-seq-len max-length sequence-len sequence-length cutoff-len seqlen context-length "
        "model-max-length block-size max-source-length max-prompt-length",
        "tokens of a sequence are {--seq-len}",
    ),
    ("max-target-length", "tokens of the target are {--target-len}"),
    (
        "gradient-checkpointing activation-checkpoint use-gradient-checkpointing gc recompute-granularity "
        "recompute-activations enable-gradient-checkpointing",
        "blocks are recomputed in backward with {--activation-checkpointing} full",
    ),
    (
        "use-reentrant use-reentrant-gc gradient-checkpointing-kwargs",
        "{--checkpoint-reentrant} with {--activation-checkpointing} full",
    ),
    (
        "bf16",
        "{--precision} mixed-bf16 trains fp32 weights under autocast (Trainer's bf16 on an fp32 model), "
        "{--precision} bf16 a model that is loaded in bf16",
    ),
    ("fp16 half amp", "{--precision} mixed-fp16 trains fp32 weights under autocast, {--precision} fp16 all in 16 bits"),
    ("mixed-precision", "{--precision} mixed-bf16 or mixed-fp16"),
    ("fp32 float32 tf32", "{--precision} fp32"),
    ("pure-bf16 bf16-true bf16-full", "{--precision} bf16"),
    (
        "fp8 fp8-format fp8-recipe enable-fp8 transformer-engine te-fp8",
        "torchao's float8 is {--float8-recipe}; TransformerEngine's layers are not computed",
    ),
    (
        "opt-level amp-opt-level apex-opt-level fp16-opt-level",
        "Apex is not computed; O1 is near to {--precision} mixed-fp16, and O2 keeps 16-bit "
        "weights and fp32 masters, as {--parallel} zero1 with {--precision} fp16 does on one GPU",
    ),
    (
        "load-in-4bit 4bit quantization-bit qlora bnb-4bit-quant-type",
        "{--quantization} nf4, or nf4-double with double quantization, and {--lora-rank} to train adapters on it",
    ),
    ("bnb-4bit-use-double-quant double-quantization use-double-quant", "{--quantization} nf4-double"),
    ("load-in-8bit 8bit", "{--quantization} int8"),
    ("optim optimizer-name optimizer-type", "{--optimizer}"),
    ("lora use-peft use-lora peft adapter finetuning-type", "{--lora-rank}, such as {--lora-rank} 16"),
    ("lora-r r", "{--lora-rank}"),
    ("lora-alpha", "the scale of adapters changes no memory: leave it out"),
    ("target-modules lora-target-modules lora-target lora-target-linear", "{--lora-targets}"),
    ("use-dora", "{--dora}"),
    (
        "use-rslora rslora use-rs-lora",
        "the scale of adapters changes no memory: leave it out, or say {--peft-type} rslora",
    ),
    ("init-lora-weights", "how adapters begin changes no memory of a step: leave it out"),
    ("loraplus-lr-ratio loraplus-lr-embedding", "rates of learning change no memory: leave it out"),
    (
        "trainable-token-indices",
        "single tokens of an embedding are not computed; {--modules-to-save} embed_tokens trains a copy of all",
    ),
    (
        "use-qalora use-bdlora arrow-config alora-invocation-tokens corda-config loftq-config eva-config",
        "it is not computed",
    ),
    ("unfreeze trainable-layers freeze-trainable-layers train", "{--train-only}"),
    (
        "use-liger-kernel use-liger liger enable-liger-kernel liger-kernel",
        "{--kernels} liger for norms, rotary embedding and SwiGLU, {--loss-implementation} liger for the fused loss",
    ),
    ("cut-cross-entropy use-cce", "{--loss-implementation} cut-cross-entropy"),
    (
        "unsloth use-unsloth",
        "Unsloth's kernels are not computed; {--loss-implementation} cut-cross-entropy and "
        "{--activation-offloading} are near to what it does",
    ),
    ("neftune-noise-alpha noise-alpha", "NEFTune's noise, as large as the embeddings of a batch, is not computed"),
    ("bnb-4bit-compute-dtype", "quantized layers compute in the 16 bits of {--precision}"),
    ("torch-compile compile", "torch.compile is not computed: the answer is that of eager modules"),
    (
        "sample-packing padding-free neat-packing",
        "packed rows are {--packing}: {--batch} 1 and {--seq-len} of all tokens where they are flattened into one",
    ),
    (
        "attn-implementation flash-attn flash-attention use-flash-attn use-flash-attention-2 use-flash-attention "
        "attention-backend",
        "{--attention} flash, sdpa or eager",
    ),
    ("gradient-clipping clip-grad-norm grad-clip", "{--max-grad-norm}"),
    (
        "learning-rate lr num-train-epochs epochs max-steps warmup-steps warmup-ratio weight-decay seed logging-steps "
        "save-steps output-dir dataset report-to dataloader-num-workers rope-scaling rope-theta "
        "trust-remote-code threads t temp temperature top-k top-p mlock no-mmap mmap enable-prefix-caching "
        "defrag-thold cont-batching lr-scheduler-type adam-beta1 adam-beta2",
        "it changes no memory: leave it out",
    ),
    ("num-generations-per-prompt n-generations", "{--num-generations}"),
    ("use-vllm vllm-mode", "an engine that generates on the GPU of the trainer is not computed: ask for it by itself"),
    ("rollout-batch-size", "completions of one pass are {--batch}, those of one prompt {--num-generations}"),
    ("beta grpo-beta kl-coef", "the reference model is {--reference-model}; none where beta is 0"),
    # several GPUs
    ("fsdp fsdp-config fsdp2 use-fsdp fully-shard", _SHARDING),
    ("zero-stage zero zero3 zero2 deepspeed ds-config deepspeed-config zero-optimization", _SHARDING),
    ("ddp data-parallel dp world-size nproc-per-node num-processes num-gpus ngpus gpus n-gpu", _SHARDING),
    (
        "pipeline-parallel pp pipeline-parallel-size pp-size pipeline-model-parallel-size",
        "pipeline parallelism is {--pipeline-parallel-size}",
    ),
    ("use-distributed-optimizer", "{--parallel} megatron, whose optimizer divides its states"),
    ("context-parallel cp sequence-parallel-degree context-parallel-degree", "{--context-parallel-size}"),
    ("expert-parallel ep enable-expert-parallel", "{--expert-parallel-size}"),
    ("tensor-parallel tp tp-size num-shard tensor-model-parallel-size", "{--tensor-parallel-size}"),
    (
        "cpu-offload offload offload-params zero-offload optimizer-offload",
        "{--cpu-offload} keeps weights or optimizer states in host memory, {--activation-offloading} activations, "
        "{--optimizer} paged-adamw-8bit pages states out",
    ),
    (
        "zero-quantized-weights zero-quantized-gradients zero-quantized-nontrainable-weights mics-shard-size",
        "what ZeRO++ gathers in 8 bits and reduces in 4, and MiCS, are not computed; {--zero-hpz-partition-size} is",
    ),
    # inference
    (
        "max-model-len ctx-size c n-ctx num-ctx context-size max-total-tokens max-input-length context-len",
        "the context of one sequence is {--seq-len} and {--max-new-tokens}, with {--mode} inference",
    ),
    (
        "max-concurrent-requests parallel np max-batch-size max-running-requests",
        "sequences served at once are {--batch}; with {--gpu} the answer says how many fit",
    ),
    (
        "chunked-prefill-size ub batch-tokens enable-chunked-prefill max-batch-prefill-tokens",
        "tokens of one pass of prefill are {--prefill-chunk-size}",
    ),
    ("kv-cache-dtype kv-cache-quant", "{--kv-dtype}"),
    ("cache-type ctk ctv", "{--cache-type-k} and {--cache-type-v}, with {--engine} llama.cpp"),
    ("mem-fraction-static mem-fraction cuda-memory-fraction gpu-mem-util", "{--gpu-memory-utilization}"),
    (
        "torch-dtype weight-dtype",
        "weights are loaded in {--dtype} for inference, and in that of {--precision} for training",
    ),
    ("quantize quant", "{--quantization}; a repository that is quantized already says so itself"),
    (
        "ngl gpu-layers cpu-moe ncmoe override-tensor",
        "layers on the host are {--n-gpu-layers} and {--n-cpu-moe}, with {--engine} llama.cpp",
    ),
    ("device", "the answer is for one GPU that holds all; {--gpu} names it"),
    ("tensor-split split-mode sm main-gpu mg", "several GPUs under llama.cpp are not computed"),
    (
        "b n-batch",
        "llama.cpp's logical batch changes no buffer; those of one pass are {--ubatch-size}, with {--engine} llama.cpp",
    ),
    ("fa", "{--flash-attn} on or off, with {--engine} llama.cpp"),
    ("max-num-tokens", "TensorRT-LLM is not computed; under vLLM tokens of one pass are {--max-num-batched-tokens}"),
    ("kv-cache-free-gpu-memory-fraction", "TensorRT-LLM is not computed; vLLM's share is {--gpu-memory-utilization}"),
    (
        "enable-lora max-loras max-lora-rank lora-modules lora-paths",
        "slots for adapters of a serving engine are not computed",
    ),
    (
        "limit-mm-per-prompt mm-processor-kwargs",
        "images of a sequence are {--images-per-sequence}, and their size {--image-size}",
    ),
    ("sliding-window", "a window is the model's own, as its config says"),
    ("swap-space cpu-offload-gb", "memory of the host is not computed"),
    ("cuda-graph-max-bs", "CUDA graphs are counted for vLLM alone"),
    (
        "speculative-config speculative-model draft-model model-draft num-speculative-tokens speculative-algorithm",
        "a draft model is not computed; ask for it by itself",
    ),
    ("model model-name-or-path base-model model-id m pretrained", "the model is the argument, without an option"),
    ("generate max-tokens n-predict num-predict", "{--max-new-tokens}"),
    ("prompt p prompt-length input-len", "tokens of the prompt are {--seq-len}"),
    ("beam-size beams", "{--num-beams}"),
    # what memcalc called its own options before
    ("kbit-prepare", "{--prepare-kbit-training}"),
    ("loss", "{--loss-implementation}"),
    ("generations", "{--num-generations}"),
    ("images", "{--images-per-sequence}"),
    ("new-tokens", "{--max-new-tokens}"),
    ("utilization", "{--gpu-memory-utilization}"),
    ("head", "{--task}"),
    ("max-batch largest-batch", "`memcalc fit` finds the largest batch of a GPU"),
    ("vram memory gpu-memory", "{--gpu}, such as {--gpu} 24GB"),
)
"""Names of options with the same meaning, and that meaning; braces stand around options that have to exist."""


def _by_name() -> Mapping[str, str]:
    return {name: meaning for names, meaning in _MEANINGS for name in names.split()}


def _of_run_files(name: str, own: set[str]) -> str | None:
    """What frameworks' files mean by a key of that name, of `name` as it is typed without dashes."""
    from memcalc.run_configs import llama_cpp, peft_adapter, vllm
    from memcalc.run_configs.known_keys import axolotl_keys, hf_keys, llama_factory_keys, ms_swift_keys, trl_keys

    key = name.replace("-", "_")
    rooms = (trl_keys, axolotl_keys, llama_factory_keys, ms_swift_keys, peft_adapter, vllm, llama_cpp)
    for room in rooms:
        row = next((row for row in vars(room).get("KEYS", {}).values() if key in (row.name, *row.other)), None)
        if row is None:
            continue
        option = f"--{row.option.replace('_', '-')}"
        if row.option and option in own:
            return f"{{{option}}} is what says it here ({row.meaning})"
        if not row.option:
            return f"it is not computed ({row.meaning})"
    return "it changes no memory: leave it out" if hf_keys.HARMLESS(key) else None


def answered(arguments: Iterable[str], known: Iterable[str]) -> str | None:
    """A sentence for the first option of another tool among `arguments`; None where there is none.

    `known` are the options of the command, as they are typed.
    """
    own = set(known)
    for argument in arguments:
        option = argument.partition("=")[0]
        if argument == "--":
            return None
        if not option.startswith("-") or option in own or f"--no-{option[2:]}" in own:
            continue
        name = option.lstrip("-").lower().replace("_", "-")
        meaning = _by_name().get(name.removeprefix("no-")) or (_of_run_files(name, own) if len(name) > 2 else None)
        if meaning is not None:
            said = _named(meaning, own)
            return f"There is no option {option} here: {said}."
    return None


def _named(meaning: str, own: set[str]) -> str:
    """The meaning with the names of options as they are; where one does not exist, that it is not computed here."""
    wanted = [part.partition("}")[0] for part in meaning.split("{")[1:]]
    if all(option in own for option in wanted):
        return meaning.replace("{", "").replace("}", "")
    return "what it says is not computed, or not by this command and mode"
