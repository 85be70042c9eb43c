"""The report as a Markdown table, to paste into an issue or a document."""

import re
from collections.abc import Iterator

from memcalc.render.captions import assumption_lines, needs, pooled, served, trained, workload
from memcalc.render.terminal_text import visible
from memcalc.report.schema import Report
from memcalc.units import Unit, format_bytes, format_count


def render(report: Report, unit: Unit = "GiB") -> str:
    """Heading, table of the six rows, the peak, and what was assumed."""
    return "".join(line + "\n" for line in _lines(report, unit))


def _lines(report: Report, unit: Unit) -> Iterator[str]:
    model, peak, gpu = report.model, report.peak, report.gpu
    count, active = model.parameters.total, model.parameters.active
    per_token = "" if active == count else f", {format_count(active)} of them active for a token"
    if some := trained(report):
        per_token += f", {some}"
    yield f"**{quoted(model.name)}**, {format_count(count)} parameters{per_token} · {workload(report)}"
    yield ""
    yield "| row | at the peak | own maximum | bytes per parameter |"
    yield "|---|--:|--:|--:|"
    for name, row in report.components.rows():
        ratio = "" if row.bytes_per_parameter is None else f"{row.bytes_per_parameter:.2f}"
        sizes = f"{format_bytes(row.peak_bytes, unit)} | {format_bytes(row.max_bytes, unit)}"
        yield f"| {name.replace('_', ' ')} | {sizes} | {ratio} |"
    yield f"| **process (nvidia-smi)** | **{format_bytes(peak.process_bytes, unit)}** | | |"
    yield ""
    yield f"Peak: {format_bytes(peak.allocated_bytes, unit)} allocated, {quoted(peak.moment)}."
    phases = (f"{name} {format_bytes(phase.peak_bytes, unit)}" for name, phase in report.phases.items())
    yield f"Phases: {', '.join(phases)}."
    if report.kv_cache_bytes:
        yield f"KV cache: {format_bytes(report.kv_cache_bytes, unit)}."
    if gpu is not None:
        room = format_bytes(abs(gpu.free_bytes), unit)
        yield f"{quoted(gpu.name)}: {f'fits, {room} free' if gpu.fits else f'does not fit, {room} too much'}."
        if least := needs(report, unit):
            yield f"It {least}."
    if report.serving is not None:
        yield f"Serves {served(report)}."
        if report.serving.pool is not None:
            yield f"vLLM: {pooled(report.serving.pool, unit)}."
    if report.assumptions:
        yield ""
        yield "Assumptions:"
        yield ""
    for line in assumption_lines(report.assumptions):
        yield f"- {quoted(line)}"


def quoted(text: str) -> str:
    """`text` so that Markdown shows it as it is."""
    return re.sub(r"([\\`*_{}\[\]<>|#~&])", r"\\\1", visible(text))
