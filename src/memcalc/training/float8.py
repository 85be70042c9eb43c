"""torchao's float8 layers put into a built model."""

from __future__ import annotations

from memcalc.common.assumption import Assumption
from memcalc.errors import UsageError
from memcalc.nn.layers.linear import Linear
from memcalc.nn.model import Network
from memcalc.nn.module_paths import output_head, sites
from memcalc.tables.gpu_features import features
from memcalc.tables.gpus import Gpu

_DIVISOR = 16
"""cuBLASLt multiplies float8 matrices whose sides are multiples of it."""

NOTE = Assumption(
    "float8_training",
    "float8 products as torchao 0.18 runs them in eager PyTorch, the head left wide: activations stay in 16 bits, and "
    "every operand is cast anew through fp32 copies, which torch.compile would fuse (--float8-recipe)",
)


def check_float8(gpu: Gpu) -> None:
    """Raise UsageError for a GPU that does not multiply float8 matrices."""
    if features(gpu).fp8 is False:
        raise UsageError(
            f"{gpu.name} does not multiply matrices in float8, which begins with compute capability 8.9 and MI300; "
            "leave out --float8-recipe."
        )


def use_float8(network: Network) -> Assumption:
    """Let every linear layer but the head multiply in float8, where its sides allow it; returns what to say of it.

    Raises UsageError where there is none.
    """
    found = sites(network)
    head = output_head(found)
    layers = [site.module for site in found if type(site.module) is Linear and site.module is not head]
    fitting = [layer for layer in layers if not any(side % _DIVISOR for side in layer.weight.shape)]
    if not fitting:
        raise UsageError(
            "--float8-recipe multiplies linear layers in float8, and this model has none whose sides are multiples of "
            "16; leave it out."
        )
    for layer in fitting:
        layer.float8 = True
    if len(fitting) < len(layers):
        left = f"; {len(layers) - len(fitting)} kinds of layers whose sides are no multiples of 16 stay wide"
        return Assumption(NOTE.code, NOTE.text + left)
    return NOTE
