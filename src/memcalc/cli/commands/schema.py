"""`memcalc schema`: the JSON contract."""

import json
from typing import Annotated

import typer
from pydantic.json_schema import GenerateJsonSchema

from memcalc.cli.output import write
from memcalc.common.escaping import quoted
from memcalc.errors import UsageError, close_matches
from memcalc.report.schema import Report

_CONTRACTS = ("report", "explain", "timeline")


def command(
    what: Annotated[
        str,
        typer.Argument(
            metavar="[report|explain|timeline]",
            help="Whose --json: of estimates, of `memcalc explain`, or of `memcalc timeline`.",
            show_default=False,
        ),
    ] = "report",
) -> None:
    """Print the JSON Schema of what --json prints."""
    if what not in _CONTRACTS:
        near = close_matches(what, _CONTRACTS) or ": choose report, explain or timeline."
        raise UsageError(f"there is no schema of {quoted(what)}{near}")
    if what == "report":
        schema = Report.model_json_schema(mode="serialization")
    elif what == "timeline":
        from memcalc.report.timeline import TimelineJson

        schema = TimelineJson.model_json_schema(mode="serialization")
    else:
        from memcalc.provenance.explanation import Explanation

        schema = Explanation.model_json_schema(mode="serialization")
    write(json.dumps({"$schema": GenerateJsonSchema.schema_dialect, **schema}, indent=2) + "\n")
