"""`memcalc families`: the table of model families."""

from typing import Annotated

from memcalc.cli.output import JSON, print_json, print_table, print_text, write
from memcalc.models.family import Family
from memcalc.models.registry import KINDS, families, family, kind_of
from memcalc.render.tables import Column
from memcalc.tables.instruments import ALLOCATOR, ON_ALLOCATOR, ON_BOTH, TRACKER
from memcalc.tables.lora_targets import LORA_TARGETS

_USUAL = {"attention": "eager, sdpa, flash", "supports": "training, inference, LoRA"}
"""What most families have, which the table leaves out."""

_COLUMNS = (
    Column("model_type", whole=True),
    Column("blocks"),
    Column("only"),
    Column("LoRA targets by default", needs=90),
    Column("verified by", needs=110),
)
_BELOW = (
    "Families have attention eager, sdpa and flash, and training, inference and LoRA, unless a row says what there is "
    "only. Where no LoRA targets stand by default, --lora-targets has to name them. --json has all of it."
)
_MOST_TARGETS = 4


def command(json: Annotated[bool, JSON] = False) -> None:
    """List the model families, by the model_type that config.json names, and what stands behind their numbers."""
    rows = [family(model_type) for model_type in families()]
    if json:
        print_json([_object(row) for row in rows])
        return
    lines: list[tuple[str, ...]] = []
    for kind, title in KINDS.items():
        lines += [(f"{title}:", *[""] * (len(_COLUMNS) - 1))]
        lines += [_row(row) for row in rows if kind_of(row.model_type) == kind]
    print_table(_COLUMNS, lines)
    write("\n")
    print_text(_BELOW)


def _object(row: Family) -> dict[str, object]:
    return {
        "model_type": row.model_type,
        "kind": KINDS[kind_of(row.model_type)],
        "blocks": row.kinds or row.blocks,
        "attention": row.attention,
        "supports": row.supports,
        "lora_targets": list(LORA_TARGETS.get(row.model_type, ())),
        "verified_by": row.verified,
        "instrument": _instrument(row),
    }


def _instrument(row: Family) -> str | None:
    """What a family's rows were measured with; None where there are none."""
    if kind_of(row.model_type) in ("diffusion", "autoencoders"):
        return ALLOCATOR
    if not row.is_measured:
        return None
    if row.model_type in ON_ALLOCATOR:
        return ALLOCATOR
    return f"{TRACKER}; {ALLOCATOR}" if row.model_type in ON_BOTH else TRACKER


def _row(row: Family) -> tuple[str, ...]:
    targets = LORA_TARGETS.get(row.model_type, ())
    more = f" and {len(targets) - _MOST_TARGETS} more" if len(targets) > _MOST_TARGETS else ""
    only = "; ".join(getattr(row, name) for name, usual in _USUAL.items() if getattr(row, name) != usual)
    return row.model_type, row.kinds or row.blocks, only, ", ".join(targets[:_MOST_TARGETS]) + more, row.verified
