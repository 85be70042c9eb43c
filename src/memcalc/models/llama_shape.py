"""A Llama-like decoder from a parameter count, from shape numbers, or from both.

A bare count means a model as they are today (`released_shapes.py`). The first Llama's layers are taken where shape
numbers are given, for counts below any model of today, and for the 4B of the Hugging Face page whose box memcalc
reproduces. Width follows the table, as Llama 1 and 2 and their neighbours chose it; heads are 128 wide; the MLP is 8/3
of the hidden size, rounded up to a multiple of 256; the vocabulary has 32,000 entries and a head of its own. The number
of blocks is the one that comes nearest to the count. The exact count of the shape is stated with it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypedDict

from memcalc.common.arguments import check_type
from memcalc.common.assumption import Assumption
from memcalc.config.reader import DEEPEST
from memcalc.errors import UsageError, option_name
from memcalc.models.released_shapes import spec_like
from memcalc.models.spec import ModelSpec
from memcalc.units import counted

_WIDTHS: tuple[tuple[int, int], ...] = (
    (20_000_000, 256),
    (60_000_000, 512),
    (200_000_000, 768),
    (700_000_000, 1024),
    (2_200_000_000, 2048),
    (3_300_000_000, 2560),
    (5_000_000_000, 3072),
    (10_000_000_000, 4096),
    (20_000_000_000, 5120),
    (45_000_000_000, 6656),
    (110_000_000_000, 8192),
    (250_000_000_000, 12288),
    (10**15, 16384),
)
"""(parameters up to, hidden size)."""

VOCABULARY = 32_000
HEAD_DIM = 128
WIDEST = 10**8
"""No size of a shape is larger: what follows from it has to stay within what a config may say."""
SMALLEST_TODAY = 60_000_000
"""Below this count the vocabulary of a model of today is half of it."""
SMALLEST = 10_000_000
"""Below this count the vocabulary alone is larger than the model; such a shape has to be given."""


PAGE_EXAMPLE = 4_000_000_000
"""The count of the documentation page's example, which keeps the shape that was measured for it."""


class Shape(TypedDict, total=False):
    """Numbers of a shape, as `canonical_spec` takes them."""

    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    tie_embeddings: bool


def canonical_spec(
    parameters: int | None,
    *,
    like: str | None = None,
    hidden_size: int | None = None,
    num_layers: int | None = None,
    num_heads: int | None = None,
    num_kv_heads: int | None = None,
    head_dim: int | None = None,
    intermediate_size: int | None = None,
    vocab_size: int | None = None,
    tie_embeddings: bool | None = None,
) -> tuple[ModelSpec, list[Assumption]]:
    """The spec of a model of about `parameters` parameters, and the assumptions that it rests on.

    Every number of the shape can be given instead.

    Args:
        parameters: how many, of all weights.
        like: a key of `released_shapes.SHAPES`, whose shape a bare count has; None: as models of that size are today.
        hidden_size: width of the residual stream.
        num_layers: blocks.
        num_heads: attention heads.
        num_kv_heads: heads of keys and values.
        head_dim: width of a head.
        intermediate_size: width of the MLP.
        vocab_size: tokens in the vocabulary.
        tie_embeddings: whether the head is the embedding matrix.

    Raises:
        UsageError: neither a count nor enough of a shape is given, or no shape has that count.
    """
    if parameters is not None:
        check_type("--params", parameters, int, "a whole number")
    sizes = {
        "hidden_size": hidden_size,
        "num_layers": num_layers,
        "num_heads": num_heads,
        "num_kv_heads": num_kv_heads,
        "head_dim": head_dim,
        "intermediate_size": intermediate_size,
        "vocab_size": vocab_size,
    }
    _check(sizes)
    given = {name for name, value in {**sizes, "tie_embeddings": tie_embeddings}.items() if value is not None}
    if like is not None and given:
        numbers = " and ".join(option_name(name) for name in (*sizes, "tie_embeddings") if name in given)
        raise UsageError(f"--like gives the whole shape of a model, {numbers} too: leave out --like, or {numbers}.")
    if like is not None and parameters is None:
        raise UsageError("--like gives the shape of a model with so many parameters: give --params too.")
    if parameters is not None and (like is not None or not (given or _is_older(parameters))):
        return spec_like(parameters, like)
    if parameters is None and (hidden_size is None or num_layers is None):
        raise UsageError("no size is given; name one with --params 4B, or a shape with --hidden-size and --num-layers.")
    if parameters is not None and parameters < SMALLEST and hidden_size is None:
        raise UsageError(
            f"{parameters:,} parameters are too few to guess a shape; give it with --hidden-size, --num-layers and "
            f"--vocab-size."
        )
    hidden = hidden_size or next(width for limit, width in _WIDTHS if parameters is None or parameters <= limit)
    vocab = vocab_size or VOCABULARY
    heads = num_heads or max(1, hidden // (head_dim or HEAD_DIM))
    dim = head_dim or (hidden // heads if hidden % heads == 0 else 0)
    if not dim:
        raise UsageError(f"--hidden-size {hidden} is not a multiple of {heads} heads; give a divisor, or --head-dim.")
    kv_heads = num_kv_heads or heads
    if heads % kv_heads:
        raise UsageError(f"--num-kv-heads {kv_heads} does not divide the {heads} attention heads; give one that does.")
    width = intermediate_size or -(-(8 * hidden) // (3 * 256)) * 256
    tied = bool(tie_embeddings)
    per_block = hidden * dim * (2 * heads + 2 * kv_heads) + 3 * hidden * width + 2 * hidden
    outside = vocab * hidden * (1 if tied else 2) + hidden
    depth = num_layers or max(1, round(((parameters or 0) - outside) / per_block))
    if depth > DEEPEST:
        raise UsageError(
            f"{parameters:,} parameters would take {depth:,} blocks of hidden size {hidden}, and no model has so many; "
            "give a larger --hidden-size."
        )
    config = {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": vocab,
        "hidden_size": hidden,
        "intermediate_size": width,
        "num_hidden_layers": depth,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": dim,
        "max_position_embeddings": 10**9,
        "tie_word_embeddings": tied,
    }
    exact = outside + depth * per_block
    if parameters is not None and not parameters <= 2 * exact <= 4 * parameters:
        raise UsageError(
            f"--params asks for {parameters:,} parameters, but a model of this shape has {exact:,}; leave out "
            "--params, or give less of the shape."
        )
    lines = [
        Assumption(
            "model_shape",
            f"shape: Llama-like, hidden size {hidden}, {counted(depth, 'block')}, {counted(heads, 'head')} ({kv_heads} "
            f"key-value) of {dim}, "
            f"MLP {width}, vocabulary {vocab}{', tied' if tied else ''}: {exact:,} parameters",
        )
    ]
    return ModelSpec.from_config(config, "Llama-like"), lines


def _is_older(parameters: int) -> bool:
    """Whether a bare count has the first Llama's layers."""
    return parameters == PAGE_EXAMPLE or parameters < SMALLEST_TODAY


def _check(sizes: Mapping[str, int | None]) -> None:
    """Raise UsageError for a size that no model has; the message names its option."""
    for name, value in sizes.items():
        if value is not None:
            check_type(option_name(name), value, int, "a whole number")
        most = DEEPEST if name == "num_layers" else WIDEST
        if value is not None and not 1 <= value <= most:
            raise UsageError(f"{option_name(name)} must lie between 1 and {most}, not {value}.")
