"""Decoders that are Llama but for one or two things: a row each, and a function where a row cannot say it."""

from __future__ import annotations

from functools import partial

from memcalc.config.reader import Config
from memcalc.errors import ConfigError
from memcalc.models.common.decoder import (
    SOFT_CAP,
    dense_decoder,
    gated_mlp,
    llama_like,
    same_window,
    windows_by_layer_type,
    windows_from,
)
from memcalc.models.family import Family, llama_sizes, table
from memcalc.nn.layers.decoder_blocks import POST_NORM, PRE_NORM, DecoderBlock
from memcalc.nn.layers.grouped_query_attention import QKNorm
from memcalc.nn.layers.mlp import GatedMLP
from memcalc.nn.layers.norms import LayerNorm, PlainRMSNorm, RMSNorm
from memcalc.nn.layers.rotary import RotaryEmbedding, scaled_by_position
from memcalc.nn.layers.rotary_interleaved import rotary_pairs, rotary_pairs_upcast
from memcalc.nn.model import Network

AFTER_TRANSPOSE = QKNorm(lambda _heads, dim: RMSNorm(dim), "after_transpose")
HUNYUAN_NORM = QKNorm(lambda _heads, dim: RMSNorm(dim), "after_rotary", ("query_layernorm", "key_layernorm"))
WEIGHTLESS_NORM = QKNorm(lambda _heads, _dim: PlainRMSNorm(), "after_rotary")
FEED_FORWARD = ("attention_layernorm", None, "feedforward_layernorm", None)


def smollm3(c: Config, architecture: str | None) -> Network:
    """SmolLM 3: every fourth layer without rotary embedding, and with the sliding window where that is switched on."""
    depth, every = c.integer("num_hidden_layers"), c.integer("no_rope_layer_interval")
    given = c.items("no_rope_layers") or [int((i + 1) % every != 0) for i in range(depth)]
    if len(given) != depth:
        raise ConfigError(f"{c.where} has {len(given)} 'no_rope_layers' for 'num_hidden_layers' {depth}; correct one.")
    rope_layers = [bool(item) for item in given]
    window = c.optional("sliding_window") if c.flag("use_sliding_window") else None
    windows = windows_from(c, [window is not None and not rope for rope in rope_layers], window)
    masks = [None, *windows]
    return llama_like(c, architecture, mlp_bias="mlp_bias", windows=windows, masks=masks, rope_layers=rope_layers)


def helium(c: Config, architecture: str | None) -> Network:
    """Helium: rotation by pairs, norms whose weight multiplies in fp32."""
    heads, _, head_dim = c.heads()
    if heads * head_dim != c.integer("hidden_size"):
        raise ConfigError(
            f"{c.where} has 'num_attention_heads' {heads} times 'head_dim' {head_dim}, which helium wants to be "
            f"'hidden_size' {c.integer('hidden_size')}; correct one."
        )
    norm = partial(RMSNorm, scale_in="fp32")
    return llama_like(
        c, architecture, out_bias=False, mlp_bias="mlp_bias", norm=norm, attention={"rotate": rotary_pairs}
    )


def pattern_length(c: Config) -> int:
    """`sliding_window_pattern`: a number, or as many letters ("LLLG"); not looked at where `layer_types` is given."""
    pattern = c.get("sliding_window_pattern")
    return max(len(pattern), 1) if isinstance(pattern, str) else c.integer("sliding_window_pattern")


def exaone4(c: Config, architecture: str | None) -> Network:
    """EXAONE 4: norms after the sublayers and on query and key; with a window, only its layers are rotated."""
    slides = c.has("sliding_window")
    windows = windows_by_layer_type(c, pattern_length(c) if slides else 1)
    return dense_decoder(
        c,
        architecture,
        windows=windows,
        masks=[None, *windows],
        rope_layers=[window is not None or not slides for window in windows],
        attention={"qk_norm": AFTER_TRANSPOSE},
        block=partial(DecoderBlock, names=POST_NORM),
    )


def ernie4_5(c: Config, architecture: str | None) -> Network:
    """ERNIE 4.5 (dense): rotation by pairs in fp32, one switch for all biases."""
    attention = {"rotate": rotary_pairs_upcast, "dropout": 0.0}
    rotary = RotaryEmbedding(c.head_dim(), fp32=True)
    return llama_like(c, architecture, bias="use_bias", mlp_bias="use_bias", attention=attention, rotary=rotary)


def nanochat(c: Config, architecture: str | None) -> Network:
    """nanochat: norms without weights everywhere, also on the embeddings and after the rotation; capped logits."""
    return llama_like(
        c,
        architecture,
        gated=False,
        mlp_names=("fc1", "fc2"),
        attention={"qk_norm": WEIGHTLESS_NORM},
        norm=lambda _width: PlainRMSNorm(),
        norm_embeddings=True,
        logit_transforms=SOFT_CAP if c.has("final_logit_softcapping") else (),
    )


def ministral(c: Config, architecture: str | None) -> Network:
    """Ministral 8B: the sliding window by layer."""
    windows = windows_from(c, [c.has("sliding_window")] * c.integer("num_hidden_layers"), c.optional("sliding_window"))
    return dense_decoder(c, architecture, windows=windows, masks=[None, *same_window(c)])


def ministral3(c: Config, architecture: str | None) -> Network:
    """Ministral 3 (text): queries grow with the position."""
    for section in ("rope_parameters", "rope_scaling"):
        if c.section(section) and c.section(section).get("llama_4_scaling_beta") is None:
            raise ConfigError(f"{c.where} has no 'llama_4_scaling_beta' in {section!r}, which ministral3 needs.")
    return dense_decoder(c, architecture, windows=same_window(c), attention={"query_scaling": scaled_by_position})


def cwm(c: Config, architecture: str | None) -> Network:
    """Code World Model: every fourth layer, the first among them, attends to everything."""
    window = c.optional("sliding_window")
    windows = windows_from(c, [layer % 4 != 0 for layer in range(c.integer("num_hidden_layers"))], window)
    return dense_decoder(
        c, architecture, windows=windows, masks=[None, window], mlp=gated_mlp(c, bias=c.flag("mlp_bias"))
    )


def bitnet(c: Config, architecture: str | None) -> Network:
    """BitNet b1.58 in full precision: norms also inside attention and MLP."""
    hidden, width, act = c.integer("hidden_size"), c.integer("intermediate_size"), c.text("hidden_act")
    return llama_like(
        c,
        architecture,
        attention={"out_norm": partial(RMSNorm, hidden)},
        mlp=lambda: GatedMLP(hidden, width, act, inner_norm=RMSNorm(width)),
    )


def hyperclovax(c: Config, architecture: str | None) -> Network:
    """HyperCLOVA X SEED: Granite's numbers, and norms after the sublayers too."""
    around = ("input_layernorm", "post_norm1", "post_attention_layernorm", "post_norm2")
    norms = around if c.flag("use_post_norm", True) else PRE_NORM
    return llama_like(c, architecture, mlp_bias="mlp_bias", norms=norms, multipliers=True)


FAMILIES = table(
    # sizes: vocab, hidden, MLP, layers, heads, KV heads (0: as many as heads), positions
    Family(
        "granite",
        partial(llama_like, mlp_bias="mlp_bias", multipliers=True),
        llama_sizes((32000, 4096, 11008, 32, 32, 0, 2048)),
    ),
    Family(
        "smollm3",
        smollm3,
        llama_sizes(
            (128256, 2048, 11008, 36, 16, 4, 32768),
            no_rope_layer_interval=4,
            pad_token_id=128004,
            tie_word_embeddings=True,
        ),
    ),
    Family("helium", helium, llama_sizes((48000, 2560, 7040, 24, 20, 20, 4096), head_dim=128, pad_token_id=3)),
    Family(
        "exaone4",
        exaone4,
        llama_sizes((102400, 4096, 16384, 32, 32, 32, 2048), sliding_window=4096, sliding_window_pattern=4),
    ),
    Family(
        "ernie4_5",
        ernie4_5,
        llama_sizes((103424, 1024, 3072, 18, 16, 2, 131072), head_dim=128, pad_token_id=0, tie_word_embeddings=True),
    ),
    Family(
        "seed_oss",
        partial(llama_like, out_bias="attention_out_bias", mlp_bias="mlp_bias", dropout="residual_dropout"),
        llama_sizes(
            (155136, 4096, 27648, 64, 80, 8, 524288),
            head_dim=128,
            attention_bias=True,
            attention_dropout=0.1,
            residual_dropout=0.1,
            pad_token_id=1,
        ),
    ),
    Family(
        "hunyuan_v1_dense",
        partial(llama_like, attention={"qk_norm": HUNYUAN_NORM}),
        llama_sizes((290943, 4096, 11008, 32, 32, 0, 2048), pad_token_id=0),
    ),
    Family(
        "arcee",
        partial(llama_like, gated=False, mlp_bias="mlp_bias"),
        llama_sizes((32000, 2560, 18432, 32, 32, 0, 4096), hidden_act="relu2"),
    ),
    Family(
        "nanochat",
        nanochat,
        llama_sizes(
            (50304, 768, 8192, 12, 6, 0, 2048), hidden_act="relu2", final_logit_softcapping=15.0, pad_token_id=1
        ),
    ),
    Family("ministral", ministral, llama_sizes((32000, 4096, 14336, 32, 32, 8, 131072), sliding_window=4096)),
    Family(
        "cwm",
        cwm,
        llama_sizes((128256, 6144, 21504, 64, 48, 8, 131072), head_dim=128, sliding_window=8192),
        verified="measured rows",
    ),
    Family(
        "jais2",
        partial(llama_like, gated=False, mlp_bias="mlp_bias", norm=LayerNorm),
        llama_sizes((150272, 3328, 26624, 32, 26, 0, 8192), hidden_act="relu2", attention_bias=True, mlp_bias=True),
        verified="measured rows",
    ),
    Family(
        "iquestcoder",
        partial(llama_like, mlp_bias="mlp_bias"),
        llama_sizes((76800, 5120, 27648, 80, 40, 8, 131072), head_dim=128),
    ),
    Family("bitnet", bitnet, llama_sizes((128256, 2560, 6912, 30, 20, 5, 2048), hidden_act="relu2")),
    Family(
        "hyperclovax",
        hyperclovax,
        llama_sizes((32000, 4096, 11008, 32, 32, 0, 2048), use_post_norm=True),
        verified="measured rows",
    ),
    Family(
        "apertus",
        partial(llama_like, gated=False, norms=FEED_FORWARD, attention={"qk_norm": AFTER_TRANSPOSE}),
        llama_sizes((131072, 4096, 14336, 32, 32, 0, 65536), hidden_act="xielu", pad_token_id=3),
    ),
    Family(
        "ministral3",
        ministral3,
        llama_sizes((131072, 4096, 14336, 34, 32, 8, 262144), head_dim=128, pad_token_id=11),
        verified="measured rows",
    ),
)
