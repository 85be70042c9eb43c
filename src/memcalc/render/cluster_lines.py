"""What the box says of a job on several GPUs: a line for each axis, what is sent, and what the host holds."""

from collections.abc import Iterator, Sequence

from memcalc.report.gpu_schema import Cluster, RankPeak
from memcalc.units import Unit, counted, format_bytes


def cluster_lines(cluster: Cluster, ranks: Sequence[RankPeak], unit: Unit) -> Iterator[tuple[str, str, str]]:
    """Heading, text and style of each line."""
    batch = f"{counted(cluster.sequences_per_step, 'sequence')} a step"
    tokens = "" if cluster.tokens_per_step is None else f", {counted(cluster.tokens_per_step, 'token')}"
    engine = "" if cluster.parallel == "none" else f", {cluster.parallel}"
    yield "GPUS", f"{cluster.gpus:,}{engine}: {batch}{tokens}", ""
    for words, size in cluster.axes.items():
        yield "", f"{words} {size:,}", ""
    if cluster.sent_bytes:
        sent = " · ".join(
            f"{name} {format_bytes(nbytes, unit)}" for name, nbytes in cluster.sent_bytes.items() if nbytes
        )
        yield "SENDS", f"{sent} a step", ""
    if cluster.host_bytes:
        yield (
            "HOST",
            f"{format_bytes(cluster.host_bytes, unit)}, {format_bytes(cluster.node_host_bytes, unit)} a node",
            "",
        )
    if len(ranks) > 1:
        for rank in ranks:
            mark = ", reported" if rank.pipeline_rank == cluster.pipeline_rank else ""
            peak = f"{format_bytes(rank.peak_bytes, unit)} in {rank.phase}"
            yield "RANKS" if rank is ranks[0] else "", f"stage {rank.pipeline_rank}: {peak}{mark}", ""
