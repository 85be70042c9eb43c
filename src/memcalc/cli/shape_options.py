"""The shape of a model that is a parameter count: options that say whose it is, or its numbers."""

from collections.abc import Mapping
from inspect import Parameter
from typing import Annotated, Any

import typer

from memcalc.cli.option_groups import Group
from memcalc.cli.options import read_count
from memcalc.errors import option_name

_SIZES = {
    "hidden_size": "Width of the residual stream.",
    "num_layers": "Number of blocks.",
    "num_heads": "Attention heads.",
    "num_kv_heads": "Key-value heads (fewer than heads: grouped-query attention).",
    "head_dim": "Width of one head.",
    "intermediate_size": "Width of the MLP.",
    "vocab_size": "Tokens in the vocabulary.",
}
SHAPE = ("like", *_SIZES, "tie_embeddings")
"""Names of the options, as `canonical_spec` has them."""

_HEADING = "Shape of a Llama-like decoder"


def shape_parameters() -> list[Parameter]:
    """The options as parameters of a command: None where they are not given."""
    like = typer.Option(
        "--like",
        metavar="FAMILY",
        show_default="as models of that size are today; for 4B, the documentation's example",
        rich_help_panel="Model",
        autocompletion=_families,
        help="Whose shape a count has: llama-2, llama-3, mistral, qwen2.5, qwen3, gemma-3, smollm2 or gpt-2.",
    )
    unset = {"head_dim": "hidden size over heads"}
    sizes = {
        name: typer.Option(
            option_name(name), help=text, metavar="N", show_default=unset.get(name, False), rich_help_panel=_HEADING
        )
        for name, text in _SIZES.items()
    }
    tied = typer.Option(
        "--tie-embeddings/--no-tie-embeddings",
        show_default=False,
        rich_help_panel=_HEADING,
        help="Whether the output head is the embedding matrix.",
    )
    kinds: dict[str, tuple[Any, Any]] = {"like": (str | None, like)}
    kinds |= {name: (str | None, size) for name, size in sizes.items()}
    kinds["tie_embeddings"] = (bool | None, tied)
    return [
        Parameter(name, Parameter.KEYWORD_ONLY, default=None, annotation=Annotated[kind, option])
        for name, (kind, option) in kinds.items()
    ]


def read_shape(given: Mapping[str, Any]) -> dict[str, Any]:
    """The options that were given, read, as arguments of `canonical_spec`. Raises UsageError."""
    return {
        name: read_count(option_name(name), value) if name in _SIZES else value
        for name in SHAPE
        if (value := given.get(name)) is not None
    }


SHAPE_OF_A_COUNT = Group("shape", shape_parameters, read_shape)
"""The options of a shape: those that were given."""


def _families(incomplete: str) -> list[str]:
    from memcalc.models.released_shapes import SHAPES

    return [name for name in SHAPES if name.startswith(incomplete)]
