"""What a framework's own keys for a remedy are: remedy by name, then keys with their values, as YAML has them.

A remedy that is not listed is one that the framework does not have. Values in braces are those of memcalc's options.
Sources: those of each framework's table of keys.
"""

from __future__ import annotations

from collections.abc import Mapping

_TRAINER = {
    "fused optimizer": {"optim": "adamw_torch_fused"},
    "fused loss": {"use_liger_kernel": "true"},
    "gradient accumulation": {"per_device_train_batch_size": "{batch}", "gradient_accumulation_steps": "{grad_accum}"},
    "activation checkpointing": {"gradient_checkpointing": "true"},
    "8-bit optimizer": {"optim": "adamw_bnb_8bit"},
}
_TRL_LORA = {"use_peft": "true", "lora_r": "16", "lora_target_modules": "all-linear"}
_SWIFT_LORA = {"tuner_type": "lora", "lora_rank": "16", "target_modules": "all-linear"}
_FACTORY_LORA = {"finetuning_type": "lora", "lora_rank": "16", "lora_target": "all"}
_AXOLOTL_LORA = {"lora_r": "16", "lora_target_linear": "true"}
_LIGER = "axolotl.integrations.liger.LigerPlugin"

REMEDY_KEYS: Mapping[str, Mapping[str, Mapping[str, str]]] = {
    "axolotl": {
        "fused optimizer": {"optimizer": "adamw_torch_fused"},
        "fused loss": {"plugins": _LIGER, "liger_fused_linear_cross_entropy": "true"},
        "gradient accumulation": {"micro_batch_size": "{batch}", "gradient_accumulation_steps": "{grad_accum}"},
        "ZeRO 1": {"deepspeed": "deepspeed_configs/zero1.json"},
        "ZeRO 3": {"deepspeed": "deepspeed_configs/zero3_bf16.json"},
        "activation checkpointing": {"gradient_checkpointing": "true"},
        "8-bit optimizer": {"optimizer": "adamw_bnb_8bit"},
        "LoRA": {"adapter": "lora", **_AXOLOTL_LORA},
        "QLoRA": {"adapter": "qlora", "load_in_4bit": "true", **_AXOLOTL_LORA},
        "QLoRA of the adapters": {"adapter": "qlora", "load_in_4bit": "true"},
        "activation offloading": {"gradient_checkpointing": "true", "activation_offloading": "true"},
    },
    "llamafactory": {
        **_TRAINER,
        "fused loss": {"enable_liger_kernel": "true"},
        "ZeRO 3": {"deepspeed": "examples/deepspeed/ds_z3_config.json"},
        "activation checkpointing": {"disable_gradient_checkpointing": "false"},
        "weights in 16 bits": {"pure_bf16": "true", "bf16": "false"},
        "LoRA": _FACTORY_LORA,
        "QLoRA": {**_FACTORY_LORA, "quantization_bit": "4"},
        "QLoRA of the adapters": {"quantization_bit": "4"},
    },
    "trl": {
        **_TRAINER,
        "weights in 16 bits": {"dtype": "bfloat16"},
        "LoRA": _TRL_LORA,
        "QLoRA": {**_TRL_LORA, "load_in_4bit": "true"},
        "QLoRA of the adapters": {"load_in_4bit": "true"},
        "activation offloading": {"activation_offloading": "true"},
    },
    "hf": {**_TRAINER, "FSDP2": {"fsdp": "full_shard"}},
    "msswift": {
        **_TRAINER,
        "ZeRO 1": {"deepspeed": "zero1"},
        "ZeRO 3": {"deepspeed": "zero3"},
        "LoRA": _SWIFT_LORA,
        "QLoRA": {**_SWIFT_LORA, "quant_method": "bnb", "quant_bits": "4"},
        "QLoRA of the adapters": {"quant_method": "bnb", "quant_bits": "4"},
    },
}
