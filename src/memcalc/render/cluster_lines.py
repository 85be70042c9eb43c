"""What the box says of a job on several GPUs: a line for each axis, what is sent, and what the host holds."""

from collections.abc import Iterator, Sequence

from memcalc.report.gpu_schema import Cluster, RankPeak
from memcalc.units import Unit, counted, format_bytes


def cluster_lines(
    cluster: Cluster, ranks: Sequence[RankPeak], unit: Unit, *, training: bool = True
) -> Iterator[tuple[str, str, str]]:
    """Heading, text and style of each line."""
    a_step = " a step" if training else ""
    batch = f"{counted(cluster.sequences_per_step, 'sequence')}{a_step}"
    tokens = "" if cluster.tokens_per_step is None else f", {counted(cluster.tokens_per_step, 'token')}"
    engine = "" if cluster.parallel == "none" else f", {cluster.parallel}"
    yield "GPUS", f"{cluster.gpus:,}{engine}: {batch}{tokens}", ""
    for words, size in cluster.axes.items():
        yield "", f"{words} {size:,}", ""
    if cluster.sent_bytes:
        sent = " · ".join(
            f"{name} {format_bytes(nbytes, unit)}" for name, nbytes in cluster.sent_bytes.items() if nbytes
        )
        yield "SENDS", f"{sent}{a_step}", ""
    if cluster.host_bytes:
        yield (
            "HOST",
            f"{format_bytes(cluster.host_bytes, unit)}, {format_bytes(cluster.node_host_bytes, unit)} a node",
            "",
        )
    if len(ranks) > 1:
        for rank in ranks:
            place = (rank.pipeline_rank, rank.gpu)
            mark = ", reported" if place == (cluster.pipeline_rank, cluster.gpu) else ""
            name = f"stage {rank.pipeline_rank}" if rank.gpu is None else f"GPU {rank.gpu}"
            peak = f"{format_bytes(rank.peak_bytes, unit)} in {rank.phase}"
            if rank.gpu is not None:
                peak += f", {format_bytes(rank.model_weights_bytes, unit)} of it weights"
            yield "RANKS" if rank is ranks[0] else "", f"{name}: {peak}{mark}", ""
