"""Models whose own code is not part of Transformers, read as the Transformers family that they compute as."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from memcalc.config.reader import Config
from memcalc.errors import ConfigError
from memcalc.models.common.decoder import dense_decoder, gated_mlp
from memcalc.models.families.decoders.llama import llama, qwen2
from memcalc.models.family import Family, llama_sizes, table
from memcalc.nn.layers.decoder_blocks import DecoderBlock
from memcalc.nn.layers.mixture_of_experts import CountedTogether, MixtureOfExperts, swiglu
from memcalc.nn.layers.mlp import activation
from memcalc.nn.layers.routers import TopKRouter
from memcalc.nn.model import Network
from memcalc.nn.module import Module


def minicpm(c: Config, architecture: str | None) -> Network:
    """MiniCPM: Llama with numbers that multiply the embeddings and what is added to the residual stream.

    With `num_experts`, Mixtral's experts stand in place of the MLP.
    """
    return dense_decoder(
        c,
        architecture,
        mlp=_experts(c) if c.has("num_experts") else gated_mlp(c),
        block=partial(DecoderBlock, residual_multiplier=True),
        embedding_multiplier=True,
    )


def _experts(c: Config) -> Callable[[], Module]:
    hidden, width, count = c.integer("hidden_size"), c.integer("intermediate_size"), c.integer("num_experts")
    per_token, gate = c.within("num_experts_per_tok", "num_experts"), swiglu(activation(c.text("hidden_act")))

    def mixture() -> Module:
        experts = CountedTogether(hidden, width, count, per_token, gate)
        return MixtureOfExperts(TopKRouter(hidden, count, per_token), experts)

    return mixture


def baichuan(c: Config, architecture: str | None) -> Network:
    """Baichuan: Llama with one projection for query, key and value."""
    return dense_decoder(c, architecture, attention={"fused": True})


def qwen(c: Config, architecture: str | None) -> Network:
    """Qwen 1: `intermediate_size` counts gate and up together."""
    width = c.integer("intermediate_size")
    if width % 2:
        raise ConfigError(f"{c.where} gives 'intermediate_size' as {width}, which gate and up cannot halve.")
    head_dim, heads = c.integer("kv_channels", c.head_dim()), c.integer("num_attention_heads")
    whole = c.replaced(intermediate_size=width // 2, num_key_value_heads=heads, head_dim=head_dim)
    return dense_decoder(whole, architecture, attention={"bias": True, "fused": True})


def internlm(c: Config, architecture: str | None) -> Network:
    """InternLM 1 to 3: Llama, where one switch is for the biases of attention."""
    bias = c.flag("bias")
    return llama(c.replaced(attention_bias=bias or c.flag("qkv_bias"), mlp_bias=False), architecture)


def internlm2(c: Config, architecture: str | None) -> Network:
    """InternLM 2: Llama with one projection for query, key and value."""
    bias = c.flag("bias")
    return dense_decoder(c, architecture, attention={"bias": bias, "out_bias": bias, "fused": True})


_LLAMA = llama_sizes((32000, 4096, 11008, 32, 32, 0, 4096))
_AS_LLAMA = "exact counts; tensors as Transformers' llama keeps them"
_AS_QWEN2 = "exact counts; tensors as Transformers' qwen2 keeps them"
_own = partial(Family, attention_assumed=True)
FAMILIES = table(
    _own("baichuan", baichuan, {**_LLAMA, "vocab_size": 125696}, verified=_AS_LLAMA),
    _own("xverse", llama, {**_LLAMA, "vocab_size": 100278}, verified=_AS_LLAMA),
    _own("internlm", internlm, {**_LLAMA, "vocab_size": 103168, "bias": True}, verified=_AS_LLAMA),
    _own("internlm2", internlm2, {**_LLAMA, "vocab_size": 103168, "bias": True}, verified=_AS_LLAMA),
    _own("minicpm", minicpm, {**_LLAMA, "tie_word_embeddings": True}, verified=_AS_LLAMA),
    _own("mimo", qwen2, {**_LLAMA, "vocab_size": 151680}, verified=_AS_QWEN2),
    _own(
        "qwen",
        qwen,
        {**_LLAMA, "vocab_size": 151936, "intermediate_size": 22016, "max_position_embeddings": 32768},
        {"seq_length": "max_position_embeddings"},
        verified=_AS_QWEN2,
    ),
    Family(
        "exaone",
        llama,
        {**_LLAMA, "vocab_size": 102400, "intermediate_size": 14336, "num_key_value_heads": 8, "pad_token_id": 0},
        {"num_layers": "num_hidden_layers", "activation_function": "hidden_act"},
    ),
    Family(
        "internlm3",
        llama,
        {
            **_LLAMA,
            "vocab_size": 128512,
            "intermediate_size": 10240,
            "num_hidden_layers": 48,
            "num_key_value_heads": 2,
            "head_dim": 128,
            "max_position_embeddings": 32768,
            "pad_token_id": 2,
        },
        {"qkv_bias": "attention_bias", "bias": "mlp_bias"},
    ),
)
