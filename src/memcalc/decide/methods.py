"""Ways to fine-tune, as options: what `--methods` names."""

from collections.abc import Mapping
from typing import Any

METHODS: Mapping[str, Mapping[str, Any]] = {
    "full": {},
    "lora": {"lora_rank": 16, "lora_targets": "all-linear", "precision": "bf16"},
    "dora": {"lora_rank": 16, "lora_targets": "all-linear", "precision": "bf16", "dora": True},
    "qlora": {"lora_rank": 16, "lora_targets": "all-linear", "precision": "bf16", "quantization": "nf4-double"},
    "galore": {"optimizer": "galore-adamw-8bit"},
    "lomo": {"optimizer": "lomo", "precision": "bf16"},
    "head": {"train_only": "head"},
}
"""Every way with the options that it stands for; those that the user gave come before them."""
