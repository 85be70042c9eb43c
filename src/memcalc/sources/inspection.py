"""What memcalc understands of a model, for `inspect`: nothing is estimated, everything is counted."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from memcalc.errors import ConfigError, UnknownFamilyError
from memcalc.model.counting import active_parameters
from memcalc.model.spec import ModelSpec
from memcalc.sources.loaded import LoadedModel
from memcalc.sources.reconcile import dtypes, part_of, reconcile
from memcalc.step import build


@dataclass(frozen=True, slots=True, kw_only=True)
class Counts:
    """Parameters: all, those that one token meets (None where unknown), and by part."""

    total: int
    active: int | None
    parts: Mapping[str, int]


@dataclass(frozen=True, slots=True, kw_only=True)
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


def inspect_model(model: LoadedModel, name: str) -> Inspection:
    """What is understood of `model`.

    Raises:
        ConfigError, UnknownFamilyError: neither its config nor the headers of its weights tell what it is.
    """
    checkpoint, config = model.checkpoint, model.config or {}
    notes = list(model.notes)
    try:
        spec = ModelSpec.from_config(model.require_config(), name)
        counts = _built(spec)
        family, architecture = spec.model_type, spec.architecture
    except (ConfigError, UnknownFamilyError) as problem:
        if checkpoint is None:
            raise
        notes.insert(0, f"only the headers were counted: {problem}")
        counts, family, architecture = _stored(model), None, None
    if checkpoint is not None:
        notes += checkpoint.notes
        if family is not None:
            tied = config.get("tie_word_embeddings")
            notes += reconcile(checkpoint, parameters=counts.total, tied=tied if isinstance(tied, bool) else None)
    found = dtypes(checkpoint, config)
    return Inspection(
        name=name,
        family=family,
        architecture=architecture,
        shapes={key: value for key, value in config.items() if isinstance(value, int) and not isinstance(value, bool)},
        parameters=counts,
        stored_bytes=None if checkpoint is None else checkpoint.stored_bytes,
        stored_bytes_by_dtype={} if checkpoint is None else checkpoint.stored_bytes_by_dtype,
        dtypes={"stored": found.stored, "declared": found.declared, "loaded": found.loaded},
        quantization=None if checkpoint is None or checkpoint.quantization is None else str(checkpoint.quantization),
        ignored=tuple({"path": file.path, "bytes": file.nbytes, "reason": file.reason} for file in model.ignored),
        notes=tuple(dict.fromkeys(notes)),
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
