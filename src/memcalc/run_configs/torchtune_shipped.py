"""Adapter recipes that torchtune ships, for `tune run RECIPE --config NAME` lines whose file is not at hand.

All of them adapt q_proj, v_proj, output_proj and the MLP, with fused AdamW in bf16.
Source: torchtune 0.7 (bd2a0fc7c), recipes/configs.
"""

from __future__ import annotations

from typing import Any

_ROWS = """
gemma/2B_lora 64 4 1 1
gemma/2B_lora_single_device 64 4 8 1
gemma/2B_qlora_single_device 64 4 8 1
gemma/7B_lora 64 4 1 1
gemma/7B_lora_single_device 8 8 8 1
gemma/7B_qlora_single_device 64 4 8 1
gemma2/27B_lora 64 4 1 1
gemma2/27B_lora_single_device 8 2 8 1
gemma2/27B_qlora_single_device 64 4 8 1
gemma2/2B_lora 64 4 1 1
gemma2/2B_lora_single_device 64 8 8 1
gemma2/2B_qlora_single_device 64 4 8 1
gemma2/9B_lora 64 4 1 1
gemma2/9B_lora_single_device 8 8 8 1
gemma2/9B_qlora_single_device 64 4 8 1
llama2/13B_qlora_single_device 8 2 8 1
llama2/70B_lora 16 2 1 1
llama2/70B_qlora 16 2 1 1
llama2/7B_lora 8 2 8 0
llama2/7B_lora_dpo 8 4 8 1
llama2/7B_lora_dpo_single_device 8 4 8 1
llama2/7B_lora_single_device 8 2 8 1
llama2/7B_qlora 8 2 8 1
llama2/7B_qlora_single_device 8 2 8 1
llama3/70B_lora 16 2 1 1
llama3/8B_dora 8 2 1 0
llama3/8B_dora_single_device 8 2 8 1
llama3/8B_lora 8 2 8 0
llama3/8B_lora_single_device 8 2 8 1
llama3/8B_qat_lora 8 2 8 0
llama3/8B_qdora_single_device 8 2 8 1
llama3/8B_qlora_single_device 8 2 8 1
llama3_1/405B_qlora 16 1 8 1
llama3_1/70B_lora 16 2 1 1
llama3_1/8B_lora 8 2 8 0
llama3_1/8B_lora_dpo 8 4 8 1
llama3_1/8B_lora_dpo_single_device 8 4 8 1
llama3_1/8B_lora_single_device 8 2 8 1
llama3_1/8B_qat_lora 8 2 8 0
llama3_1/8B_qlora_single_device 8 2 8 1
llama3_2/1B_lora 64 4 8 0
llama3_2/1B_lora_single_device 64 4 8 0
llama3_2/1B_qat_lora 64 4 8 0
llama3_2/1B_qlora_single_device 64 4 8 0
llama3_2/3B_lora 64 4 8 0
llama3_2/3B_lora_single_device 64 4 8 1
llama3_2/3B_qat_lora 64 4 8 0
llama3_2/3B_qlora_single_device 64 4 8 1
llama3_2/8B_to_1B_KD_lora_distributed 64 4 8 0
llama3_2/8B_to_1B_KD_lora_single_device 64 4 8 0
llama3_2_vision/11B_lora 8 2 8 1
llama3_2_vision/11B_lora_single_device 8 2 8 1
llama3_2_vision/11B_qlora 8 2 8 1
llama3_2_vision/11B_qlora_single_device 8 2 8 1
llama3_2_vision/90B_lora 8 2 8 1
llama3_2_vision/90B_qlora 8 2 8 1
llama3_3/70B_lora 16 2 1 1
llama3_3/70B_qlora 16 2 1 1
mistral/7B_qlora_single_device 64 4 8 1
phi3/mini_lora 8 2 8 0
phi3/mini_lora_single_device 8 2 8 1
phi3/mini_qlora_single_device 8 2 8 1
phi4/14B_lora 8 2 8 0
phi4/14B_lora_single_device 8 2 8 1
phi4/14B_qlora_single_device 8 2 8 1
qwen2/0.5B_lora 32 4 8 1
qwen2/0.5B_lora_single_device 32 4 8 1
qwen2/1.5B_lora 32 2 8 1
qwen2/1.5B_lora_single_device 32 2 8 1
qwen2/7B_lora 8 2 8 0
qwen2/7B_lora_single_device 8 2 8 1
qwen2_5/0.5B_lora 32 2 8 0
qwen2_5/0.5B_lora_single_device 32 2 8 0
qwen2_5/1.5B_lora 32 2 8 0
qwen2_5/1.5B_lora_single_device 32 2 8 0
qwen2_5/14B_lora_single_device 8 2 8 1
qwen2_5/14B_to_7B_KD_lora_single_device 64 2 8 1
qwen2_5/32B_lora 8 2 8 0
qwen2_5/3B_lora 8 2 8 0
qwen2_5/3B_lora_single_device 8 2 8 1
qwen2_5/72B_lora 8 2 1 1
qwen2_5/7B_lora 8 2 8 0
qwen2_5/7B_lora_single_device 8 2 8 1
qwen3/0.6B_lora 32 2 8 0
qwen3/0.6B_lora_single_device 32 2 8 0
qwen3/0.6B_qat_lora 32 2 8 0
qwen3/1.7B_lora 32 2 8 0
qwen3/1.7B_lora_single_device 32 2 8 0
qwen3/1.7B_qat_lora 32 2 8 0
qwen3/14B_lora_single_device 8 2 8 1
qwen3/14B_to_8B_KD_lora_single_device 64 2 8 1
qwen3/32B_lora 8 2 8 0
qwen3/32B_qat_lora 8 2 8 0
qwen3/4B_lora 8 2 8 0
qwen3/4B_lora_single_device 8 2 8 1
qwen3/4B_qat_lora 8 2 8 0
qwen3/8B_lora 8 2 8 0
qwen3/8B_lora_single_device 8 2 8 1
qwen3/8B_qat_lora 8 2 8 0
"""
"""Name, rank, batch, accumulation, and 1 where blocks are checkpointed."""


def shipped(name: str) -> dict[str, Any] | None:
    """The values of a shipped adapter recipe, or None."""
    for row in _ROWS.split("\n"):
        if row.startswith(f"{name} "):
            rank, batch, accumulation, checkpointed = (int(word) for word in row.split()[1:])
            return {
                "model": {
                    "lora_rank": rank,
                    "lora_attn_modules": ["q_proj", "v_proj", "output_proj"],
                    "apply_lora_to_mlp": True,
                },
                "batch_size": batch,
                "gradient_accumulation_steps": accumulation,
                "enable_activation_checkpointing": bool(checkpointed),
                "optimizer": {"_component_": "torch.optim.AdamW", "fused": True},
                "loss": {"_component_": "torchtune.modules.loss.LinearCrossEntropyLoss"},
                "dtype": "bf16",
            }
    return None
