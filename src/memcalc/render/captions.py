"""What the box, the Markdown table and the page say in the same words."""

from collections.abc import Iterable, Sequence

from memcalc.common.assumption import Assumption
from memcalc.report.gpu_schema import EnginePool
from memcalc.report.schema import Part, Report
from memcalc.units import Unit, counted, format_bytes, format_count

_SMALL_SHARE = 100
"""Parts below one in so many bytes of a row are shown as one."""
_MOST_PARTS = 8


def shown_parts(parts: Sequence[Part]) -> list[tuple[str, int]]:
    """Name and bytes of the parts of a row, the small ones and those beyond the eighth as one."""
    shown = [(part.name, part.bytes) for part in parts if part.bytes]
    total = _sum(shown)
    small = [part for part in shown if part[1] * _SMALL_SHARE < total]
    if len(small) > 1:
        shown = [*(part for part in shown if part not in small), (f"{len(small)} smaller", _sum(small))]
    if len(shown) > _MOST_PARTS:
        more = shown[_MOST_PARTS - 1 :]
        shown = [*shown[: _MOST_PARTS - 1], (f"{len(more)} more", _sum(more))]
    return shown


def needs(report: Report, unit: Unit) -> str | None:
    """What a GPU needs for the job, where the allocator was simulated for that."""
    if report.gpu is None or report.gpu.needed_bytes is None:
        return None
    size = format_bytes(report.gpu.needed_bytes, unit)
    return f"needs {size} of GPU memory: the smallest on which this runs"


ALWAYS = ("no_padding", "cuda_context", "cublas_workspace", "allocator_reserve", "allocator_simulated")
"""Codes of what is assumed in about every run."""


def assumption_lines(assumptions: Iterable[Assumption]) -> list[str]:
    """What was assumed: a line for each thing that is particular to the run, and one for what is always the same."""
    own: list[str] = []
    always: list[str] = []
    for assumption in assumptions:
        (always if assumption.code in ALWAYS else own).append(assumption.text)
    return [*own, f"as always: {'; '.join(always)}"] if always else own


def _sum(parts: Sequence[tuple[str, int]]) -> int:
    return sum(nbytes for _, nbytes in parts)


def workload(report: Report) -> str:
    """The micro-batch, such as `batch 8 × 512 tokens`; with `→` where an encoder-decoder makes a target of another."""
    setup = report.setup
    batch, source, target = setup.get("sequences", setup.get("batch")), setup.get("seq_len"), setup.get("target_len")
    if batch is None:
        return "weights only"
    if setup.get("height") and setup.get("width"):
        return f"batch {batch} × {setup['width']} × {setup['height']} pixels"
    lengths = [str(length) for length in dict.fromkeys((source, target)) if length]
    unit = "token" if lengths == ["1"] else "tokens"
    return f"batch {batch} × {' → '.join(lengths)} {unit}" if lengths else f"batch {batch}"


def trained(report: Report) -> str:
    """How many of the parameters are trained, such as `20.2M trained`; "" where about all of them are."""
    count = format_count(report.model.parameters.trainable)
    return f"{count} trained" if report.training and count != format_count(report.model.parameters.total) else ""


def served(report: Report) -> str:
    """What the GPU has room for, "" where nobody asked."""
    serving, tokens = report.serving, report.setup.get("seq_len")
    if serving is None:
        return ""
    if not tokens:
        return f"a batch of {serving.largest_batch:,}"
    one = serving.longest_context
    if not serving.largest_batch:
        return f"no sequence of {tokens:,} tokens, {f'but one of {one:,}' if one else 'nor a shorter one'}"
    return f"{counted(serving.largest_batch, 'sequence')} of {counted(tokens, 'token')}, or one of {one:,}"


def pooled(pool: EnginePool, unit: Unit) -> str:
    """The pool that vLLM makes, and the smallest share of the GPU that would do."""
    size = format_bytes(abs(pool.pool_bytes), unit)
    made = f"its pool: {size}, {pool.pool_tokens:,} tokens" if pool.pool_bytes > 0 else f"no room for a pool by {size}"
    least = pool.smallest_utilization
    return f"{made}; {'no share of this GPU' if least is None else f'--gpu-memory-utilization {least:.2f}'} would do"
