"""What a diffusion pipeline needs, as far as its files tell."""

from memcalc.common.assumption import Assumption
from memcalc.config.dtypes import declared_dtypes
from memcalc.diffusion import ComponentWeights, Stage, estimate_components
from memcalc.errors import ConfigError, MemcalcError
from memcalc.models.build import build
from memcalc.models.spec import ModelSpec
from memcalc.report.schema import Report
from memcalc.setup.setup import InferenceSetup, TrainingSetup
from memcalc.sources.checkpoint.bytes_when_loaded import SHORT
from memcalc.sources.loaded_model import Component, LoadedModel
from memcalc.sources.notes import remarks
from memcalc.sources.weights_only import for_weights_alone
from memcalc.tables.dtypes import ALIASES, short
from memcalc.tables.gpus import Gpu
from memcalc.units import format_count

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
    """The weights of every component, in the dtype that the user asks for or in which they are stored.

    Raises UsageError where an option is given that weights alone have no use for, ConfigError where the weights of a
    component can be counted neither from files nor from its config.
    """
    setup = for_weights_alone(setup, "a diffusion pipeline")
    asked = setup.dtype
    lines = [
        Assumption("dtype_given", f"weights in {asked} (--dtype)")
        if asked
        else Assumption("dtype_stored", f"weights as they are stored: {_dtypes(model)} (--dtype)")
    ]
    parts = []
    for part in model.components:
        if part.checkpoint is not None:
            parts.append(_weights(part, asked))
        else:
            counted, line = _from_config(part, asked)
            parts.append(counted)
            lines.append(line)
    return estimate_components(name, parts, setup, gpu, (*remarks(model), *lines))


def _from_config(part: Component, dtype: str | None) -> tuple[ComponentWeights, Assumption]:
    """A component whose weights cannot be read, counted from its config where that is a family's."""
    config = part.config or {}
    try:
        network = build(ModelSpec.from_config(config, part.name))
    except MemcalcError:
        raise ConfigError(
            f"{part.name} of the pipeline cannot be counted: {part.why}, and its config does not tell its size to "
            "memcalc; without it the total would be too small. Save it as safetensors, or download it."
        ) from None
    count = sum(parameter.numel * parameter.copies for _, parameter in network.parameters())
    words = (word for word in declared_dtypes(config) if word in ALIASES)
    kind = dtype or short(ALIASES[next(words, "float32")])
    line = Assumption(
        "component_from_config",
        f"{part.name}: {part.why}, so its config is counted: {format_count(count)} parameters in {kind} (--dtype)",
    )
    return ComponentWeights(part.name, _stage(part), count * ALIASES[kind].itemsize, count), line


def _weights(part: Component, dtype: str | None) -> ComponentWeights:
    assert part.checkpoint is not None
    return ComponentWeights(part.name, _stage(part), part.checkpoint.loaded_bytes(dtype), part.checkpoint.parameters)


def _stage(part: Component) -> Stage:
    stages: list[Stage] = [stage for start, stage in _STAGES if part.name.startswith(start)]
    return stages[0] if stages else "denoise"


def _dtypes(model: LoadedModel) -> str:
    found = [(part.name, part.checkpoint.stored_dtype or "") for part in model.components if part.checkpoint]
    kinds = {kind for _, kind in found}
    if len(kinds) == 1:
        return SHORT.get(kinds.pop(), "mixed")
    return ", ".join(f"{name} {SHORT.get(kind, kind)}" for name, kind in found)
