"""Decoders that are Llama but for one or two things."""

from __future__ import annotations

from functools import partial

from memcalc import ops
from memcalc.config.reader import Config
from memcalc.errors import ConfigError
from memcalc.models.common.decoder import SOFT_CAP, by_type, dense_decoder, gated_mlp, typed
from memcalc.models.registry import Family
from memcalc.nn.layers.decoder_blocks import POST_NORM, DecoderBlock
from memcalc.nn.layers.grouped_query_attention import HeadNorm
from memcalc.nn.layers.mlp import PlainMLP
from memcalc.nn.layers.norms import PlainRMSNorm, RMSNorm
from memcalc.nn.layers.rotary import RotaryEmbedding
from memcalc.nn.layers.rotary_interleaved import rotary_pairs, rotary_pairs_upcast
from memcalc.nn.model import Network


def granite(c: Config, architecture: str | None) -> Network:
    """Granite 3: numbers multiply the embeddings, what is added to the residual stream, and the logits."""
    bias = c.flag("attention_bias")
    return dense_decoder(
        c,
        architecture,
        attention={"bias": bias, "out_bias": bias},
        mlp=gated_mlp(c, bias=c.flag("mlp_bias")),
        block=partial(DecoderBlock, scaled=True),
        scaled=True,
        bend=(ops.mul_scalar,),
    )


def smollm3(c: Config, architecture: str | None) -> Network:
    """SmolLM 3: every fourth layer without rotary embedding, and with the sliding window where that is switched on."""
    bias, depth = c.flag("attention_bias"), c.integer("num_hidden_layers")
    every = c.integer("no_rope_layer_interval")
    given = c.items("no_rope_layers") or [int((i + 1) % every != 0) for i in range(depth)]
    if len(given) != depth:
        raise ConfigError(f"{c.where} has {len(given)} 'no_rope_layers' for 'num_hidden_layers' {depth}; correct one.")
    turned = [bool(item) for item in given]
    window = c.optional("sliding_window") if c.flag("use_sliding_window") else None
    windows = typed(c, [window is not None and not rope for rope in turned], window)
    return dense_decoder(
        c,
        architecture,
        windows=windows,
        masks=[None, *windows],
        turned=turned,
        attention={"bias": bias, "out_bias": bias},
        mlp=gated_mlp(c, bias=c.flag("mlp_bias")),
    )


def helium(c: Config, architecture: str | None) -> Network:
    """Helium: rotation by pairs, norms whose weight multiplies in fp32."""
    heads, _, head_dim = c.heads()
    if heads * head_dim != c.integer("hidden_size"):
        raise ConfigError(
            f"{c.where} has 'num_attention_heads' {heads} times 'head_dim' {head_dim}, which helium wants to be "
            f"'hidden_size' {c.integer('hidden_size')}; correct one."
        )
    return dense_decoder(
        c,
        architecture,
        attention={"bias": c.flag("attention_bias"), "rotate": rotary_pairs},
        mlp=gated_mlp(c, bias=c.flag("mlp_bias")),
        norm=partial(RMSNorm, scale_in="fp32"),
    )


def pattern_length(c: Config) -> int:
    """`sliding_window_pattern`: a number, or as many letters ("LLLG"); not looked at where `layer_types` is given."""
    pattern = c.get("sliding_window_pattern")
    return max(len(pattern), 1) if isinstance(pattern, str) else c.integer("sliding_window_pattern")


def exaone4(c: Config, architecture: str | None) -> Network:
    """EXAONE 4: norms behind the sublayers and on query and key; with a window, only its layers are rotated."""
    slides = c.has("sliding_window")
    windows = by_type(c, pattern_length(c) if slides else 1)
    return dense_decoder(
        c,
        architecture,
        windows=windows,
        masks=[None, *windows],
        turned=[window is not None or not slides for window in windows],
        attention={"head_norm": HeadNorm(lambda _heads, dim: RMSNorm(dim), "transposed")},
        block=partial(DecoderBlock, names=POST_NORM),
    )


def ernie4_5(c: Config, architecture: str | None) -> Network:
    """ERNIE 4.5 (dense): rotation by pairs in fp32, one switch for all biases."""
    bias = c.flag("use_bias")
    return dense_decoder(
        c,
        architecture,
        attention={"bias": bias, "out_bias": bias, "rotate": rotary_pairs_upcast, "dropout": 0.0},
        mlp=gated_mlp(c, bias=bias),
        rotary=RotaryEmbedding(c.head_dim(), fp32=True),
    )


def seed_oss(c: Config, architecture: str | None) -> Network:
    """Seed-OSS: dropout behind attention and MLP."""
    dropout = c.probability("residual_dropout")
    return dense_decoder(
        c,
        architecture,
        attention={"bias": c.flag("attention_bias"), "out_bias": c.flag("attention_out_bias"), "out_dropout": dropout},
        mlp=gated_mlp(c, bias=c.flag("mlp_bias"), dropout=dropout),
    )


def hunyuan_v1_dense(c: Config, architecture: str | None) -> Network:
    """Hunyuan (dense): norms on query and key behind the rotation."""
    bias = c.flag("attention_bias")
    norm = HeadNorm(lambda _heads, dim: RMSNorm(dim), "rotated", ("query_layernorm", "key_layernorm"))
    return dense_decoder(c, architecture, attention={"bias": bias, "out_bias": bias, "head_norm": norm})


def arcee(c: Config, architecture: str | None) -> Network:
    """Arcee's AFM: squared ReLU without gate."""
    bias, hidden, width = c.flag("attention_bias"), c.integer("hidden_size"), c.integer("intermediate_size")
    return dense_decoder(
        c,
        architecture,
        attention={"bias": bias, "out_bias": bias},
        mlp=lambda: PlainMLP(hidden, width, c.text("hidden_act"), bias=c.flag("mlp_bias")),
    )


def nanochat(c: Config, architecture: str | None) -> Network:
    """nanochat: norms without weights everywhere, also on the embeddings and behind the rotation; capped logits."""
    bias, hidden, width = c.flag("attention_bias"), c.integer("hidden_size"), c.integer("intermediate_size")
    norm = HeadNorm(lambda _heads, _dim: PlainRMSNorm(), "rotated")
    return dense_decoder(
        c,
        architecture,
        attention={"bias": bias, "out_bias": bias, "head_norm": norm},
        mlp=lambda: PlainMLP(hidden, width, c.text("hidden_act"), names=("fc1", "fc2")),
        norm=lambda _width: PlainRMSNorm(),
        norm_first=True,
        bend=SOFT_CAP if c.has("final_logit_softcapping") else (),
    )


_ROWS = "measured rows, exact counts"
FAMILIES = {
    "granite": Family(
        "granite",
        granite,
        {
            "vocab_size": 32000,
            "hidden_size": 4096,
            "intermediate_size": 11008,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "hidden_act": "silu",
            "max_position_embeddings": 2048,
            "tie_word_embeddings": False,
        },
        verified=_ROWS,
    ),
    "smollm3": Family(
        "smollm3",
        smollm3,
        {
            "vocab_size": 128256,
            "hidden_size": 2048,
            "intermediate_size": 11008,
            "num_hidden_layers": 36,
            "num_attention_heads": 16,
            "num_key_value_heads": 4,
            "hidden_act": "silu",
            "max_position_embeddings": 32768,
            "no_rope_layer_interval": 4,
            "pad_token_id": 128004,
            "tie_word_embeddings": True,
        },
        verified=_ROWS,
    ),
    "helium": Family(
        "helium",
        helium,
        {
            "vocab_size": 48000,
            "hidden_size": 2560,
            "intermediate_size": 7040,
            "num_hidden_layers": 24,
            "num_attention_heads": 20,
            "num_key_value_heads": 20,
            "head_dim": 128,
            "hidden_act": "silu",
            "max_position_embeddings": 4096,
            "pad_token_id": 3,
            "tie_word_embeddings": False,
        },
        verified=_ROWS,
    ),
    "exaone4": Family(
        "exaone4",
        exaone4,
        {
            "vocab_size": 102400,
            "hidden_size": 4096,
            "intermediate_size": 16384,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "num_key_value_heads": 32,
            "hidden_act": "silu",
            "max_position_embeddings": 2048,
            "sliding_window": 4096,
            "sliding_window_pattern": 4,
            "tie_word_embeddings": False,
        },
        verified=_ROWS,
    ),
    "ernie4_5": Family(
        "ernie4_5",
        ernie4_5,
        {
            "vocab_size": 103424,
            "hidden_size": 1024,
            "intermediate_size": 3072,
            "num_hidden_layers": 18,
            "num_attention_heads": 16,
            "num_key_value_heads": 2,
            "head_dim": 128,
            "hidden_act": "silu",
            "max_position_embeddings": 131072,
            "pad_token_id": 0,
            "tie_word_embeddings": True,
        },
        verified=_ROWS,
    ),
    "seed_oss": Family(
        "seed_oss",
        seed_oss,
        {
            "vocab_size": 155136,
            "hidden_size": 4096,
            "intermediate_size": 27648,
            "num_hidden_layers": 64,
            "num_attention_heads": 80,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "hidden_act": "silu",
            "attention_bias": True,
            "attention_out_bias": False,
            "attention_dropout": 0.1,
            "residual_dropout": 0.1,
            "max_position_embeddings": 524288,
            "pad_token_id": 1,
            "tie_word_embeddings": False,
        },
        verified=_ROWS,
    ),
    "hunyuan_v1_dense": Family(
        "hunyuan_v1_dense",
        hunyuan_v1_dense,
        {
            "vocab_size": 290943,
            "hidden_size": 4096,
            "intermediate_size": 11008,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "hidden_act": "silu",
            "max_position_embeddings": 2048,
            "pad_token_id": 0,
            "tie_word_embeddings": False,
        },
        verified=_ROWS,
    ),
    "arcee": Family(
        "arcee",
        arcee,
        {
            "vocab_size": 32000,
            "hidden_size": 2560,
            "intermediate_size": 18432,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "hidden_act": "relu2",
            "max_position_embeddings": 4096,
            "tie_word_embeddings": False,
        },
        verified=_ROWS,
    ),
    "nanochat": Family(
        "nanochat",
        nanochat,
        {
            "vocab_size": 50304,
            "hidden_size": 768,
            "intermediate_size": 8192,
            "num_hidden_layers": 12,
            "num_attention_heads": 6,
            "hidden_act": "relu2",
            "max_position_embeddings": 2048,
            "final_logit_softcapping": 15.0,
            "pad_token_id": 1,
            "tie_word_embeddings": False,
        },
        verified=_ROWS,
    ),
}
