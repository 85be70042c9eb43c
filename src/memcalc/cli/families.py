"""`memcalc families`: the table of model families."""

from memcalc.cli.output import print_table
from memcalc.model.families import family, known


def command() -> None:
    """List the model families, by the model_type that config.json names, and what stands behind their numbers."""
    rows = [(row.model_type, row.blocks, row.attention, row.verified) for row in map(family, known())]
    print_table(("model_type", "blocks", "attention", "verified by"), rows)
