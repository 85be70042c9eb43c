"""Models whose weights are all that is known of them: timm's, which has shapes of its own for each architecture."""

from memcalc.common.assumption import Assumption
from memcalc.diffusion import ComponentWeights, estimate_weights
from memcalc.errors import ConfigError, UsageError, option_name
from memcalc.report.schema import Report
from memcalc.setup.setup import InferenceSetup, TrainingSetup
from memcalc.sources.display_names import shown
from memcalc.sources.loaded_model import LoadedModel
from memcalc.sources.notes import remarks
from memcalc.tables.gpus import Gpu

USED = ("cuda_context", "cublas_workspace", "cudnn_workspace", "allocator_reserve", "dtype")
"""Options that weights alone have a use for."""


def for_weights_alone(setup: TrainingSetup | InferenceSetup, what: str) -> InferenceSetup:
    """The setup of a report that counts weights only; UsageError for every option that such a report does not use."""
    given = [field for field in setup.model_fields_set if field not in USED]
    unused = [option_name(field) for field in sorted(given) if getattr(setup, field) is not None]
    if unused:
        raise UsageError(
            f"of {what} only the weights are counted, as they lie on the GPU for inference, so "
            f"{', '.join(unused[:8])}{' and others' if len(unused) > 8 else ''} would change nothing; leave "
            f"{'it' if len(unused) == 1 else 'them'} out."
        )
    return InferenceSetup(**{key: getattr(setup, key) for key in USED if key in setup.model_fields_set})


def timm_architecture(model: LoadedModel) -> str | None:
    """The architecture that a config of timm names; None where the config is another library's."""
    config = model.config or {}
    named = config.get("architecture")
    own = any(key in config for key in ("pretrained_cfg", "num_features", "model_args"))
    return named if isinstance(named, str) and own and "model_type" not in config else None


def timm_report(model: LoadedModel, name: str, setup: TrainingSetup | InferenceSetup, gpu: Gpu | None) -> Report:
    """The weights of a model of timm, resident for inference.

    Raises ConfigError where its weights are no safetensors, UsageError for options that weights alone do not use.
    """
    architecture = timm_architecture(model)
    checkpoint = model.checkpoint
    if checkpoint is None:
        raise ConfigError(
            f"{shown(model.name)} is timm's {shown(architecture or '')}, whose size memcalc reads off its weights: "
            "give the folder with model.safetensors."
        )
    setup = for_weights_alone(setup, "a model of timm")
    weights = ComponentWeights("weights", "denoise", checkpoint.loaded_bytes(setup.dtype), checkpoint.parameters)
    asked = f"in {setup.dtype} (--dtype)" if setup.dtype else f"as they are stored: {checkpoint.stored_dtype} (--dtype)"
    lines = (
        Assumption(
            "weights_only",
            f"timm's {shown(architecture or '')}: only weights are counted, for inference, as its layers are not "
            "described",
        ),
        *remarks(model),
        Assumption("dtype_stored", f"weights {asked}"),
    )
    return estimate_weights(name, "timm", weights, setup, gpu, lines)
