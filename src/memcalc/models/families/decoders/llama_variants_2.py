"""More decoders that are Llama but for one or two things: Apertus, Ministral, CWM, Jais 2, BitNet, HyperCLOVA X."""

from __future__ import annotations

from functools import partial

from memcalc import ops
from memcalc.config.reader import Config
from memcalc.errors import ConfigError
from memcalc.models.common.decoder import dense_decoder, everywhere, gated_mlp, typed
from memcalc.models.registry import Family
from memcalc.nn.layers.decoder_blocks import PRE_NORM, DecoderBlock
from memcalc.nn.layers.grouped_query_attention import HeadNorm
from memcalc.nn.layers.mlp import GatedMLP, PlainMLP
from memcalc.nn.layers.norms import LayerNorm, RMSNorm
from memcalc.nn.layers.rotary import scaled_by_position
from memcalc.nn.model import Network


def apertus(c: Config, architecture: str | None) -> Network:
    """Apertus: xIELU without gate, norms on query and key."""
    bias, hidden, width = c.flag("attention_bias"), c.integer("hidden_size"), c.integer("intermediate_size")
    norm = HeadNorm(lambda _heads, dim: RMSNorm(dim), "transposed")
    return dense_decoder(
        c,
        architecture,
        attention={"bias": bias, "out_bias": bias, "head_norm": norm},
        mlp=lambda: PlainMLP(hidden, width, c.text("hidden_act")),
        block=partial(DecoderBlock, names=("attention_layernorm", None, "feedforward_layernorm", None)),
    )


def ministral(c: Config, architecture: str | None) -> Network:
    """Ministral 8B: the sliding window by layer."""
    windows = typed(c, [c.has("sliding_window")] * c.integer("num_hidden_layers"), c.optional("sliding_window"))
    return dense_decoder(c, architecture, windows=windows, masks=[None, *everywhere(c)])


def ministral3(c: Config, architecture: str | None) -> Network:
    """Ministral 3 (text): queries grow with the position."""
    for section in ("rope_parameters", "rope_scaling"):
        if c.section(section) and c.section(section).get("llama_4_scaling_beta") is None:
            raise ConfigError(f"{c.where} has no 'llama_4_scaling_beta' in {section!r}, which ministral3 needs.")
    return dense_decoder(c, architecture, windows=everywhere(c), attention={"bend_query": scaled_by_position})


def cwm(c: Config, architecture: str | None) -> Network:
    """Code World Model: every fourth layer, the first among them, attends to everything."""
    window = c.optional("sliding_window")
    windows = typed(c, [layer % 4 != 0 for layer in range(c.integer("num_hidden_layers"))], window)
    return dense_decoder(
        c, architecture, windows=windows, masks=[None, window], mlp=gated_mlp(c, bias=c.flag("mlp_bias"))
    )


def jais2(c: Config, architecture: str | None) -> Network:
    """Jais 2: LayerNorm, squared ReLU without gate, biases."""
    bias, hidden, width = c.flag("attention_bias"), c.integer("hidden_size"), c.integer("intermediate_size")
    return dense_decoder(
        c,
        architecture,
        attention={"bias": bias, "out_bias": bias},
        mlp=lambda: PlainMLP(hidden, width, c.text("hidden_act"), bias=c.flag("mlp_bias")),
        norm=LayerNorm,
    )


def bitnet(c: Config, architecture: str | None) -> Network:
    """BitNet b1.58 in full precision: norms also inside attention and MLP."""
    bias, hidden, width = c.flag("attention_bias"), c.integer("hidden_size"), c.integer("intermediate_size")
    return dense_decoder(
        c,
        architecture,
        attention={"bias": bias, "out_bias": bias, "out_norm": partial(RMSNorm, hidden)},
        mlp=lambda: GatedMLP(hidden, width, c.text("hidden_act"), inner_norm=RMSNorm(width)),
    )


def hyperclovax(c: Config, architecture: str | None) -> Network:
    """HyperCLOVA X SEED: Granite's numbers, and norms behind the sublayers too."""
    bias = c.flag("attention_bias")
    around = ("input_layernorm", "post_norm1", "post_attention_layernorm", "post_norm2")
    return dense_decoder(
        c,
        architecture,
        attention={"bias": bias, "out_bias": bias},
        mlp=gated_mlp(c, bias=c.flag("mlp_bias")),
        block=partial(DecoderBlock, names=around if c.flag("use_post_norm", True) else PRE_NORM, scaled=True),
        scaled=True,
        bend=(ops.mul_scalar,),
    )


_ROWS = "measured rows, exact counts"
FAMILIES = {
    "ministral": Family(
        "ministral",
        ministral,
        {
            "vocab_size": 32000,
            "hidden_size": 4096,
            "intermediate_size": 14336,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "hidden_act": "silu",
            "max_position_embeddings": 131072,
            "sliding_window": 4096,
            "tie_word_embeddings": False,
        },
        verified=_ROWS,
    ),
    "cwm": Family(
        "cwm",
        cwm,
        {
            "vocab_size": 128256,
            "hidden_size": 6144,
            "intermediate_size": 21504,
            "num_hidden_layers": 64,
            "num_attention_heads": 48,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "hidden_act": "silu",
            "max_position_embeddings": 131072,
            "sliding_window": 8192,
            "tie_word_embeddings": False,
        },
        verified="measured rows",
    ),
    "jais2": Family(
        "jais2",
        jais2,
        {
            "vocab_size": 150272,
            "hidden_size": 3328,
            "intermediate_size": 26624,
            "num_hidden_layers": 32,
            "num_attention_heads": 26,
            "hidden_act": "relu2",
            "max_position_embeddings": 8192,
            "attention_bias": True,
            "mlp_bias": True,
            "tie_word_embeddings": False,
        },
        verified="measured rows",
    ),
    "bitnet": Family(
        "bitnet",
        bitnet,
        {
            "vocab_size": 128256,
            "hidden_size": 2560,
            "intermediate_size": 6912,
            "num_hidden_layers": 30,
            "num_attention_heads": 20,
            "num_key_value_heads": 5,
            "hidden_act": "relu2",
            "max_position_embeddings": 2048,
            "tie_word_embeddings": False,
        },
        verified=_ROWS,
    ),
    "hyperclovax": Family(
        "hyperclovax",
        hyperclovax,
        {
            "vocab_size": 32000,
            "hidden_size": 4096,
            "intermediate_size": 11008,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "hidden_act": "silu",
            "max_position_embeddings": 2048,
            "use_post_norm": True,
            "tie_word_embeddings": False,
        },
        verified="measured rows",
    ),
    "apertus": Family(
        "apertus",
        apertus,
        {
            "vocab_size": 131072,
            "hidden_size": 4096,
            "intermediate_size": 14336,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "hidden_act": "xielu",
            "max_position_embeddings": 65536,
            "pad_token_id": 3,
            "tie_word_embeddings": False,
        },
        verified=_ROWS,
    ),
    "ministral3": Family(
        "ministral3",
        ministral3,
        {
            "vocab_size": 131072,
            "hidden_size": 4096,
            "intermediate_size": 14336,
            "num_hidden_layers": 34,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "hidden_act": "silu",
            "max_position_embeddings": 262144,
            "pad_token_id": 11,
            "tie_word_embeddings": False,
        },
        verified="measured rows",
    ),
}
