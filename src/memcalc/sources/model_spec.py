"""From what was read to what is estimated: the spec of a model, and the lines that its report owes to its files."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from memcalc.common.assumption import Assumption
from memcalc.config.reader import Config
from memcalc.errors import ConfigError, MemcalcError, UnknownFamilyError
from memcalc.models.registry import family
from memcalc.models.spec import ModelSpec
from memcalc.models.stored_weights import GGUF
from memcalc.nn.state_dict import NamedWeight, weights_by_stack
from memcalc.setup.setup import InferenceSetup, TrainingSetup
from memcalc.sources.adapter import Adapter
from memcalc.sources.checkpoint.bytes_when_loaded import stored_weights
from memcalc.sources.checkpoint.checkpoint import Checkpoint
from memcalc.sources.config_vs_weights import part_of
from memcalc.sources.display_names import shown, some
from memcalc.sources.generic.config import generic_config
from memcalc.sources.loaded_model import LoadedModel
from memcalc.sources.notes import remarks
from memcalc.tables.dtypes import short
from memcalc.tables.precisions import PRECISIONS
from memcalc.training.step import build
from memcalc.units import format_bytes, format_count

Setup = TrainingSetup | InferenceSetup

_NAME = re.compile(r"[\w.]+")
"""A target that is a module's name and no pattern."""


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

    @classmethod
    def of(cls, spec: ModelSpec) -> "Built":
        """Build the spec's network. Raises ConfigError where its config lacks or contradicts itself."""
        kin = family(spec.model_type)
        config = Config(spec.config, kin.defaults, kin.aliases)
        expected: dict[str, int] = {}
        for path, positions, weights in weights_by_stack(build(spec)):
            for name, count in _by_part(path, positions, weights).items():
                for position in positions or (0,):
                    full = f"{path}.{position}.{name}" if positions else name
                    expected[full] = expected.get(full, 0) + count
        layers = config.get("num_hidden_layers")
        tied = config.get("tie_word_embeddings") is True and not any(part_of(name) == "head" for name in expected)
        return cls(expected, tied, layers if isinstance(layers, int) else None)

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


def describe(model: LoadedModel, name: str, setup: Setup, *, generic: bool = False) -> Described:
    """The spec to estimate, under `name`.

    Raises:
        ConfigError, UnknownFamilyError: the config does not tell what the model is; the message names --generic.
    """
    if model.adapter is not None:
        return _with_adapter(model, model.adapter, name, setup, generic=generic)
    with model.naming_its_file():
        return _described(model, name, setup, generic=generic)


def _described(model: LoadedModel, name: str, setup: Setup, *, generic: bool) -> Described:
    spec, lines = spec_of(model, name, generic=generic)
    alike = generic and bool(lines)
    if model.checkpoint is not None:
        built = Built.of(spec)
        lines += remarks(model, expected=built.expected, tied=built.tied, layers=built.layers, dtype=_asked(setup))
        held = stored_weights(model.checkpoint, built=None if alike else built.parts, layers=built.layers, exact=alike)
        spec = replace(spec, stored=held)
        if held.kind == GGUF:
            setup, more = _of_gguf(model.checkpoint, setup)
            lines += more
    else:
        lines += remarks(model)
    return Described(spec, setup, lines)


def spec_of(model: LoadedModel, name: str, *, generic: bool) -> tuple[ModelSpec, tuple[Assumption, ...]]:
    """The spec of a model's config; with `generic`, that of a Llama-like decoder where its family is unknown."""
    try:
        return ModelSpec.from_config(model.require_config(), name), ()
    except (UnknownFamilyError, ConfigError) as problem:
        if not generic:
            raise _offering_generic(problem, model) from None
    config, lines = generic_config(model)
    return ModelSpec.from_config(config, name), lines


def _offering_generic(problem: MemcalcError, model: LoadedModel) -> MemcalcError:
    text = str(problem).rstrip(".")
    if "--generic" in text or "diffusion pipeline" in text or model.components or model.adapter is not None:
        return problem
    return type(problem)(f"{text}; --generic estimates it as a Llama-like decoder.")


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
    embedding = sum(t.nbytes for t in checkpoint.tensors if t.name == "token_embd.weight")
    if setup.engine == "llama.cpp" and embedding:
        lines.append(
            Assumption(
                "llama_cpp_embedding",
                f"llama.cpp keeps the token embedding ({format_bytes(embedding)}) in host memory; it is counted here",
            )
        )
    return setup, tuple(lines)


def _with_adapter(model: LoadedModel, adapter: Adapter, name: str, setup: Setup, *, generic: bool) -> Described:
    """The base model that an adapter needs; training goes on as its config says, serving adds its weights."""
    base = model.base
    if base is None:
        model.require_config()  # says which base is missing, unless a config.json lies beside the adapter
        base = replace(model, adapter=None)
    found = describe(base, name, setup, generic=generic)
    size = "" if adapter.parameters is None else f" of {format_count(adapter.parameters)} parameters"
    lines = [Assumption("adapter", f"{adapter.kind} adapter{size} for {shown(adapter.base_model or base.name)}")]
    spec, setup = found.spec, found.setup
    if isinstance(setup, TrainingSetup):
        setup, more = _trained_on(adapter, setup)
        lines += more
    elif adapter.weights is not None:
        nbytes = adapter.weights.loaded_bytes(setup.dtype)
        spec = replace(spec, beside={f"{adapter.kind} adapter": nbytes})
        lines.append(Assumption("adapter_not_merged", "the adapter is kept beside the weights, not merged into them"))
    return Described(spec, setup, (*lines, *remarks(replace(model, config=None)), *found.assumptions))


def _trained_on(adapter: Adapter, setup: TrainingSetup) -> tuple[TrainingSetup, list[Assumption]]:
    """LoRA options as adapter_config.json has them, where the user gives none."""
    if adapter.kind != "LORA" or adapter.rank is None or setup.lora_rank is not None or setup.train_only != "all":
        return setup, []
    options: dict[str, Any] = {"lora_rank": adapter.rank}
    plain = all(target == "all-linear" or _NAME.fullmatch(target) for target in adapter.targets)
    if adapter.targets and plain:
        options["lora_targets"] = ",".join(adapter.targets)
    if adapter.modules_to_save:
        options["modules_to_save"] = ",".join(adapter.modules_to_save)
    targets = f" on {some(list(adapter.targets), 8)}" if adapter.targets and plain else ""
    return setup.model_copy(update=options), [
        Assumption("adapter_lora_options", f"LoRA of rank {adapter.rank}{targets}, as adapter_config.json says")
    ]
