"""`memcalc estimate`: a model that exists only as a parameter count or as shape numbers."""

from typing import Annotated, Any

import typer

from memcalc.cli.job import Job
from memcalc.cli.job_command import with_job
from memcalc.cli.options import read_count
from memcalc.common.escaping import quoted
from memcalc.errors import UsageError, option_name
from memcalc.units import parse_parameters

_SHAPE = "Shape of a Llama-like decoder"


def _size(text: str, unset: str = "") -> Any:
    return typer.Option(help=text, metavar="N", show_default=unset or False, rich_help_panel=_SHAPE)


def _families(incomplete: str) -> list[str]:
    from memcalc.models.released_shapes import SHAPES

    return [name for name in SHAPES if name.startswith(incomplete)]


@with_job()
def command(
    count: Annotated[
        str | None,
        typer.Argument(metavar="COUNT", help="Parameters, such as 4B: the same as --params.", show_default=False),
    ] = None,
    *,
    job: Job,
    params: Annotated[
        str | None,
        typer.Option(
            "--params",
            "-p",
            metavar="COUNT",
            show_default=False,
            rich_help_panel="Model",
            help="Parameters, such as 4B, 350M or 8030261248; a shape for that count is chosen and stated.",
        ),
    ] = None,
    like: Annotated[
        str | None,
        typer.Option(
            "--like",
            metavar="FAMILY",
            show_default="as models of that size are today; for 4B, the documentation's example",
            rich_help_panel="Model",
            autocompletion=_families,
            help="Whose shape a count has: llama-2, llama-3, mistral, qwen2.5, qwen3, gemma-3, smollm2 or gpt-2.",
        ),
    ] = None,
    hidden_size: Annotated[str | None, _size("Width of the residual stream.")] = None,
    num_layers: Annotated[str | None, _size("Number of blocks.")] = None,
    num_heads: Annotated[str | None, _size("Attention heads.")] = None,
    num_kv_heads: Annotated[str | None, _size("Key-value heads (fewer than heads: grouped-query attention).")] = None,
    head_dim: Annotated[str | None, _size("Width of one head.", "hidden size over heads")] = None,
    intermediate_size: Annotated[str | None, _size("Width of the MLP.")] = None,
    vocab_size: Annotated[str | None, _size("Tokens in the vocabulary.")] = None,
    tie_embeddings: Annotated[
        bool | None,
        typer.Option(
            "--tie-embeddings/--no-tie-embeddings",
            show_default=False,
            rich_help_panel=_SHAPE,
            help="Whether the output head is the embedding matrix.",
        ),
    ] = None,
) -> None:
    """Estimate a decoder from a parameter count, from shape numbers, or from both."""
    if count is not None and params is not None:
        raise UsageError(f"{quoted(count)} and --params say the same: give one of them.")
    params = count if params is None else params
    sizes = {
        "hidden_size": hidden_size,
        "num_layers": num_layers,
        "num_heads": num_heads,
        "num_kv_heads": num_kv_heads,
        "head_dim": head_dim,
        "intermediate_size": intermediate_size,
        "vocab_size": vocab_size,
    }
    shape: dict[str, Any] = {
        name: read_count(option_name(name), text) for name, text in sizes.items() if text is not None
    }
    if params is None and not shape:
        raise UsageError("estimate needs a model: give --params, such as --params 4B, or shape numbers.")
    if tie_embeddings is not None:
        shape["tie_embeddings"] = tie_embeddings

    from memcalc.models.llama_shape import canonical_spec

    spec, assumptions = canonical_spec(None if params is None else parse_parameters(params), like=like, **shape)
    job.answer(spec, assumptions)
