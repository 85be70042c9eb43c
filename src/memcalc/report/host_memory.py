"""What a training job keeps in host memory, beside the GPU: a line for each thing, with its size."""

from __future__ import annotations

from collections.abc import Iterator

from memcalc.common.assumption import Assumption
from memcalc.nn import parameter_bytes
from memcalc.parallel.setup import GPUS_OF_A_NODE, SINGLE
from memcalc.setup.setup import TrainingSetup
from memcalc.training.traced_step import Step
from memcalc.units import format_bytes


def in_host_memory(step: Step) -> Iterator[Assumption]:
    """Weights while they are loaded, paged optimizer states, and what was saved for backward and offloaded."""
    setup = step.setup
    if not isinstance(setup, TrainingSetup):
        return
    if setup.quantization == "none":
        weights = parameter_bytes.in_files(p for _, p in step.parameters)
        loading = f"host memory: {format_bytes(weights)} in each process while it loads the weights"
        yield Assumption(
            "host_memory_loading", f"{loading}{_in_a_node(step, weights)}, unless they go straight to the GPU"
        )
    if paged := paged_bytes(step):
        yield Assumption(
            "host_memory_paged_optimizer",
            f"host memory: {format_bytes(paged)} of {setup.optimizer} states, which are paged in for each step",
        )
    if step.tape.host_bytes:
        yield Assumption(
            "host_memory_offloaded_activations",
            f"host memory: {format_bytes(step.tape.host_bytes)} that backward needs (--activation-offloading)",
        )


def _in_a_node(step: Step, weights: int) -> str:
    """What the processes of a node have together; nothing where there is one."""
    layout = step.engine.layout if step.engine is not None else SINGLE
    processes = 1 if layout.device_map is not None else min(layout.gpus, GPUS_OF_A_NODE)
    if processes == 1:
        return ""
    alone = "; with cpu_ram_efficient_loading one process of all has them" if layout.engine.startswith("fsdp") else ""
    return f" ({format_bytes(weights * processes)} in a node of {processes}{alone})"


def paged_bytes(step: Step) -> int:
    """Bytes of the optimizer's states that live in host memory."""
    if step.optimizer is None:
        return 0
    return sum(sum(step.optimizer.host(weight).values()) * weight.copies for weight in step.trained)
