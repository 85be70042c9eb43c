"""memcalc: how much GPU memory a transformer job needs, computed without torch or a GPU.

    from memcalc import ModelSpec, TrainingSetup, estimate

    spec = ModelSpec.from_config({"model_type": "llama", "hidden_size": 2048, ...})
    report = estimate(spec, TrainingSetup(batch=4, seq_len=2048))
    report.peak.allocated_bytes

What is named here is loaded when it is first used, so that importing the package costs next to nothing.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from memcalc.common.version import VERSION

if TYPE_CHECKING:
    from memcalc.errors import MemcalcError
    from memcalc.estimation import estimate
    from memcalc.models.llama_shape import canonical_spec
    from memcalc.models.spec import ModelSpec
    from memcalc.report.schema import Report
    from memcalc.setup.setup import InferenceSetup, TrainingSetup
    from memcalc.tables.gpus import Gpu, find_gpu

__all__ = [
    "Gpu",
    "InferenceSetup",
    "MemcalcError",
    "ModelSpec",
    "Report",
    "TrainingSetup",
    "canonical_spec",
    "estimate",
    "find_gpu",
]

__version__ = VERSION

_HOME = {
    "Gpu": "tables.gpus",
    "InferenceSetup": "setup.setup",
    "MemcalcError": "errors",
    "ModelSpec": "models.spec",
    "Report": "report.schema",
    "TrainingSetup": "setup.setup",
    "canonical_spec": "models.llama_shape",
    "estimate": "estimation",
    "find_gpu": "tables.gpus",
}


def __getattr__(name: str) -> Any:
    """Load what is asked for."""
    if name not in _HOME:
        raise AttributeError(f"module 'memcalc' has no attribute {name!r}")
    value = getattr(import_module(f"memcalc.{_HOME[name]}"), name)
    globals()[name] = value
    return value
