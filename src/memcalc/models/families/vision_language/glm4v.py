"""GLM-4.1V, 4.5V, 4.6V and GLM-OCR: GLM's decoders, dense or with experts, with positions in time, height and width."""

from __future__ import annotations

from functools import partial

from memcalc.config.reader import Config
from memcalc.models.common.decoder import dense_decoder
from memcalc.models.common.vision_language import language_model
from memcalc.models.families.decoders.glm import AROUND
from memcalc.models.families.moe.deepseek import layered, shared_and_routed
from memcalc.models.families.vision_language.qwen_vl import QwenVL
from memcalc.models.family import Family, llama_sizes, table
from memcalc.models.vision_towers.glm4v import GLM4V_VISION, glm4v_vision, glm_ocr_vision
from memcalc.nn.layers.decoder_blocks import DecoderBlock
from memcalc.nn.layers.mlp import FusedGatedMLP
from memcalc.nn.layers.multimodal_rotary import MultimodalRotary
from memcalc.nn.layers.rotary import rotary_of_part
from memcalc.nn.layers.rotary_interleaved import rotary_given_pairs_of_part
from memcalc.nn.model import Network
from memcalc.nn.towers import as_tower


def _glm4v_text(c: Config, architecture: str | None, *, bias: bool = True) -> Network:
    return dense_decoder(
        c,
        architecture,
        attention={"bias": bias, "rotate": rotary_given_pairs_of_part},
        mlp=lambda: FusedGatedMLP(c.integer("hidden_size"), c.integer("intermediate_size"), c.text("hidden_act")),
        block=partial(DecoderBlock, names=AROUND),
        rotary=MultimodalRotary(c.rotary_dim(c.head_dim()), pairs=True),
        position_ids="kept",
    )


def _glm4v_moe_text(c: Config, architecture: str | None) -> Network:
    return dense_decoder(
        c,
        architecture,
        mlp=layered(c, shared_and_routed),
        attention={"bias": c.flag("attention_bias"), "rotate": rotary_of_part},
        rotary=MultimodalRotary(c.rotary_dim(c.head_dim(), 0.5)),
        position_ids="always",
    )


def glm4v(c: Config, architecture: str | None) -> Network:
    """GLM-4.1V and its kin."""
    kind = str(c.section("text_config").get("model_type", f"{c.text('model_type')}_text"))
    text_family = _TEXT_MOE if kind == "glm4v_moe_text" else _TEXT
    text = language_model(c, text_family, tied=c.flag("tie_word_embeddings"))
    encoder = glm4v_vision(c.nested("vision_config", GLM4V_VISION))
    as_tower(encoder)
    return QwenVL(encoder, text, own_cache=True, videos=True)


def glm_ocr(c: Config, architecture: str | None) -> Network:
    """GLM-OCR: no biases in the decoder, and a tower without learned positions."""
    text = language_model(c, _TEXT_OCR, tied=c.flag("tie_word_embeddings"))
    encoder = as_tower(glm_ocr_vision(c.nested("vision_config", _OCR_VISION)))
    return QwenVL(encoder, text, own_cache=True, videos=True)


_TEXT = Family("glm4v_text", _glm4v_text, llama_sizes((151552, 4096, 13696, 40, 32, 2, 32768), attention_dropout=0.0))
_TEXT_MOE = Family(
    "glm4v_moe_text",
    _glm4v_moe_text,
    llama_sizes(
        (151424, 4096, 10944, 46, 96, 8, 65536),
        attention_bias=True,
        attention_dropout=0.0,
        moe_intermediate_size=1408,
        num_experts_per_tok=8,
        n_shared_experts=1,
        n_routed_experts=128,
        n_group=1,
        topk_group=1,
        first_k_dense_replace=1,
        norm_topk_prob=True,
    ),
    {"num_local_experts": "n_routed_experts"},
)

_TEXT_OCR = Family(
    "glm_ocr_text",
    partial(_glm4v_text, bias=False),
    llama_sizes((59392, 1024, 4096, 16, 16, 8, 131072), attention_dropout=0.0),
)
_OCR_VISION = GLM4V_VISION | {
    "hidden_size": 1024,
    "attention_bias": True,
    "num_heads": 16,
    "out_hidden_size": 1536,
    "intermediate_size": 4096,
}

FAMILIES = table(
    Family("glm_ocr", glm_ocr, {"tie_word_embeddings": False}, kinds="vision tower, decoder"),
    Family("glm4v", glm4v, {"tie_word_embeddings": False}, kinds="vision tower, decoder"),
    Family("glm46v", glm4v, {"tie_word_embeddings": False}, kinds="vision tower, decoder, experts"),
    Family("glm4v_moe", glm4v, {"tie_word_embeddings": False}, kinds="vision tower, decoder, experts"),
)
