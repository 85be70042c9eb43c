"""A diffusion pipeline as one spec: its denoiser, with the models that work before and after it."""

from dataclasses import replace

from memcalc.common.assumption import Assumption
from memcalc.config.dtypes import declared_dtypes
from memcalc.errors import ConfigError, MemcalcError
from memcalc.models.build import build
from memcalc.models.registry import autoencoders, denoisers
from memcalc.models.spec import KeptAdapter, ModelSpec, PipelineComponent
from memcalc.models.stored_weights import GGUF, StoredWeights
from memcalc.setup.setup import InferenceSetup, TrainingSetup
from memcalc.sources.adapter import Adapter
from memcalc.sources.adapter_options import check_kind
from memcalc.sources.checkpoint.bytes_when_loaded import SHORT, stored_weights
from memcalc.sources.diffusers import ONLY_WEIGHTS
from memcalc.sources.display_names import shown
from memcalc.sources.loaded_model import Component, LoadedModel
from memcalc.sources.lora_file import LoraFile
from memcalc.sources.lora_targets import options_of
from memcalc.sources.model_spec import Described, describe, refuse_dora, trained_further
from memcalc.tables.dtypes import ALIASES
from memcalc.units import format_count


def describe_pipeline(model: LoadedModel, name: str, setup: TrainingSetup | InferenceSetup) -> Described | None:
    """The denoiser of a pipeline with its other models; None where memcalc has no family for the denoiser.

    Raises ConfigError where a config and its weights are not of one model, or where weights can be counted neither from
    files nor from a config.
    """
    if model.adapter is not None and model.base is not None:
        return _with_adapter(model, model.adapter, model.base, name, setup)
    main = _denoiser(model)
    if main is None:
        return None
    found = describe(_alone(model, main), name, setup)
    if main.counted:
        found = replace(found, spec=replace(found.spec, stored=_stored(main)))
    elif main.checkpoint is None and "pickle" in main.why:
        found = replace(found, spec=_with_fp32(found.spec))
    lines: list[Assumption] = []
    if main.modules and isinstance(setup, TrainingSetup):
        text = "GGUF weights are unpacked to 16 bits for training, as diffusers does not train on them"
        found = replace(found, assumptions=(*found.assumptions, Assumption("gguf_unpacked", text)))
    spec = replace(found.spec, component=main.name, components=_others(model, main, lines))
    return Described(spec, found.setup, (*found.assumptions, *(() if isinstance(setup, TrainingSetup) else lines)))


def _with_adapter(
    model: LoadedModel, adapter: Adapter, base: LoadedModel, name: str, setup: TrainingSetup | InferenceSetup
) -> Described | None:
    """The pipeline `base` with a LoRA on its denoiser, which is trained further or called with it."""
    found = describe_pipeline(base, name, setup)
    if found is None:
        return None
    check_kind(adapter)
    size = "" if adapter.parameters is None else f" of {format_count(adapter.parameters)} parameters"
    lines = [Assumption("adapter", f"LoRA adapter{size} for {shown(adapter.base_model or base.name)}")]
    spec, setup = found.spec, found.setup
    if isinstance(setup, TrainingSetup):
        setup, more = trained_further(adapter, spec, setup)
    else:
        refuse_dora(adapter)
        options, more = options_of(adapter, spec)
        kept = KeptAdapter(
            rank=options["lora_rank"], targets=options.get("lora_targets"), ranks=options.get("lora_rank_pattern")
        )
        spec = replace(spec, adapter=kept)
        text = "the adapter is kept beside the weights (load_lora_weights); after fuse_lora, give the base alone"
        more.append(Assumption("adapter_not_merged", text))
    if isinstance(adapter, LoraFile) and adapter.encoders:
        text = f"its adapters on text encoders ({format_count(adapter.encoders)} parameters) are not counted"
        more.append(Assumption("adapter_keys_not_counted", text))
    return Described(spec, setup, (*lines, *more, *found.assumptions))


def pipeline_spec(model: LoadedModel, name: str) -> tuple[ModelSpec, tuple[Assumption, ...]]:
    """The same as a spec and lines for the assumptions. Raises ConfigError where the denoiser is not known."""
    main = _denoiser(model)
    if main is None:
        raise ConfigError(
            f"{shown(model.name)} is a pipeline whose denoiser memcalc does not know; from-file and from-hub count its "
            "weights."
        )
    lines: list[Assumption] = []
    spec = ModelSpec.from_config(_alone(model, main).require_config(), name)
    if main.counted:
        spec = replace(spec, stored=_stored(main))
    return replace(spec, component=main.name, components=_others(model, main, lines)), tuple(lines)


def _denoiser(model: LoadedModel) -> Component | None:
    return next((part for part in model.components if part.config and part.class_name in denoisers()), None)


def _alone(model: LoadedModel, main: Component) -> LoadedModel:
    notes = tuple(note for note in model.notes if note != ONLY_WEIGHTS)
    config = {**(main.config or {}), "_class_name": main.class_name}
    weights = None if main.counted else main.checkpoint  # its names are not those of the config's class
    return LoadedModel(model.name, model.origin, config, weights, notes=(*notes, *main.notes))


def _stored(part: Component) -> StoredWeights:
    """The weights of a part whose number is that of its config: what is stored in fp8 is widened when it is loaded."""
    checkpoint = part.checkpoint
    if checkpoint is not None and part.modules:
        return StoredWeights(GGUF, checkpoint.stored_bytes_by_dtype, modules=part.modules)
    return StoredWeights(dtype=SHORT.get((checkpoint and checkpoint.stored_dtype) or ""))


def _others(model: LoadedModel, main: Component, lines: list[Assumption]) -> tuple[PipelineComponent, ...]:
    return tuple(_component(part, lines) for part in model.components if part is not main)


def _component(part: Component, lines: list[Assumption]) -> PipelineComponent:
    """A component beside the denoiser, with its spec where a family describes it; what to say of it joins `lines`."""
    spec = component_spec(part)
    if spec is not None:
        if part.checkpoint is None:
            count = sum(parameter.numel * parameter.copies for _, parameter in build(spec).parameters())
            text = f"{part.name}: {part.why}, so its config is counted: {format_count(count)} parameters"
            lines.append(Assumption("component_from_config", text))
        return PipelineComponent(name=part.name, class_name=part.class_name, spec=spec)
    if part.checkpoint is None:
        raise ConfigError(
            f"{part.name} of the pipeline cannot be counted: {part.why}, and its config does not tell its size to "
            "memcalc; without it the total would be too small. Save it as safetensors, or download it."
        )
    text = (
        f"{shown(part.name)} ({shown(part.class_name)}) is not described: its weights are counted, and not what it "
        "computes"
    )
    lines.append(Assumption("component_not_described", text))
    return PipelineComponent(
        name=part.name,
        class_name=part.class_name,
        nbytes=part.checkpoint.loaded_bytes(None),
        parameters=part.checkpoint.parameters,
    )


def component_spec(part: Component) -> ModelSpec | None:
    """The spec of a text encoder, an autoencoder or a denoiser; None where memcalc does not know its family."""
    config = dict(part.config or {})
    if part.class_name in (*autoencoders(), *denoisers()):
        config["_class_name"] = part.class_name
        config.pop("model_type", None)
    elif part.library == "transformers" and not part.name.startswith(("image_encoder", "safety_checker")):
        config["architectures"] = [part.class_name]
    else:
        return None
    try:
        spec = ModelSpec.from_config(config, part.name)
        build(spec)
    except MemcalcError:
        return None
    if part.checkpoint is None:
        return _with_fp32(spec) if "pickle" in part.why else spec
    return replace(spec, stored=_stored(part) if part.counted else stored_weights(part.checkpoint))


def _with_fp32(spec: ModelSpec) -> ModelSpec:
    """A pickle whose config does not say its dtype is taken for fp32, in which such files are mostly saved."""
    if any(word in ALIASES for word in declared_dtypes(spec.config)):
        return spec
    return replace(spec, config={**spec.config, "torch_dtype": "float32"})
