"""What a diffusion pipeline needs, as far as its files tell."""

from memcalc.common.assumption import Assumption
from memcalc.diffusion import ComponentWeights, Stage, estimate_components
from memcalc.report.schema import Report
from memcalc.setup.setup import InferenceSetup, TrainingSetup
from memcalc.sources.checkpoint.bytes_when_loaded import SHORT
from memcalc.sources.loaded_model import Component, LoadedModel
from memcalc.sources.notes import remarks
from memcalc.tables.gpus import Gpu

_STAGES: tuple[tuple[str, Stage], ...] = (
    ("text_encoder", "encode"),
    ("image_encoder", "encode"),
    ("feature_extractor", "encode"),
    ("prior", "encode"),
    ("vae", "decode"),
    ("vqvae", "decode"),
    ("movq", "decode"),
    ("decoder", "decode"),
    ("safety_checker", "decode"),
    ("vocoder", "decode"),
    ("image_noising_scheduler", "denoise"),
)
"""When a component works, by the beginning of its name in model_index.json; all others denoise (unet, transformer)."""


def pipeline_report(model: LoadedModel, name: str, setup: TrainingSetup | InferenceSetup, gpu: Gpu | None) -> Report:
    """The weights of every component, in the dtype that the user asks for or in which they are stored."""
    if isinstance(setup, TrainingSetup):
        shared = ("cuda_context", "cublas_workspace", "allocator_reserve")
        setup = InferenceSetup(**{key: getattr(setup, key) for key in shared if key in setup.model_fields_set})
    asked = setup.dtype
    parts = [_weights(part, asked) for part in model.components if part.checkpoint is not None]
    lines = [
        Assumption("dtype_given", f"weights in {asked} (--dtype)")
        if asked
        else Assumption("dtype_stored", f"weights as they are stored: {_dtypes(model)} (--dtype)")
    ]
    unread = [part.name for part in model.components if part.checkpoint is None]
    if unread:
        lines.append(
            Assumption("weights_not_counted", f"weights of {', '.join(unread)} are no safetensors, and are not counted")
        )
    return estimate_components(name, parts, setup, gpu, (*remarks(model), *lines))


def _weights(part: Component, dtype: str | None) -> ComponentWeights:
    assert part.checkpoint is not None
    stages: list[Stage] = [stage for start, stage in _STAGES if part.name.startswith(start)]
    nbytes = part.checkpoint.loaded_bytes(dtype)
    return ComponentWeights(part.name, stages[0] if stages else "denoise", nbytes, part.checkpoint.parameters)


def _dtypes(model: LoadedModel) -> str:
    found = [(part.name, part.checkpoint.stored_dtype or "") for part in model.components if part.checkpoint]
    kinds = {kind for _, kind in found}
    if len(kinds) == 1:
        return SHORT.get(kinds.pop(), "mixed")
    return ", ".join(f"{name} {SHORT.get(kind, kind)}" for name, kind in found)
