"""TRL's YAML files, `trl` command lines and scripts: SFT, DPO, GRPO, reward, KTO, RLOO and the experimental ones.

Source: TRL 1.16 (trainer/*_config.py, trainer/model_config.py, trainer/utils.py) and its tags from 0.9 on. The release
that a file was written for is read off keys that only some releases have; without such a key it is the newest.
"""

from __future__ import annotations

import os
import re

from memcalc.errors import ConfigError
from memcalc.run_configs import adapter_facts, hf_trainer, training
from memcalc.run_configs import option_names as our
from memcalc.run_configs.context import Context
from memcalc.run_configs.keys import Key, Keys
from memcalc.run_configs.known_keys import hf_keys
from memcalc.run_configs.known_keys.trl_keys import HARMLESS, LAST_RELEASE, NEWEST, ROWS, SINCE
from memcalc.run_configs.mapping import Given
from memcalc.run_configs.sharding import Sharding

_OBJECTIVE = re.compile(r"(?<![a-z])(sft|dpo|grpo|kto|rloo|orpo|cpo|gkd|reward|ppo)(?![a-z])")


def read(context: Context) -> None:
    """A TRL run. Raises ConfigError."""
    out, values = context.out, context.values
    release = context.release or min([LAST_RELEASE[key] for key in LAST_RELEASE if key in values] or [NEWEST])
    objective, why = objective_of(context)
    keys = Keys(_table(release, objective), values, context.where, out, HARMLESS)
    if release != NEWEST:
        dated = " and ".join(key for key in LAST_RELEASE if key in values)
        said = f"{dated} is of TRL {release[0]}.{release[1]} and before" if dated else "--release says so"
        out.assume(f"defaults are those of TRL {release[0]}.{release[1]}: {said}")
    out.model = keys.value("model_name_or_path")
    found = hf_trainer.sharding(context, keys, "trl")
    out.take(our.OBJECTIVE, objective, Given("trainer", objective, objective, not why), why)
    lora = keys.value("use_peft")
    quantized = _quantization(keys, lora)
    _precision(context, keys, found, lora, bool(quantized))
    if lora:
        saved = keys.get("lora_modules_to_save")
        adapter_facts.lora(
            out,
            keys.get("lora_r"),
            keys.get("lora_target_modules"),
            keys.get("lora_dropout"),
            saved=saved,
            dora=keys.get("use_dora"),
        )
        keys.get("use_peft"), keys.get("lora_alpha")
    _lengths(keys, objective, release, "vlm" in context.command)
    flash = keys.get("use_flash_attn")
    training.attention(out, Given("use_flash_attn", True, "flash") if flash.value else keys.get("attn_implementation"))
    hf_trainer.common(
        context,
        keys,
        found,
        reentrant=bool(keys.value("use_reentrant")) if keys.has("use_reentrant") else release < (0, 23),
    )
    if lora and found.name == "zero3" and out.setup.get(our.REENTRANT) is False:
        given = Given("use_reentrant", True, True, True)
        out.take(our.REENTRANT, True, given, "TRL forces it for adapters under ZeRO-3")
    _loss(keys, objective, release)
    _reference(keys, objective, release, lora)
    if keys.value("activation_offloading"):
        keys.take("activation_offloading")
    training.loop(out, "trl", "TRL")
    keys.finish({} if lora else {name: "use_peft is not set" for name in values if _of_lora(name)})
    context.finish(found)


def _of_lora(name: str) -> bool:
    return name.startswith("lora_") or name in ("use_rslora", "use_dora")


def _table(release: tuple[int, ...], objective: str) -> dict[str, Key]:
    checkpointing, autocast = release >= SINCE["gradient_checkpointing"], release >= SINCE["bf16"]
    return hf_keys.trainer_table(*ROWS, bf16=autocast, activation_checkpointing=checkpointing)


def objective_of(context: Context) -> tuple[str, str]:
    """The trainer: from the command, the script, keys that one trainer has alone, or names in the file."""
    values = context.values
    for source in (context.command, str(values.get("trl_command", ""))):
        match = _OBJECTIVE.search(os.path.basename(source).lower())
        if match:
            return match[1], f"{match[1]} is the command"
    if values.get("lora_task_type") == "SEQ_CLS" or "center_rewards_coefficient" in values:
        return "reward", "its keys are a reward trainer's"
    if "desirable_weight" in values or "undesirable_weight" in values:
        return "kto", "its keys are KTO's"
    if {"num_generations", "reward_funcs", "num_iterations", "steps_per_generation"} & values.keys():
        return ("rloo" if "rloo" in context.where.lower() else "grpo"), "its keys are those of a trainer that generates"
    if {"beta", "max_prompt_length", "precompute_ref_log_probs", "rpo_alpha"} & values.keys():
        for name in (context.where, *(str(values.get(key, "")) for key in ("output_dir", "hub_model_id", "run_name"))):
            match = _OBJECTIVE.search(name.lower())
            if match and match[1] in ("dpo", "orpo", "cpo", "kto"):
                return match[1], f"named {match[1]}"
        return "dpo", "beta is a key of preference trainers"
    return "sft", ""


def _quantization(keys: Keys, lora: bool) -> str:
    four, eight = keys.get("load_in_4bit"), keys.get("load_in_8bit")
    if four.value and eight.value:
        raise ConfigError(f"{keys.where} sets both load_in_4bit and load_in_8bit: keep one of them.")
    if not (four.value or eight.value):
        return ""
    kind = "int8"
    if four.value:
        kind = str(keys.value("bnb_4bit_quant_type")).lower()
        kind += "-double" if kind == "nf4" and keys.value("use_bnb_nested_quant") else ""
    if not lora:
        keys.out.assume("a quantized base without adapters cannot be trained: the trainer would stop")
        keys.out.take(our.QUANTIZATION, kind, four if four.value else eight)
        return kind
    adapter_facts.quantization(keys.out, four if four.value else eight, kind, "PEFT's preparation is not called")
    keys.get("bnb_4bit_compute_dtype")
    return kind


def _precision(context: Context, keys: Keys, found: Sharding, lora: bool, quantized: bool) -> None:
    autocast, given = hf_trainer.autocast(keys, "TRL")
    kwargs = keys.value("model_init_kwargs")
    named = kwargs.get("dtype", kwargs.get("torch_dtype"))
    loaded = keys.get("dtype") if named is None else Given("model_init_kwargs.dtype", named, named)
    storage = keys.get("bnb_4bit_quant_storage")
    if loaded.default and quantized and storage.value and "int" not in str(storage.value):
        loaded = Given(storage.key, storage.raw, storage.value)
    weights = "fp32" if loaded.value is None else training.dtype(loaded)
    if weights == "auto":
        weights = hf_trainer.loaded_dtype(keys.out, Given("dtype", None, None), autocast)
    if loaded.value is None:
        loaded = Given("dtype", None, "float32", True)
        keys.out.note(loaded, "weights load in fp32 (TRL's default)")
    adapters = ""
    if lora:
        adapters = "bf16" if quantized and found.kind != "fsdp" else "fp32"
        if found.kind == "zero" and found.stage == 3 and weights != "fp32":
            adapters = weights
    training.precision(
        keys.out,
        loaded if not loaded.default else given,
        weights=weights,
        autocast=autocast,
        sharding=found,
        adapters=adapters,
    )


def _lengths(keys: Keys, objective: str, release: tuple[int, ...], uncapped: bool) -> None:
    rows, cap = keys.get("per_device_train_batch_size"), keys.get("max_seq_length")
    prompt, completion = keys.get("max_prompt_length"), keys.get("max_completion_length")
    if objective in ("grpo", "rloo", "gkd", "ppo"):
        _generated(keys, rows, prompt, completion, release)
        return
    if not prompt.default:
        keys.out.note(prompt, "cap of the prompt, inside max_length")
    none = cap.default and (keys.null("max_seq_length") or uncapped)
    packing, strategy = keys.get("packing"), keys.get("packing_strategy")
    flat = packing.value and str(strategy.value).lower() != "wrapped" and release >= SINCE["bfd"]
    keys.out.setup.pop(our.PACKING, None)
    if packing.value and none:
        raise ConfigError(f"{keys.where} packs rows but has max_length null: TRL needs a length to pack to.")
    if keys.value("padding_free") and not packing.value:
        cap = Given("padding_free", True, None)
        keys.out.ask(
            "padding_free without packing makes one row of the samples' summed lengths: give --batch 1 and --seq-len"
        )
    elif none:
        cap = Given("max_length", None, None)
    kind = "flat" if flat else "rows" if packing.value else ""
    training.batch(
        keys.out, rows, cap, packing=kind, multiple=keys.value("pad_to_multiple_of") or 1, objective=objective
    )


def _generated(keys: Keys, rows: Given, prompt: Given, completion: Given, release: tuple[int, ...]) -> None:
    """GRPO and RLOO: the batch counts completions, the row is prompt and completion."""
    out = keys.out
    length = completion.value or (512 if release > (1, 9) else 256)
    if completion.default:
        completion = Given("max_completion_length", length, length, True, completion.meaning)
    if prompt.default and release <= (0, 25):
        prompt = Given("max_prompt_length", 512, 512, True, prompt.meaning)
    generations = keys.get("num_generations")
    out.take(our.BATCH, rows.value, rows, "completions per GPU and forward pass")
    out.note(generations, f"{generations.value} completions of each prompt; the batch counts completions")
    out.take(our.COMPLETION_LENGTH, length, completion)
    if prompt.value:
        out.take(our.SEQ_LEN, prompt.value + length, prompt, "prompt and completion together")
        out.assume(f"the longest prompt cannot be known: took max_prompt_length {prompt.value}")
    else:
        out.ask(f"nothing caps the prompt: give --seq-len (longest prompt plus {length} tokens of completion)")
    for name in ("generation_batch_size", "steps_per_generation"):
        if keys.has(name):
            out.note(keys.get(name))
    _vllm(keys, release)


def _vllm(keys: Keys, release: tuple[int, ...]) -> None:
    out, mode = keys.out, keys.get("vllm_mode")
    if not keys.value("use_vllm"):
        if not mode.default:
            out.drop(mode, "use_vllm is not set")
        return
    name = mode.value or ("colocate" if release > (0, 28) else "server")
    if name == "colocate":
        share = keys.get("vllm_gpu_memory_utilization")
        out.note(share, f"vLLM takes {share.value:.0%} of the GPU beside training")
        out.lack(f"vLLM beside the trainer takes {share.value:.0%} of the GPU, which is not in the estimate")
    else:
        out.assume("vLLM runs as a server on other GPUs")


def _loss(keys: Keys, objective: str, release: tuple[int, ...]) -> None:
    out, liger, loss = keys.out, keys.get("use_liger_kernel"), keys.get("loss_type")
    tiled = objective in ("sft", "dpo", "kto", "grpo", "rloo") and release >= SINCE["chunked_nll"]
    if objective == "sft" and loss.value == "nll" and release < (1, 10):
        tiled = False
    if liger.value:
        training.liger(out, liger, loss=not tiled and objective == "sft", chosen=keys.get("liger_kernel_config"))
        if objective in ("dpo", "grpo"):
            out.lack(f"Liger's fused {objective} loss is not modelled: TRL's own is taken")
    if tiled and objective == "sft":
        out.take(our.LOSS, our.LOSS_TILED, loss, "TRL's fused head: tiles of tokens and vocabulary")
    elif not loss.default:
        out.note(loss)


def _reference(keys: Keys, objective: str, release: tuple[int, ...], lora: bool) -> None:
    beta = keys.get("beta")
    default = 0.05 if objective == "rloo" else 0.0 if release >= SINCE["beta 0"] else 0.04
    weight = default if beta.default else beta.value
    generates = objective in ("grpo", "rloo")
    if generates:
        words = "no reference" if weight == 0 else "a reference model"
        keys.out.note(Given("beta", weight, weight, beta.default), words)
    precomputed = keys.value("precompute_ref_log_probs") and objective in ("dpo", "kto")
    adapter_facts.reference(
        keys.out, objective, lora=lora, none=generates and weight == 0, precomputed=bool(precomputed)
    )
