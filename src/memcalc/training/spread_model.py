"""A model that is trained in one process with several GPUs."""

from __future__ import annotations

from collections.abc import Callable

from memcalc.errors import UsageError
from memcalc.nn.model import Network
from memcalc.parallel import engines
from memcalc.parallel.device_map import mapped_modules, weight_sizes
from memcalc.parallel.placement import Placement, split_stacks
from memcalc.parallel.setup import ParallelSetup
from memcalc.setup.setup import TrainingSetup
from memcalc.tables.weight_formats import asked_format


def spread(network: Network, setup: TrainingSetup, layout: ParallelSetup) -> Callable[[Network], Placement]:
    """Split the stacks of a wide network over the GPUs; what is returned places it once it has been adapted.

    Raises UsageError where the GPUs do not hold it.
    """
    ask = layout.device_map
    assert ask is not None
    form = asked_format(setup.quantization, setup.quantize_moe_experts) if setup.quantization != "none" else None
    sizes = weight_sizes(network, engines.precision(setup.precision, layout).weights, form)
    quantizes = form is not None and form.kernel.startswith("bnb-")
    mapped = mapped_modules(network, ask, sizes, quantizes=quantizes)
    if any(not isinstance(device, int) for device in mapped.entries.values()):
        raise UsageError(
            "the GPUs do not hold the model, and what --device-map leaves in host memory cannot be trained; take more "
            "--gpus, larger ones, or --quantization nf4 with --lora-rank."
        )
    split_stacks(network, mapped)
    return lambda network: Placement(network, mapped, ask)
