"""`memcalc families`: the table of model families."""

from typing import Annotated

from memcalc.cli.output import JSON, print_json, print_table
from memcalc.models.family import Family
from memcalc.models.registry import families, family
from memcalc.tables.lora_targets import LORA_TARGETS


def command(json: Annotated[bool, JSON] = False) -> None:
    """List the model families, by the model_type that config.json names, and what stands behind their numbers."""
    if json:
        print_json([_object(family(model_type)) for model_type in families()])
        return
    heads = ("model_type", "blocks", "attention", "supports", "LoRA targets by default", "verified by")
    print_table(heads, [_row(family(model_type)) for model_type in families()])


def _object(row: Family) -> dict[str, object]:
    names = ("model_type", "blocks", "attention", "supports", "lora_targets", "verified_by")
    return dict(zip(names, (*_row(row)[:4], list(LORA_TARGETS.get(row.model_type, ())), row.verified), strict=True))


def _row(row: Family) -> tuple[str, ...]:
    targets = ", ".join(LORA_TARGETS.get(row.model_type, ())) or "none: name them"
    return row.model_type, row.kinds or row.blocks, row.attention, row.supports, targets, row.verified
