"""GLM: part of each head rotated by pairs, gate and up in one projection; in GLM-4-0414 norms around every sublayer."""

from __future__ import annotations

from functools import partial

from memcalc.config.reader import Config
from memcalc.errors import ConfigError
from memcalc.models.common.decoder import dense_decoder
from memcalc.models.family import Family, llama_sizes, table
from memcalc.nn.layers.decoder_blocks import PRE_NORM, DecoderBlock, NormNames
from memcalc.nn.layers.mlp import FusedGatedMLP
from memcalc.nn.layers.rotary import RotaryEmbedding
from memcalc.nn.layers.rotary_interleaved import rotary_pairs_of_part
from memcalc.nn.model import Network

AROUND: NormNames = ("input_layernorm", "post_self_attn_layernorm", "post_attention_layernorm", "post_mlp_layernorm")


def _glm(c: Config, architecture: str | None, names: NormNames, *, fused: bool = False) -> Network:
    return dense_decoder(
        c,
        architecture,
        attention={"bias": c.flag("attention_bias"), "rotate": rotary_pairs_of_part, "fused": fused},
        mlp=lambda: FusedGatedMLP(c.integer("hidden_size"), c.integer("intermediate_size"), c.text("hidden_act")),
        block=partial(DecoderBlock, names=names),
        rotary=RotaryEmbedding(c.rotary_dim(c.head_dim(), 0.5)),
    )


def glm(c: Config, architecture: str | None) -> Network:
    """GLM-4-9B (2024)."""
    return _glm(c, architecture, PRE_NORM)


def glm4(c: Config, architecture: str | None) -> Network:
    """GLM-4-0414."""
    return _glm(c, architecture, AROUND)


def chatglm(c: Config, architecture: str | None) -> Network:
    """GLM-4-9B and ChatGLM as their own code writes the config, computed as Transformers' GLM does."""
    if c.has("inner_hidden_size") or c.flag("position_encoding_2d"):
        raise ConfigError(
            f"{c.where} is of the first ChatGLM (position_encoding_2d), whose blocks are not those of ChatGLM 2, 3 "
            "and GLM-4, which this family describes; `memcalc inspect` counts what its files hold."
        )
    bits = c.get("quantization_bit")
    if type(bits) is int and bits:
        raise ConfigError(
            f"{c.where} has 'quantization_bit' {bits}, by which the repository's own code packs its weights, in a way "
            "that memcalc does not know; take the model that it was made from, or set it to 0 for 16-bit weights."
        )
    usual = architecture is None or architecture in ("ChatGLMModel", "ChatGLMForConditionalGeneration")
    head = None if usual else architecture
    if not c.flag("multi_query_attention", True):  # the number of groups may be there all the same
        c = c.replaced(num_key_value_heads=c.integer("num_attention_heads"))
    return _glm(c, head, PRE_NORM, fused=True)


FAMILIES = table(
    Family(
        "glm",
        glm,
        llama_sizes((151552, 4096, 13696, 40, 32, 2, 131072), head_dim=128, attention_bias=True, pad_token_id=151329),
    ),
    Family(
        "glm4",
        glm4,
        llama_sizes((151552, 4096, 13696, 40, 32, 2, 131072), head_dim=128, attention_bias=True, pad_token_id=151329),
    ),
    Family(
        "chatglm",
        chatglm,
        llama_sizes((65024, 4096, 13696, 28, 32, 2, 2048), head_dim=128, attention_bias=True),
        {
            "padded_vocab_size": "vocab_size",
            "ffn_hidden_size": "intermediate_size",
            "num_layers": "num_hidden_layers",
            "multi_query_group_num": "num_key_value_heads",
            "kv_channels": "head_dim",
            "add_qkv_bias": "attention_bias",
            "seq_length": "max_position_embeddings",
        },
        verified="exact counts; tensors as Transformers' glm keeps them",
        attention_assumed=True,
    ),
)
