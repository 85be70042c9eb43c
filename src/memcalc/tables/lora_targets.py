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
    **dict.fromkeys(
        (
            "CogVideoXTransformer3DModel",
            "Lumina2Transformer2DModel",
            "QwenImageTransformer2DModel",
            "UNet2DConditionModel",
            "ZImageTransformer2DModel",
        ),
        _DIFFUSION,
    ),
    "SanaTransformer2DModel": ("to_k", "to_q", "to_v"),
    "rwkv": ("key", "value", "receptance", "output"),
}


SAME_AS_LORA = ("lora", "rslora", "lora+", "loraplus", "pissa", "olora")
"""Kinds of LoRA that differ in scale, learning rates or first values alone, and so in no byte of a step."""

OTHER_ADAPTERS = {
    "adalora": ": its ranks change while it trains, and its loss has a term for each adapter",
    "vera": ": its two large matrices are shared and frozen",
    "ia3": ": it trains one vector a module",
    "loha": ": its update is a product of two pairs of matrices",
    "lokr": ": its update is a Kronecker product",
    "oft": ": it trains rotations",
    "boft": ": it trains rotations",
    "prompt-tuning": ": it trains vectors before the prompt",
    "prefix-tuning": ": it trains keys and values of every layer",
    "p-tuning": ": it trains vectors before the prompt, and what makes them",
    "trainable-tokens": ": it copies the embedding in every step",
}
"""Kinds of adapters that PEFT has and memcalc does not compute, and why the answer for LoRA is not theirs."""

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

OWN_NAMES: dict[str, dict[str, str]] = {
    "baichuan": {"W_pack": "qkv_proj"},
    "chatglm": {
        "query_key_value": "qkv_proj",
        "dense": "o_proj",
        "dense_h_to_4h": "gate_up_proj",
        "dense_4h_to_h": "down_proj",
    },
    "internlm2": {"wqkv": "qkv_proj", "wo": "o_proj", "w1": "gate_proj", "w3": "up_proj", "w2": "down_proj"},
    "qwen": {
        "c_attn": "qkv_proj",
        "attn.c_proj": "o_proj",
        "mlp.c_proj": "down_proj",
        "w1": "up_proj",
        "w2": "gate_proj",
    },
}
"""Modules as the code of a repository calls them, by `model_type`, and what they are called here."""

PARTS = {
    **dict.fromkeys(("q_proj", "k_proj", "v_proj"), "qkv_proj"),
    **dict.fromkeys(("gate_proj", "up_proj"), "gate_up_proj"),
}
"""Projections that some code keeps as one, and what that one is called here."""

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
