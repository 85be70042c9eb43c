"""`memcalc schema`: the JSON contract."""

import json

from memcalc.cli.output import write
from memcalc.report.schema import Report


def command() -> None:
    """Print the JSON Schema of what --json prints."""
    write(json.dumps(Report.model_json_schema(mode="serialization"), indent=2) + "\n")
