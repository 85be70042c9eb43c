"""The families: which file describes which `model_type`. Add a family by adding its row here and its recipe there."""

from __future__ import annotations

from importlib import import_module

from memcalc.common.escaping import quoted
from memcalc.errors import UnknownFamilyError, close_matches
from memcalc.models.family import Family
from memcalc.tables.linear_attention import why_not

_FILES: dict[str, dict[str, tuple[str, ...]]] = {
    "decoders": {
        "llama": ("llama", "mistral", "qwen2", "qwen3"),
        "llama_variants": (
            "apertus",
            "arcee",
            "bitnet",
            "cwm",
            "ernie4_5",
            "exaone4",
            "granite",
            "helium",
            "hunyuan_v1_dense",
            "hyperclovax",
            "iquestcoder",
            "jais2",
            "ministral",
            "ministral3",
            "nanochat",
            "seed_oss",
            "smollm3",
        ),
        "gemma": ("gemma", "gemma2", "gemma3_text", "vaultgemma"),
        "gemma3n": ("gemma3n_text",),
        "gemma4": ("gemma4_text",),
        "phi3": ("phi3",),
        "olmo": ("olmo", "olmo2", "olmo3"),
        "cohere": ("cohere", "cohere2"),
        "glm": ("chatglm", "glm", "glm4"),
        "remote_code": (
            "baichuan",
            "exaone",
            "internlm",
            "internlm2",
            "internlm3",
            "mimo",
            "minicpm",
            "qwen",
            "xverse",
        ),
        "layernorm_decoders": ("nemotron", "stablelm", "starcoder2"),
        "gpt2": ("gpt2", "gpt_bigcode"),
        "gpt_neo": ("gpt_neo",),
        "gptj": ("codegen", "gptj"),
        "minicpm3": ("minicpm3",),
        "mpt": ("mpt",),
        "nemotron_nas": ("nemotron-nas",),
        "xglm_biogpt": ("biogpt", "xglm"),
        "gpt_neox_phi": ("gpt_neox", "persimmon", "phi", "phi-msft"),
        "opt": ("opt",),
        "bloom": ("bloom",),
        "falcon": ("falcon", "RefinedWeb", "RefinedWebModel"),
        "openelm": ("openelm",),
    },
    "moe": {
        "mixtral_qwen_olmoe": ("mixtral", "qwen2_moe", "qwen3_moe", "olmoe", "gpt_oss", "mellum"),
        "cohere2_moe": ("cohere2_moe",),
        "dbrx": ("dbrx",),
        "jetmoe": ("jetmoe",),
        "deepseek_v4": ("deepseek_v4",),
        "deepseek_v32_glm5": ("deepseek_v32", "glm_moe_dsa"),
        "mimo_v2": ("mimo_v2_flash",),
        "minimax": ("minimax",),
        "phimoe": ("phimoe",),
        "ernie_hunyuan_minimax_m2": ("ernie4_5_moe", "hunyuan_v1_moe", "minimax_m2", "flex_olmo"),
        "deepseek": (
            "axk1",
            "deepseek_v2",
            "deepseek_v3",
            "glm4_moe_lite",
            "kimi_k2",
            "mistral4",
            "sarvam_mla",
            "youtu",
        ),
        "deepseek_variants": ("deepseek", "dots1", "exaone_moe", "glm4_moe", "sarvam_moe", "solar_open"),
        "hy_v3_afmoe": ("afmoe", "hy_v3"),
        "granite_moe": ("granitemoe", "granitemoehybrid", "granitemoeshared"),
        "llama4": ("llama4_text",),
    },
    "recurrent": {
        "mamba": ("mamba", "mamba2", "falcon_mamba", "bamba"),
        "falcon_h1": ("falcon_h1",),
        "lfm2": ("lfm2", "lfm2_moe"),
        "qwen3_next": ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"),
        "jamba_nemotron_h": ("jamba", "nemotron_h"),
        "zamba2": ("zamba2",),
        "kimi_linear": ("kimi_linear",),
        "rwkv": ("rwkv",),
        "recurrent_gemma": ("recurrent_gemma",),
    },
    "encoders": {
        "xlnet": ("xlnet",),
        "bert": ("bert", "roberta", "xlm-roberta", "camembert", "data2vec-text", "electra", "ernie"),
        "rotary_bert": ("gte", "jina_embeddings_v3", "nomic_bert"),
        "pre_norm_bert": ("roberta-prelayernorm", "xlm-roberta-xl"),
        "esm": ("esm",),
        "layoutlmv3": ("layoutlmv3",),
        "eurobert": ("eurobert",),
        "distilbert_albert": ("distilbert", "albert"),
        "mpnet": ("mpnet",),
        "deberta": ("deberta-v2",),
        "modernbert": ("modernbert",),
    },
    "encoder_decoders": {
        "t5": ("t5", "mt5", "umt5"),
        "switch_transformers": ("switch_transformers",),
        "t5gemma": ("t5gemma",),
        "bart": ("bart", "blenderbot", "blenderbot-small", "m2m_100", "marian", "mbart", "pegasus", "plbart"),
    },
    "vision": {
        "segformer": ("segformer",),
        "swin": ("swin",),
        "resnet_regnet": ("regnet", "resnet"),
        "convnext": ("convnext", "convnextv2"),
        "vit": ("vit", "deit", "dinov2", "dinov2_with_registers", "vit_msn"),
        "dinov3": ("dinov3_vit",),
        "vit_mae": ("vit_mae",),
        "videomae": ("videomae",),
        "beit": ("beit",),
        "clip_siglip": (
            "clip",
            "siglip",
            "clip_text_model",
            "siglip_text_model",
            "clip_vision_model",
            "siglip_vision_model",
        ),
        "pixtral": ("pixtral",),
    },
    "vision_language": {
        "blip": ("blip",),
        "blip2": ("blip-2",),
        "llava": ("llava", "vipllava"),
        "gemma3_paligemma": ("gemma3", "paligemma"),
        "gemma4": ("gemma4",),
        "deepseek_vl": ("deepseek_vl",),
        "glm4v": ("glm46v", "glm4v", "glm4v_moe", "glm_ocr"),
        "llava_next": ("llava_next", "llava_onevision"),
        "mistral3": ("mistral3",),
        "mllama": ("mllama",),
        "internvl": ("internvl",),
        "idefics2": ("idefics2",),
        "idefics3": ("idefics3", "smolvlm"),
        "qwen_vl": ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe"),
        "llama4_vision": ("llama4",),
        "qwen_omni": ("qwen2_5_omni", "qwen2_5_omni_thinker", "qwen3_omni_moe", "qwen3_omni_moe_thinker"),
        "step3p7": ("step3p7",),
        "kimi_k25": ("kimi_k25",),
        "aria": ("aria", "aria_text"),
        "aya_vision": ("aya_vision", "cohere2_vision"),
        "vision_encoder_decoder": ("vision-encoder-decoder",),
    },
    "audio": {
        "moonshine": ("moonshine",),
        "whisper": ("whisper",),
        "whisper_languages": ("qwen2_audio", "voxtral"),
        "wav2vec2": ("hubert", "wav2vec2"),
        "wav2vec2_bert": ("wav2vec2-bert",),
        "wavlm": ("wavlm",),
        "audio_spectrogram_transformer": ("audio-spectrogram-transformer",),
    },
    "diffusion": {
        "chroma": ("ChromaTransformer2DModel",),
        "cogvideox": ("CogVideoXTransformer3DModel",),
        "flux": ("FluxTransformer2DModel",),
        "flux2": ("Flux2Transformer2DModel",),
        "hunyuan_video": ("HunyuanVideoTransformer3DModel",),
        "ltx": ("LTXVideoTransformer3DModel",),
        "lumina2": ("Lumina2Transformer2DModel",),
        "pixart": ("PixArtTransformer2DModel",),
        "qwen_image": ("QwenImageTransformer2DModel",),
        "sana": ("SanaTransformer2DModel",),
        "sd3": ("SD3Transformer2DModel",),
        "unet": ("UNet2DConditionModel",),
        "wan": ("WanTransformer3DModel",),
        "z_image": ("ZImageTransformer2DModel",),
    },
    "autoencoders": {
        "cogvideox": ("AutoencoderKLCogVideoX",),
        "dc": ("AutoencoderDC",),
        "hunyuan_video": ("AutoencoderKLHunyuanVideo",),
        "kl": ("AutoencoderKL", "AutoencoderKLFlux2"),
        "ltx": ("AutoencoderKLLTXVideo",),
        "wan": ("AutoencoderKLQwenImage", "AutoencoderKLWan"),
    },
}
"""Kind of family -> file in its folder of `models/families` -> the model types that it describes."""

KINDS = {
    "decoders": "decoders",
    "moe": "decoders with experts",
    "recurrent": "state-space, recurrent and hybrid decoders",
    "encoder_decoders": "encoder-decoders",
    "encoders": "text encoders",
    "vision_language": "text and images",
    "audio": "sound",
    "vision": "images and video",
    "diffusion": "denoisers",
    "autoencoders": "autoencoders",
}
"""What the kinds are called, in the order in which they are listed."""

_FILE_OF = {
    model_type: f"{kind}.{file}"
    for kind, files in _FILES.items()
    for file, model_types in files.items()
    for model_type in model_types
}


_UNLISTED = {"memcalc-generic-decoder": "decoders.generic"}
"""What --generic makes of a config; no model's config names it."""


def families() -> tuple[str, ...]:
    """Every model_type that memcalc can answer for, sorted."""
    return tuple(sorted(_FILE_OF))


def kind_of(model_type: str) -> str:
    """The kind of a known family: a key of `KINDS`."""
    return _FILE_OF[model_type].partition(".")[0]


def denoisers() -> tuple[str, ...]:
    """The classes of diffusers that denoise and that memcalc can answer for."""
    return tuple(name for names in _FILES["diffusion"].values() for name in names)


def autoencoders() -> tuple[str, ...]:
    """The classes of diffusers that make latents and pictures and that memcalc can answer for."""
    return tuple(name for names in _FILES["autoencoders"].values() for name in names)


def family(model_type: str) -> Family:
    """The family of this exact `model_type`. Raises UnknownFamilyError, which names the close matches."""
    file = _FILE_OF.get(model_type) or _UNLISTED.get(model_type)
    if file is None:
        why = why_not(model_type)
        if why is not None:
            raise UnknownFamilyError(why)
        near = close_matches(model_type, _FILE_OF) or ";"
        raise UnknownFamilyError(
            f"no family describes model_type {quoted(model_type)}{near} `memcalc families` lists the known ones, and "
            "CONTRIBUTING.md says how to add one."
        )
    found: Family = import_module(f"memcalc.models.families.{file}").FAMILIES[model_type]
    return found
