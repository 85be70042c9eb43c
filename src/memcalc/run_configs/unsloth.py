"""Unsloth's Python calls and its command line. Source: unsloth 2026.8 (models/*.py, trainer.py, unsloth-cli.py)."""

from __future__ import annotations

from typing import Any

from memcalc.errors import ConfigError
from memcalc.run_configs import adapter_facts, hf_trainer, training
from memcalc.run_configs import option_names as our
from memcalc.run_configs.context import Context
from memcalc.run_configs.keys import Key, Keys, anything, count, either, flag, harmless, names, number, text
from memcalc.run_configs.known_keys import hf_keys
from memcalc.run_configs.mapping import Given
from memcalc.run_configs.python_calls import Call, calls
from memcalc.run_configs.sharding import Sharding

PROJECTIONS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]

KEYS = hf_keys.trainer_table(
    Key("model_name", text, None, "model", "the model"),
    Key("max_seq_length", count, 2048, our.SEQ_LEN, "cap of a sample", other=("max_length",)),
    Key("dtype", anything, None, our.PRECISION, "dtype that weights load in; bf16 where the GPU can"),
    Key("load_in_4bit", flag, True, our.QUANTIZATION, "4-bit base with double quantization; on by itself"),
    Key("load_in_8bit", flag, False, our.QUANTIZATION, "8-bit base"),
    Key("load_in_16bit", flag, False, our.QUANTIZATION, "16-bit base"),
    Key("full_finetuning", flag, False, our.LORA_RANK, "all weights are trained"),
    Key("r", count, 16, our.LORA_RANK, "rank of the adapters"),
    Key("target_modules", names, PROJECTIONS, our.LORA_TARGETS, "what gets adapters"),
    Key("lora_alpha", number, 16, "", "scale of the adapters"),
    Key("lora_dropout", number, 0.0, our.LORA_DROPOUT, "dropout in front of the adapters"),
    Key("bias", text, "none", our.LORA_BIAS, "biases that are trained"),
    Key("modules_to_save", names, None, our.MODULES_TO_SAVE, "modules trained in full beside the adapters"),
    Key(
        "use_gradient_checkpointing", anything, "unsloth", our.CHECKPOINTING, "unsloth: inputs of blocks in host memory"
    ),
    Key("per_device_train_batch_size", count, 8, our.BATCH, "sequences per GPU and forward pass"),
    Key("packing", flag, False, our.PACKING, "several samples in a row"),
    Key("padding_free", flag, None, our.PACKING, "the batch as one row; on by itself where nothing forbids it"),
    Key("attn_implementation", text, None, our.ATTENTION, "attention implementation"),
    Key("fast_inference", flag, False, our.UTILIZATION, "vLLM beside the trainer"),
    Key("gpu_memory_utilization", number, 0.5, our.UTILIZATION, "vLLM's share of the GPU"),
    Key("float32_mixed_precision", flag, False, our.PRECISION, "fp32 weights under autocast"),
    Key("num_generations", count, 8, our.NUM_GENERATIONS, "completions of a prompt"),
    Key("max_prompt_length", count, None, our.SEQ_LEN, "cap of the prompt"),
    Key("max_completion_length", count, 256, our.COMPLETION_LENGTH, "cap of a completion"),
    Key("beta", number, None, our.REFERENCE, "0 needs no reference in GRPO"),
)
for _name in ("model_name_or_path", "activation_checkpointing", "activation_checkpointing_kwargs"):
    KEYS.pop(_name)

HARMLESS = either(
    hf_keys.HARMLESS,
    harmless(
        "random_state use_rslora loftq_config device_map token trust_remote_code fix_tokenizer rope_scaling "
        "max_lora_rank finetune_vision_layers finetune_language_layers finetune_attention_modules finetune_mlp_modules "
        "layers_to_transform layers_pattern offload_embedding unsloth_tiled_mlp tokenizer train_dataset eval_dataset "
        "dataset_text_field dataset_num_proc data_collator model processing_class formatting_func args reward_funcs "
        "callbacks compute_metrics dataset use_exact_model_name dataset_kwargs embedding_learning_rate temperature "
        "quantization save_model save_method save_path push_model push_gguf save_gguf hub_path hub_token report_to "
        "raw_text_file chunk_size stride use_cache cpt gguf_quantization max_steps num_train_epochs weight_decay "
        "init_lora_weights task_type gradient_checkpointing enable_lora ref_model learning_rate qat_scheme",
        r"vllm_\w+|save_\w+|finetune_\w+|\w*reward\w*|top_\w+|min_p|stop|seed|epsilon\w*|loss_type|use_cache",
    ),
)

_TRAINERS = {
    "SFTTrainer": "sft",
    "UnslothTrainer": "sft",
    "Trainer": "sft",
    "DPOTrainer": "dpo",
    "GRPOTrainer": "grpo",
    "ORPOTrainer": "orpo",
    "KTOTrainer": "kto",
}
_LOADERS = ("from_pretrained",)


def is_unsloth(text: str) -> bool:
    """Whether a Python text makes calls that are read here."""
    return any(
        name in text
        for name in ("FastLanguageModel", "FastModel", "FastVisionModel", "get_peft_model", "from_pretrained(")
    )


def from_python(source: str, where: str) -> tuple[dict[str, Any], str, list[str]]:
    """Keywords of the model's, the adapter's and the trainer's calls, the trainer's class, and what is a variable."""
    values: dict[str, Any] = {}
    variables: list[str] = []
    trainer, adapters, found = "", False, False
    for call in calls(source, where):
        name = call.name.rsplit(".", 1)[-1]
        owner = call.name.rsplit(".", 2)[-2] if "." in call.name else ""
        if name in _LOADERS and owner.startswith(("Fast", "AutoModel")):
            found = True
            _add(values, call, variables)
            if call.positional and isinstance(call.positional[0], str):
                values.setdefault("model_name", call.positional[0])
            if not owner.startswith("Fast"):
                values.setdefault("load_in_4bit", False)
        elif name in ("get_peft_model", "LoraConfig"):
            found = adapters = True
            _add(values, call, variables)
        elif name in _TRAINERS or name.endswith(
            ("TrainingArguments", "SFTConfig", "DPOConfig", "GRPOConfig", "ORPOConfig", "KTOConfig")
        ):
            found = True
            trainer = trainer if name not in _TRAINERS else name
            _add(values, call, variables)
    if not found:
        raise ConfigError(
            f"{where} has no call that memcalc reads (FastLanguageModel.from_pretrained, get_peft_model, SFTConfig, "
            "TrainingArguments): give the launch line or a config file."
        )
    if not adapters:
        values.setdefault("_no_adapters", True)
    return values, trainer, variables


def _add(values: dict[str, Any], call: Call, variables: list[str]) -> None:
    for key, value in call.keywords.items():
        values.setdefault(key, value)
    variables.extend(call.variables)


def read(context: Context, trainer: str = "", variables: list[str] | None = None) -> None:
    """An unsloth run, from calls or a command line. Raises ConfigError."""
    out, values = context.out, context.values
    values["lora_dropout"] = values.get("lora_dropout", 0.0)
    lonely = values.pop("_no_adapters", False)
    cli = context.command.startswith("unsloth")
    rows = dict(KEYS)
    if cli:
        for name, default in (
            ("per_device_train_batch_size", 2),
            ("gradient_accumulation_steps", 4),
            ("optim", "adamw_8bit"),
            ("load_in_4bit", False),
        ):
            rows[name] = Key(**{**rows[name].__dict__, "absent": default})
    keys = Keys(rows, values, context.where, out, HARMLESS)
    for name in variables or ():
        if name in keys.rows and name not in values and name not in ("bf16", "fp16"):
            out.assume(f"{name} is a variable of the script: taken as Unsloth's default")
            keys.seen.add(name)
    out.model = keys.value("model_name")
    objective = _TRAINERS.get(trainer, "grpo" if "num_generations" in values else "sft")
    out.take(our.OBJECTIVE, objective, Given("trainer", trainer or None, objective, not trainer))
    found = context.sharding or Sharding()
    hf_trainer.launched(context, found)
    full = keys.value("full_finetuning") or (lonely and not cli and "r" not in values and trainer != "")
    if not full:
        _quantization(keys)
        adapter_facts.lora(
            out,
            keys.get("r"),
            keys.get("target_modules"),
            keys.get("lora_dropout"),
            saved=keys.get("modules_to_save"),
            bias=keys.get("bias"),
        )
    _precision(keys, bool(full), found)
    _lengths(keys, objective, bool(trainer) or cli or "per_device_train_batch_size" in values)
    attention = keys.get("attn_implementation")
    training.attention(
        out,
        attention
        if not attention.default
        else Given("attn_implementation", None, "flash", True, "flash or xformers, else sdpa"),
    )
    if cli or "optim" in values or trainer:
        accumulation = keys.take("gradient_accumulation_steps").value
        hf_trainer.optimizer(keys, found, accumulation)
    _checkpointing(keys)
    out.take(
        our.KERNELS,
        "liger",
        Given("kernels", None, "liger", True),
        "Unsloth's kernels: norms, rotary embedding and SwiGLU fused",
    )
    out.lack(
        "Unsloth's kernels, fused LoRA and loss in chunks sized by free memory are not modelled: Liger's are nearest"
    )
    if objective == "sft":
        out.take(
            our.LOSS, our.LOSS_LIGER, Given("loss", None, "liger", True), "Unsloth's own fused loss, taken as Liger's"
        )
    free = objective == "grpo" and not keys.value("beta")
    adapter_facts.reference(out, objective, lora=not full, none=free)
    if keys.value("fast_inference"):
        out.lack(
            f"vLLM beside the trainer takes {keys.value('gpu_memory_utilization'):.0%} of the GPU, which is not in "
            f"the estimate"
        )
    for name in ("load_in_16bit", "lora_alpha", "gpu_memory_utilization"):
        keys.get(name)
    training.loop(out, "hf", "Unsloth")
    keys.finish()
    context.finish(found)


def _quantization(keys: Keys) -> None:
    four, eight = keys.get("load_in_4bit"), keys.get("load_in_8bit")
    name = str(keys.value("model_name") or "").lower()
    if eight.value and (four.default or not four.value):
        adapter_facts.quantization(keys.out, eight, "int8", "LLM.int8")
    elif four.value and not keys.value("load_in_16bit"):
        adapter_facts.quantization(keys.out, four, "nf4-double", "double quantization; only what trains is fp32")
    elif "bnb-4bit" in name:
        adapter_facts.quantization(keys.out, keys.get("model_name"), "nf4-double", "the checkpoint is stored in 4 bits")


def _precision(keys: Keys, full: bool, found: Sharding) -> None:
    loaded = keys.get("dtype")
    weights = "bf16" if loaded.value is None else training.dtype(loaded)
    weights = "bf16" if weights == "auto" else weights
    if loaded.value is None:
        keys.out.assume("dtype is bf16 where the GPU can: taken as bf16")
    keys.get("bf16"), keys.get("fp16")
    if full and keys.value("float32_mixed_precision"):
        training.precision(
            keys.out, keys.get("float32_mixed_precision"), weights="fp32", autocast=weights, sharding=found
        )
    else:
        training.precision(
            keys.out,
            loaded,
            weights=weights,
            autocast="" if full else weights,
            sharding=found,
            adapters="" if full else "fp32",
        )


def _lengths(keys: Keys, objective: str, has_trainer: bool) -> None:
    rows, cap = keys.get("per_device_train_batch_size"), keys.get("max_seq_length")
    if not has_trainer:
        keys.out.ask(
            "batch, accumulation and optimizer are in the trainer's call, which is not in the file: give the options"
        )
        keys.out.take(our.SEQ_LEN, cap.value, cap)
        return
    if objective == "grpo":
        keys.out.take(our.BATCH, rows.value, rows, "completions per GPU and forward pass")
        keys.out.take(our.COMPLETION_LENGTH, keys.value("max_completion_length"), keys.get("max_completion_length"))
        prompt = keys.value("max_prompt_length")
        length = cap.value if prompt is None else prompt + keys.value("max_completion_length")
        keys.out.take(our.SEQ_LEN, length, cap, "prompt and completion together")
        return
    packing = keys.get("packing")
    if packing.value:
        training.batch(keys.out, rows, cap, packing="flat")
        keys.out.note(packing)
        return
    training.batch(keys.out, rows, cap, objective=objective)
    if keys.value("padding_free") is not False and objective == "sft":
        keys.out.setup.pop(our.PADDING_MASK, None)
        keys.out.assume("Unsloth makes a batch padding-free by itself where it can: no mask is counted")


def _checkpointing(keys: Keys) -> None:
    given = keys.get("use_gradient_checkpointing")
    word = str(given.value).lower()
    on = word not in ("false", "none", "0")
    training.checkpointing(keys.out, given, on, Given("use_reentrant", True, True, True))
    if word == "unsloth":
        keys.out.take(our.ACTIVATION_OFFLOADING, True, given, "inputs of blocks in host memory")
