"""From what was read to what is estimated: the spec of a model, and the lines that its report owes to its files."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from memcalc.common.assumption import Assumption
from memcalc.common.escaping import quoted
from memcalc.config.reader import Config
from memcalc.errors import ConfigError, MemcalcError, UnknownFamilyError, option_name
from memcalc.models.build import build
from memcalc.models.registry import family
from memcalc.models.spec import ModelSpec
from memcalc.models.stored_weights import GGUF
from memcalc.nn.state_dict import NamedWeight, weights_by_stack
from memcalc.setup.setup import InferenceSetup, TrainingSetup
from memcalc.sources.adapter import MERGING, Adapter
from memcalc.sources.adapter_options import check_kind, refuse_others
from memcalc.sources.checkpoint.bytes_when_loaded import stored_weights
from memcalc.sources.checkpoint.checkpoint import Checkpoint
from memcalc.sources.config_vs_weights import check_names, part_of
from memcalc.sources.display_names import shown
from memcalc.sources.generic.config import generic_config
from memcalc.sources.loaded_model import LoadedModel
from memcalc.sources.lora_file import LoraFile
from memcalc.sources.lora_targets import options_of
from memcalc.sources.notes import remarks
from memcalc.tables.dtypes import short
from memcalc.tables.precisions import PRECISIONS
from memcalc.units import format_bytes, format_count

Setup = TrainingSetup | InferenceSetup


@dataclass(frozen=True)
class Described:
    """What to estimate: a spec, the setup with what the files decide filled in, and lines for the assumptions."""

    spec: ModelSpec
    setup: Setup
    assumptions: tuple[Assumption, ...]


@dataclass(frozen=True)
class Built:
    """What the config of a spec builds, whether the head is tied, and how many layers there are.

    `expected` has one name for all weights of a part (of a layer, of a tower ...), with the elements of all of them.
    """

    expected: Mapping[str, int]
    tied: bool
    layers: int | None
    modules: frozenset[str]
    """The last names of all modules that have weights."""

    @classmethod
    def of(cls, spec: ModelSpec) -> "Built":
        """Build the spec's network. Raises ConfigError where its config lacks or contradicts itself."""
        row = family(spec.model_type)
        config = Config(spec.config, row.defaults, row.aliases)
        expected: dict[str, int] = {}
        modules: set[str] = set()
        for path, positions, weights in weights_by_stack(build(spec)):
            modules.update(f".{weight.name}".split(".")[-2] for weight in weights)
            for name, count in _by_part(path, positions, weights).items():
                for position in positions or (0,):
                    full = f"{path}.{position}.{name}" if positions else name
                    expected[full] = expected.get(full, 0) + count
        layers = config.get("num_hidden_layers")
        tied = config.get("tie_word_embeddings") is True and not any(part_of(name) == "head" for name in expected)
        return cls(expected, tied, layers if isinstance(layers, int) else None, frozenset(modules))

    @property
    def parts(self) -> set[str]:
        """The parts that `expected` names, a head that is tied not among them."""
        return {part_of(name, self.layers) for name in self.expected}


def _by_part(path: str, positions: Sequence[int], weights: Sequence[NamedWeight]) -> dict[str, int]:
    """The first weight of each part among those of a block, with the elements of all of them."""
    names: dict[str, str] = {}
    counts: dict[str, int] = {}
    for weight in weights:
        part = part_of(f"{path}.{positions[0]}.{weight.name}" if positions else weight.name)
        name = names.setdefault(part, weight.name)
        counts[name] = counts.get(name, 0) + weight.parameter.numel
    return counts


def describe(
    model: LoadedModel, name: str, setup: Setup, *, generic: bool = False, generic_ignore: Collection[str] = ()
) -> Described:
    """The spec to estimate, under `name`.

    Raises:
        ConfigError, UnknownFamilyError: the config does not tell what the model is; the message names --generic.
    """
    if model.adapter is not None:
        return _with_adapter(model, model.adapter, name, setup, generic=generic, generic_ignore=generic_ignore)
    with model.naming_its_file():
        return _described(model, name, setup, generic=generic, generic_ignore=generic_ignore)


def model_alone(model: LoadedModel, name: str, *, generic: bool) -> tuple[ModelSpec, tuple[Assumption, ...]]:
    """The spec of a model for which no setup is known yet, and what is assumed of it.

    Raises ConfigError for an adapter and for a pipeline, which are no model alone.
    """
    if model.adapter is not None:
        base = f" for {shown(model.adapter.base_model)}" if model.adapter.base_model else ""
        raise ConfigError(
            f"{shown(model.name)} is an adapter{base}, not a model: read its base, and say in the setup what is "
            "trained (lora_rank, lora_targets)."
        )
    with model.naming_its_file():
        return _with_weights(model, name, None, generic=generic, generic_ignore=())


def _described(
    model: LoadedModel, name: str, setup: Setup, *, generic: bool, generic_ignore: Collection[str]
) -> Described:
    spec, lines = _with_weights(model, name, _asked(setup), generic=generic, generic_ignore=generic_ignore)
    if model.checkpoint is not None and spec.stored is not None and spec.stored.kind == GGUF:
        setup, more = _of_gguf(model.checkpoint, setup)
        lines += more
    return Described(spec, setup, lines)


def _with_weights(
    model: LoadedModel, name: str, dtype: str | None, *, generic: bool, generic_ignore: Collection[str]
) -> tuple[ModelSpec, tuple[Assumption, ...]]:
    """The spec with the weights that files hold, and what is to be said of them; `dtype` is the one asked for."""
    spec, lines = spec_of(model, name, generic=generic, generic_ignore=generic_ignore)
    if model.checkpoint is None:
        return spec, (*lines, *remarks(model))
    alike = generic and bool(lines)
    built = Built.of(spec)
    if not alike:
        check_names(model.checkpoint, built.modules, sum(built.expected.values()), spec.model_type)
    if _has_own_head(model, spec, built):
        spec = replace(spec, config={**spec.config, "tie_word_embeddings": False})
        built = Built.of(spec)
        text = "the config does not say whether the head is tied; the files hold one of its own, so it is not"
        lines += (Assumption("head_not_tied", text),)
    lines += remarks(model, expected=built.expected, tied=built.tied, layers=built.layers, dtype=dtype)
    held = stored_weights(model.checkpoint, built=None if alike else built.parts, layers=built.layers, exact=alike)
    return replace(spec, stored=held), lines


def _has_own_head(model: LoadedModel, spec: ModelSpec, built: Built) -> bool:
    """Whether files hold a head beside the embedding though only the class ties them, and the config does not.

    Tied weights are written once, so that what is there twice has values of its own, which Transformers 5 then keeps.
    """
    assert model.checkpoint is not None
    stated = any("tie_word_embeddings" in section for section in (spec.config, spec.config.get("text_config") or {}))
    if stated or not built.tied or model.checkpoint.format == "gguf":
        return False
    sizes: dict[str, set[int]] = {"head": set(), "embedding": set()}
    for tensor in model.checkpoint.tensors:
        part = part_of(tensor.weight, built.layers)
        if part in sizes and tensor.parameters:
            sizes[part].add(tensor.parameters)
    return bool(sizes["head"] & sizes["embedding"])


def spec_of(
    model: LoadedModel, name: str, *, generic: bool, generic_ignore: Collection[str] = ()
) -> tuple[ModelSpec, tuple[Assumption, ...]]:
    """The spec of a model's config; with `generic`, that of a Llama-like decoder where its family is unknown."""
    try:
        return ModelSpec.from_config(model.require_config(), name), ()
    except (UnknownFamilyError, ConfigError) as problem:
        if not generic:
            raise _offering_generic(problem, model) from None
    config, lines = generic_config(model, generic_ignore)
    return ModelSpec.from_config(config, name), lines


def _offering_generic(problem: MemcalcError, model: LoadedModel) -> MemcalcError:
    text = str(problem).rstrip(".")
    if (
        "--generic" in text
        or "diffusion pipeline" in text
        or model.components
        or model.unfit
        or model.adapter is not None
    ):
        return problem
    config, file = model.config or {}, model.config_file
    if "model_type" not in config and (vendor := _vendor(config)):
        return type(problem)(
            f"{shown(file)} is a config of {vendor}, not of Transformers; give the config.json of the converted model"
            f"{', or --generic, which reads its sizes' if vendor == _ORIGINAL else ''}."
        )
    if model.checkpoint is not None and model.checkpoint.format == "gguf":
        architecture = model.checkpoint.metadata.get("general.architecture", "unknown")
        return type(problem)(
            f"{shown(model.name)} is of llama.cpp's architecture {quoted(architecture)}, which no family of memcalc "
            "describes; `memcalc inspect` counts its weights, and --generic estimates it as a Llama-like decoder."
        )
    return type(problem)(f"{text}; --generic estimates it as a Llama-like decoder.")


_ORIGINAL = "the original release of Llama or Mistral (params.json)"
_VENDORS: tuple[tuple[frozenset[str], str], ...] = (
    (frozenset({"dim", "n_layers", "n_heads"}), _ORIGINAL),
    (frozenset({"model_cfg", "preprocess_cfg"}), "OpenCLIP"),
    (frozenset({"mlc_chat_version"}), "MLC LLM"),
    (frozenset({"pretrained_config", "build_config"}), "TensorRT-LLM"),
    (frozenset({"encoder", "decoder", "joint"}), "NeMo"),
)
"""Keys by which the configs of other libraries are known."""


def _vendor(config: Mapping[str, Any]) -> str | None:
    """Whose config it is, where it is another library's."""
    return next((name for keys, name in _VENDORS if keys <= config.keys()), None)


def _asked(setup: Setup) -> str | None:
    """The dtype that the user's options load weights in, None where they leave it open."""
    return setup.dtype if isinstance(setup, InferenceSetup) else short(PRECISIONS[setup.precision].weights)


def _of_gguf(checkpoint: Checkpoint, setup: Setup) -> tuple[Setup, tuple[Assumption, ...]]:
    """A GGUF file is served by llama.cpp unless the user names another engine."""
    if isinstance(setup, TrainingSetup):
        return setup, (Assumption("gguf_unpacked", f"GGUF weights are unpacked to {_asked(setup)} for training"),)
    lines = []
    if "engine" not in setup.model_fields_set:
        setup = setup.model_copy(update={"engine": "llama.cpp"})
        lines.append(Assumption("engine_of_gguf", "engine llama.cpp, as the weights are GGUF (--engine)"))
    return setup, tuple(lines)


def _with_adapter(
    model: LoadedModel, adapter: Adapter, name: str, setup: Setup, *, generic: bool, generic_ignore: Collection[str]
) -> Described:
    """The base model that an adapter needs; training goes on as its config says, serving adds its weights."""
    base = model.base
    if base is None:
        model.require_config()  # says which base is missing, unless a config.json lies beside the adapter
        base = replace(model, adapter=None)
    found = describe(base, name, setup, generic=generic, generic_ignore=generic_ignore)
    check_kind(adapter)
    size = "" if adapter.parameters is None else f" of {format_count(adapter.parameters)} parameters"
    lines = [Assumption("adapter", f"{adapter.kind} adapter{size} for {shown(adapter.base_model or base.name)}")]
    spec, setup = found.spec, found.setup
    if isinstance(setup, TrainingSetup):
        setup, more = trained_further(adapter, spec, setup)
        lines += more
    elif adapter.weights is None:
        raise ConfigError(
            f"{shown(model.name)} has no adapter_model.safetensors, so that it is not known what serving adds; save "
            "the adapter as safetensors, or give its base alone."
        )
    else:
        refuse_others({**adapter.config, "r": adapter.rank})
        refuse_dora(adapter)
        nbytes = adapter.weights.loaded_bytes(setup.dtype)
        spec = replace(spec, extra_weights={f"{adapter.kind} adapter": nbytes})
        merged = adapter.largest_layer * MERGING.get(setup.dtype or "", 16)
        merging = f"; merge_and_unload on the GPU takes {format_bytes(merged)} more for a moment" if merged else ""
        text = f"the adapter is kept beside the weights, not merged into them{merging}"
        lines.append(Assumption("adapter_not_merged", text))
    return Described(spec, setup, (*lines, *remarks(replace(model, config=None)), *found.assumptions))


def trained_further(adapter: Adapter, spec: ModelSpec, setup: TrainingSetup) -> tuple[TrainingSetup, list[Assumption]]:
    """The setup that trains a LoRA further as it is, where the user does not say otherwise, and lines about it."""
    options, lines = options_of(adapter, spec)
    given = setup.model_fields_set
    own = sorted(option_name(key) for key in options if key in given)
    if own:
        text = f"{', '.join(own)} as given, in place of what the adapter says"
        lines.append(Assumption("adapter_options_given", text))
    return setup.model_copy(update={key: value for key, value in options.items() if key not in given}), lines


def refuse_dora(adapter: Adapter) -> None:
    """Raise ConfigError for an adapter with DoRA's magnitudes, which is computed in training only."""
    if adapter.config.get("use_dora") or (isinstance(adapter, LoraFile) and adapter.dora):
        raise ConfigError(
            "the adapter uses DoRA (use_dora), and memcalc computes that in training only; merge it into its base for "
            "inference."
        )
