"""PEFT's adapter_config.json. Source: PEFT 0.20 (tuners/lora/config.py), bitsandbytes' and unsloth's checkpoints."""

from __future__ import annotations

from typing import Any

from memcalc.errors import ConfigError
from memcalc.run_configs import adapter_facts
from memcalc.run_configs import option_names as our
from memcalc.run_configs.context import Context
from memcalc.run_configs.keys import Key, Keys, anything, count, flag, harmless, names, number, table, text
from memcalc.run_configs.sharding import Sharding

KEYS = table(
    Key("base_model_name_or_path", text, None, "model", "the base model"),
    Key("peft_type", text, "LORA", our.LORA_RANK, "kind of adapter"),
    Key("task_type", text, None, "", "what the model does"),
    Key("r", count, 8, our.LORA_RANK, "rank of the adapters"),
    Key("lora_alpha", number, 8, "", "scale of the adapters"),
    Key("lora_dropout", number, 0.0, our.LORA_DROPOUT, "dropout in front of the adapters"),
    Key("target_modules", anything, None, our.LORA_TARGETS, "what gets adapters; PEFT's default of the family"),
    Key("modules_to_save", names, None, our.MODULES_TO_SAVE, "modules trained in full beside the adapters"),
    Key("bias", text, "none", our.LORA_BIAS, "biases that are trained"),
    Key("lora_bias", flag, False, our.LORA_BIAS, "biases of the adapters' B"),
    Key("use_dora", flag, False, our.DORA, "weight-decomposed LoRA"),
    Key("layers_to_transform", anything, None, "", "layers with adapters"),
    Key("rank_pattern", anything, {}, "", "ranks by module"),
    Key("exclude_modules", anything, None, "", "modules without adapters"),
    Key("target_parameters", anything, None, "", "parameters with adapters"),
    Key("trainable_token_indices", anything, None, "", "rows of the embedding that are trained"),
    Key("layer_replication", anything, None, "", "blocks that are run twice"),
)
HARMLESS = harmless(
    "auto_mapping peft_version revision inference_mode fan_in_fan_out use_rslora init_lora_weights layers_pattern "
    "alpha_pattern megatron_config megatron_core loftq_config eva_config corda_config lora_ga_config velora_config "
    "alora_invocation_tokens use_qalora qalora_group_size runtime_config use_bdlora arrow_config kasa_config "
    "ensure_weight_tying lora_alpha qalora monteclora_config",
    r"\w*_config|_\w+",
)


def is_adapter(values: dict[str, Any]) -> bool:
    """Whether a mapping is an adapter's config."""
    return "peft_type" in values or ("base_model_name_or_path" in values and "target_modules" in values)


def read(context: Context) -> None:
    """An adapter's config: the adapter alone. Raises ConfigError."""
    out = context.out
    keys = Keys(KEYS, context.values, context.where, out, HARMLESS)
    kind = keys.get("peft_type")
    if str(kind.value).upper() != "LORA":
        raise ConfigError(
            f"peft_type: {kind.shown} in {context.where}: adapters of this kind are not known; only LORA is counted."
        )
    out.model = keys.value("base_model_name_or_path")
    adapters(keys)
    name = str(out.model or "").lower()
    if "bnb-4bit" in name:
        adapter_facts.quantization(
            out, keys.get("base_model_name_or_path"), "nf4-double", "the checkpoint is stored in 4 bits"
        )
    for wanted in ("batch", "sequence length", "optimizer and precision"):
        out.ask(f"{wanted} of training: an adapter's config does not say; give the options, or the training file too")
    keys.finish()
    context.finish(context.sharding or Sharding())


def adapters(keys: Keys) -> None:
    """The options of an adapter."""
    bias, own = keys.get("bias"), keys.get("lora_bias")
    targets = keys.get("target_modules")
    adapter_facts.lora(
        keys.out,
        keys.get("r"),
        targets,
        keys.get("lora_dropout"),
        saved=keys.get("modules_to_save"),
        dora=keys.get("use_dora"),
        bias=bias,
    )
    if own.value:
        keys.out.take(our.LORA_BIAS, "adapter", own)
    if isinstance(targets.value, str) and targets.value != "all-linear":
        keys.out.lack("target_modules is a regular expression, which is read as a name: give --lora-targets with names")
    for name in (
        "layers_to_transform",
        "rank_pattern",
        "exclude_modules",
        "target_parameters",
        "trainable_token_indices",
        "layer_replication",
    ):
        given = keys.get(name)
        if given.value:
            keys.out.note(given)
            keys.out.lack(f"{name} is not modelled: all layers get adapters of one rank, an upper bound")
    keys.get("task_type"), keys.get("lora_alpha")
