"""`memcalc schema`: the JSON contract."""

import json

from memcalc.cli.output import write
from memcalc.report.schema import json_schema


def command() -> None:
    """Print the JSON Schema of what --json prints."""
    write(json.dumps(json_schema(), indent=2) + "\n")
