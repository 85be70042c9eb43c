"""`memcalc families`: the table of model families."""

from typing import Annotated

from memcalc.cli.output import JSON, print_json_or_table
from memcalc.models.family import Family
from memcalc.models.registry import family, known
from memcalc.tables.lora_targets import LORA_TARGETS


def command(*, as_json: Annotated[bool, JSON] = False) -> None:
    """List the model families, by the model_type that config.json names, and what stands behind their numbers."""
    heads = ("model_type", "blocks", "attention", "supports", "LoRA targets by default", "verified by")
    rows = [_row(family(model_type)) for model_type in known()]
    keys = ("model_type", "blocks", "attention", "supports", "lora_targets", "verified")
    print_json_or_table(as_json, heads, rows, (), [dict(zip(keys, row, strict=True)) for row in rows])


def _row(row: Family) -> tuple[str, ...]:
    targets = ", ".join(LORA_TARGETS.get(row.model_type, ())) or "none: name them"
    return row.model_type, row.kinds or row.blocks, row.attention, row.supports, targets, row.verified
