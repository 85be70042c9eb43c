"""Training on a diffusion pipeline: the denoiser is trained, the other components made its latents and embeddings."""

from memcalc.common.assumption import Assumption
from memcalc.models.registry import denoisers
from memcalc.setup.setup import TrainingSetup
from memcalc.sources.diffusers import ONLY_WEIGHTS
from memcalc.sources.loaded_model import LoadedModel
from memcalc.sources.model_spec import Described, describe


def describe_denoiser(model: LoadedModel, name: str, setup: TrainingSetup) -> Described | None:
    """The denoiser of a pipeline, to be trained; None where memcalc has no family for it.

    Raises ConfigError where its config and its weights are not of one model.
    """
    part = next((part for part in model.components if part.config and part.class_name in denoisers()), None)
    if part is None:
        return None
    notes = tuple(note for note in model.notes if note != ONLY_WEIGHTS)
    config = {**(part.config or {}), "_class_name": part.class_name}
    alone = LoadedModel(model.name, model.origin, config, part.checkpoint, notes=(*notes, *part.notes))
    found = describe(alone, name, setup)
    others = [other.name for other in model.components if other is not part]
    if not others:
        return found
    text = f"of the pipeline only {part.name} is on the GPU, not {', '.join(others)}"
    return Described(found.spec, found.setup, (*found.assumptions, Assumption("only_the_denoiser", text)))
