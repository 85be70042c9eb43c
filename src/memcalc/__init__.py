"""memcalc: how much GPU memory a transformer job needs, computed without torch or a GPU.

    from memcalc import ModelSpec, TrainingSetup, estimate

    spec = ModelSpec.from_pretrained("meta-llama/Llama-3.1-8B")
    report = estimate(spec, TrainingSetup(batch=4, seq_len=2048), "H100-80GB")
    print(report)
    report.peak.allocated_bytes, report.gpu.fits

What is named here is loaded when it is first used, so that importing the package costs next to nothing.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from memcalc.common.version import VERSION

if TYPE_CHECKING:
    from memcalc.common.assumption import Assumption
    from memcalc.errors import (
        CheckpointError,
        ConfigError,
        HubError,
        MemcalcError,
        TooLongError,
        TooShortError,
        UnknownFamilyError,
        UsageError,
    )
    from memcalc.library.estimate import estimate
    from memcalc.library.report import (
        InferenceReport,
        InferenceReportOnGpu,
        Report,
        TrainingReport,
        TrainingReportOnGpu,
    )
    from memcalc.library.spec import ModelSpec
    from memcalc.models.llama_shape import canonical_spec
    from memcalc.models.registry import families
    from memcalc.report.gpu_schema import Cluster, GpuFit, RankPeak, Serving
    from memcalc.report.schema import (
        Component,
        Components,
        InferencePhases,
        Model,
        Parameters,
        Part,
        Peak,
        Phase,
        PipelinePhases,
        TrainingPhases,
    )
    from memcalc.setup.setup import InferenceSetup, TrainingSetup
    from memcalc.tables.gpus import GPUS, Gpu, find_gpu
    from memcalc.tables.optimizers import OPTIMIZERS, Optimizer

__all__ = [
    "GPUS",
    "OPTIMIZERS",
    "Assumption",
    "CheckpointError",
    "Cluster",
    "Component",
    "Components",
    "ConfigError",
    "Gpu",
    "GpuFit",
    "HubError",
    "InferencePhases",
    "InferenceReport",
    "InferenceReportOnGpu",
    "InferenceSetup",
    "MemcalcError",
    "Model",
    "ModelSpec",
    "Optimizer",
    "Parameters",
    "Part",
    "Peak",
    "Phase",
    "PipelinePhases",
    "RankPeak",
    "Report",
    "Serving",
    "TooLongError",
    "TooShortError",
    "TrainingPhases",
    "TrainingReport",
    "TrainingReportOnGpu",
    "TrainingSetup",
    "UnknownFamilyError",
    "UsageError",
    "canonical_spec",
    "estimate",
    "families",
    "find_gpu",
]

__version__ = VERSION

_HOMES = {
    "common.assumption": ("Assumption",),
    "errors": (
        "CheckpointError",
        "ConfigError",
        "HubError",
        "MemcalcError",
        "TooLongError",
        "TooShortError",
        "UnknownFamilyError",
        "UsageError",
    ),
    "library.estimate": ("estimate",),
    "library.report": ("InferenceReport", "InferenceReportOnGpu", "Report", "TrainingReport", "TrainingReportOnGpu"),
    "library.spec": ("ModelSpec",),
    "models.llama_shape": ("canonical_spec",),
    "models.registry": ("families",),
    "report.gpu_schema": ("Cluster", "GpuFit", "RankPeak", "Serving"),
    "report.schema": (
        "Component",
        "Components",
        "InferencePhases",
        "Model",
        "Parameters",
        "Part",
        "Peak",
        "Phase",
        "PipelinePhases",
        "TrainingPhases",
    ),
    "setup.setup": ("InferenceSetup", "TrainingSetup"),
    "tables.gpus": ("GPUS", "Gpu", "find_gpu"),
    "tables.optimizers": ("OPTIMIZERS", "Optimizer"),
}
_HOME = {name: module for module, names in _HOMES.items() for name in names}


def __getattr__(name: str) -> Any:
    """Load what is asked for."""
    if name not in _HOME:
        raise AttributeError(f"module 'memcalc' has no attribute {name!r}")
    value = getattr(import_module(f"memcalc.{_HOME[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
