"""What memcalc understands of a model, for `inspect`: nothing is estimated, everything is counted."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from memcalc.config.quantization import find_quantization
from memcalc.errors import ConfigError, UnknownFamilyError
from memcalc.models.build import build
from memcalc.models.registry import denoisers
from memcalc.models.spec import ModelSpec
from memcalc.nn.parameter_counts import active_parameters
from memcalc.sources.config_vs_weights import dtypes, part_of
from memcalc.sources.diffusers import ONLY_WEIGHTS
from memcalc.sources.diffusers_spec import component_spec
from memcalc.sources.display_names import some
from memcalc.sources.loaded_model import LoadedModel
from memcalc.sources.model_spec import Built, spec_of
from memcalc.sources.notes import remarks


@dataclass(frozen=True, kw_only=True)
class Counts:
    """Parameters: all, those that one token meets (None where unknown), and by part."""

    total: int
    active: int | None
    parts: Mapping[str, int]


@dataclass(frozen=True, kw_only=True)
class Inspection:
    """What was understood. Sizes are bytes; `family` is None where only the headers could be read."""

    name: str
    family: str | None
    architecture: str | None
    shapes: Mapping[str, Any]
    parameters: Counts
    stored_bytes: int | None
    stored_bytes_by_dtype: Mapping[str, int]
    dtypes: Mapping[str, str | None]
    quantization: str | None
    ignored: tuple[Mapping[str, Any], ...]
    notes: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        """As plain objects: what `inspect --json` prints."""
        return asdict(self)


def inspect_model(model: LoadedModel, name: str, *, generic: bool = False) -> Inspection:
    """What is understood of `model`; with `generic`, a decoder of an unknown family is taken for a Llama-like one.

    Raises:
        ConfigError, UnknownFamilyError: neither its config nor the headers of its weights tell what it is.
    """
    if model.components:
        return _pipeline(model, name)
    if model.adapter is not None:
        return _adapter(model, name, generic=generic)
    with model.naming_its_file():
        return _inspected(model, name, generic=generic)


def _inspected(model: LoadedModel, name: str, *, generic: bool) -> Inspection:
    checkpoint, config = model.checkpoint, model.config or {}
    notes: list[str] = []
    spec = built = None
    try:
        spec, lines = spec_of(model, name, generic=generic)
        built = Built.of(spec)
        notes += [line.text for line in lines]
    except (ConfigError, UnknownFamilyError) as problem:
        if checkpoint is None:
            raise
        notes.append(f"only the headers were counted: {problem}")
    if built is None:
        notes += [line.text for line in remarks(model)]
    else:
        lines = remarks(model, expected=built.expected, tied=built.tied, layers=built.layers)
        notes += [line.text for line in lines]
    found = dtypes(checkpoint, config)
    stated = find_quantization(config) if checkpoint is None else checkpoint.quantization
    return Inspection(
        name=name,
        family=None if spec is None else spec.model_type,
        architecture=None if spec is None else spec.architecture,
        shapes={
            key: value
            for key, value in config.items()
            if isinstance(value, int)
            and not isinstance(value, bool)
            and not key.endswith(("_token_id", "_token_index"))
        },
        parameters=_stored(model) if spec is None else _built(spec),
        stored_bytes=None if checkpoint is None else checkpoint.stored_bytes,
        stored_bytes_by_dtype={} if checkpoint is None else checkpoint.stored_bytes_by_dtype,
        dtypes={"stored": found.stored, "declared": found.declared, "loaded": found.loaded},
        quantization=None if stated is None else str(stated),
        ignored=_ignored(model),
        notes=tuple(dict.fromkeys(notes)),
    )


def _ignored(model: LoadedModel) -> tuple[Mapping[str, Any], ...]:
    return tuple({"path": file.path, "bytes": file.nbytes, "reason": file.reason} for file in model.ignored)


def _adapter(model: LoadedModel, name: str, *, generic: bool) -> Inspection:
    """The base model of an adapter, with what the adapter adds among the notes."""
    model.require_config()  # says which base is missing
    adapter, base = model.adapter, model.base or replace(model, adapter=None)
    assert adapter is not None
    found = inspect_model(base, name, generic=generic)
    size = f"{adapter.parameters:,} parameters" if adapter.parameters is not None else "of unknown size"
    rank = "" if adapter.rank is None else f" of rank {adapter.rank}"
    line = f"{adapter.kind} adapter{rank} on {some(list(adapter.targets), 8)}, {size}; the model is its base"
    return replace(found, ignored=(*_ignored(model), *found.ignored), notes=(line, *found.notes))


def _pipeline(model: LoadedModel, name: str) -> Inspection:
    """A diffusion pipeline: its components are the parts."""
    held = [(part, part.checkpoint) for part in model.components if part.checkpoint is not None]
    by_dtype: Counter[str] = Counter()
    for _, checkpoint in held:
        by_dtype.update(checkpoint.stored_bytes_by_dtype)
    stored = next(iter(dict(by_dtype.most_common())), None)
    counts = {part.name: checkpoint.parameters for part, checkpoint in held}
    notes = [line.text for line in remarks(model)]
    for part in model.components:
        if part.checkpoint is None and (spec := component_spec(part)) is not None:
            counts[part.name] = _built(spec).total
            notes.append(f"{part.name}: {part.why}, so its config is counted")
    known = any(part.class_name in denoisers() for part in model.components)
    total = sum(counts.values())
    return Inspection(
        name=name,
        family="diffusion pipeline",
        architecture=None,
        shapes={},
        parameters=Counts(total=total, active=total, parts=counts),
        stored_bytes=sum(checkpoint.stored_bytes for _, checkpoint in held) if held else None,
        stored_bytes_by_dtype=dict(by_dtype.most_common()),
        dtypes={"stored": stored, "declared": None, "loaded": stored},
        quantization=None,
        ignored=_ignored(model),
        notes=(
            *(f"{part.name}: {part.class_name}" for part in model.components),
            *(note for note in notes if not (known and note == ONLY_WEIGHTS)),
        ),
    )


def _built(spec: ModelSpec) -> Counts:
    """The parameters of the model that the config builds, by what they are for."""
    network = build(spec)
    parts: dict[str, int] = {}
    for _, parameter in network.parameters():
        parts[parameter.group] = parts.get(parameter.group, 0) + parameter.numel * parameter.copies
    return Counts(total=sum(parts.values()), active=active_parameters(network), parts=parts)


def _stored(model: LoadedModel) -> Counts:
    """The parameters that the headers hold, by part; layers are one part."""
    assert model.checkpoint is not None
    parts: dict[str, int] = {}
    for tensor in model.checkpoint.tensors:
        part = part_of(tensor.name)
        part = "layers" if "layer " in part else part
        parts[part] = parts.get(part, 0) + tensor.parameters
    return Counts(total=model.checkpoint.parameters, active=None, parts={k: v for k, v in parts.items() if v})
