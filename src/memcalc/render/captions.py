"""What the box and the Markdown table say in the same words."""

from memcalc.report.schema import Report
from memcalc.units import format_count


def workload(report: Report) -> str:
    """The micro-batch, such as `batch 8 × 512 tokens`; with `→` where an encoder-decoder makes a target of another."""
    setup = report.setup
    batch, source, target = setup.get("sequences", setup.get("batch")), setup.get("seq_len"), setup.get("target_len")
    if batch is None:
        return "weights only"
    if setup.get("height") and setup.get("width"):
        return f"batch {batch} × {setup['width']} × {setup['height']} pixels"
    lengths = [str(length) for length in dict.fromkeys((source, target)) if length]
    return f"batch {batch} × {' → '.join(lengths)} tokens" if lengths else f"batch {batch}"


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
    sequences = "1 sequence" if serving.largest_batch == 1 else f"{serving.largest_batch:,} sequences"
    return f"{sequences} of {tokens:,} tokens, or one of {one:,}"
