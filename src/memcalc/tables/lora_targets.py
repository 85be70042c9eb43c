"""Which modules PEFT adapts when nothing is named. One row a `model_type`.

Source: TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING in peft/utils/constants.py of PEFT 0.21.
"""

from memcalc.errors import UsageError

_QUERY_VALUE = ("q_proj", "v_proj")
_ATTENTION = ("attn.to_k", "attn.to_q", "attn.to_v", "attn.to_out.0")
_ADDED = ("attn.add_k_proj", "attn.add_q_proj", "attn.add_v_proj", "attn.to_add_out")
_DIFFUSION = ("to_k", "to_q", "to_v", "to_out.0")

LORA_TARGETS: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(
        (
            "bart",
            "gemma",
            "gemma2",
            "gemma3_text",
            "gpt_neo",
            "gptj",
            "llama",
            "llama4",
            "mistral",
            "mixtral",
            "opt",
            "qwen2",
            "qwen3",
            "stablelm",
        ),
        _QUERY_VALUE,
    ),
    **dict.fromkeys(("bert", "electra", "layoutlm", "roberta", "xlm-roberta"), ("query", "value")),
    **dict.fromkeys(("bloom", "chatglm", "falcon", "gpt_neox"), ("query_key_value",)),
    **dict.fromkeys(("gpt2", "gpt_bigcode"), ("c_attn",)),
    **dict.fromkeys(("mt5", "t5"), ("q", "v")),
    "blip-2": ("q", "v", *_QUERY_VALUE),
    "codegen": ("qkv_proj",),
    "deberta": ("in_proj",),
    "deberta-v2": ("query_proj", "value_proj"),
    "mpt": ("Wqkv",),
    "nemotron_h": ("q_proj", "k_proj", "v_proj", "o_proj"),
    "phi": (*_QUERY_VALUE, "fc1", "fc2"),
    # Denoisers: the default of diffusers' train_dreambooth_lora_*.py (0.42)
    "FluxTransformer2DModel": (
        *_ATTENTION,
        *_ADDED,
        "ff.net.0.proj",
        "ff.net.2",
        "ff_context.net.0.proj",
        "ff_context.net.2",
    ),
    "Flux2Transformer2DModel": (*_DIFFUSION, "to_qkv_mlp_proj", "attn.to_out"),
    "SD3Transformer2DModel": (*_ATTENTION, *_ADDED),
    "UNet2DConditionModel": _DIFFUSION,
    "rwkv": ("key", "value", "receptance", "output"),
}


FUSED_PROJECTIONS = {
    "mixtral": {"gate": ("gate.weight",), "w1": ("gate_up_proj",), "w3": ("gate_up_proj",), "w2": ("down_proj",)},
    "qwen2_moe": {
        "gate": ("gate.weight",),
        "gate_proj": ("gate_up_proj",),
        "up_proj": ("gate_up_proj",),
        "down_proj": ("down_proj",),
    },
}
"""What names of single experts' layers stand for now that a layer's experts are one tensor, by kind of mixture.

Source: _MOE_TARGET_MODULE_MAPPING in peft/utils/transformers_weight_conversion.py of PEFT 0.21.
"""

MIXTURES = {
    **dict.fromkeys(("minimax", "minimax_m2", "mixtral"), "mixtral"),
    **dict.fromkeys(
        (
            "afmoe",
            "cohere2_moe",
            "deepseek_v2",
            "deepseek_v3",
            "deepseek_v32",
            "dots1",
            "ernie4_5_moe",
            "exaone_moe",
            "flex_olmo",
            "glm4_moe",
            "glm4_moe_lite",
            "glm4v_moe",
            "hunyuan_v1_moe",
            "longcat_flash",
            "olmoe",
            "qwen3_moe",
            "qwen3_next",
            "solar_open",
        ),
        "qwen2_moe",
    ),
}
"""The kind of mixture of each `model_type` (transformers 5.24, conversion_mapping.py: _MODEL_TO_CONVERSION_PATTERN)."""


def default_targets(model_type: str, linear_modules: str) -> tuple[str, ...]:
    """The default targets of a family. Raises UsageError where PEFT has none; `linear_modules` is for its message."""
    try:
        return LORA_TARGETS[model_type]
    except KeyError:
        raise UsageError(
            f"PEFT has no default LoRA targets for {model_type}; give --lora-targets all-linear or names "
            f"(linear modules: {linear_modules})."
        ) from None


REFUSED = dict.fromkeys(("falcon_h1", "falcon_mamba", "mamba", "mamba2", "nemotron_h"), ("conv1d", "out_proj"))
"""Modules of Mamba models that PEFT refuses to adapt. Source: `_check_lora_target_modules_mamba` of PEFT 0.21."""
