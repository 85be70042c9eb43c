"""The report as the JSON contract."""

from memcalc.report.schema import Report


def render(report: Report) -> str:
    """One JSON object and a newline. ASCII only, so that it survives every stream and no name acts on a terminal."""
    return report.to_json() + "\n"
