"""ModelSpec: what is known of a model before anything is computed."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import NoneType
from typing import Any, Self

from memcalc.common.arguments import check_type
from memcalc.common.assumption import Assumption
from memcalc.common.escaping import quoted
from memcalc.config.reader import Config
from memcalc.errors import ConfigError, UsageError, close_matches
from memcalc.models.registry import family
from memcalc.models.stored_weights import StoredWeights

_POSITIONS = "max_position_embeddings"


@dataclass(frozen=True, kw_only=True)
class PipelineComponent:
    """A model of a diffusion pipeline beside its denoiser.

    name: that of model_index.json.
    class_name: its class in diffusers or Transformers.
    spec: the model; None where no family describes it.
    nbytes, parameters: its weights, where there is no spec.
    """

    name: str
    class_name: str
    spec: ModelSpec | None = None
    nbytes: int = 0
    parameters: int = 0


@dataclass(frozen=True, kw_only=True)
class KeptAdapter:
    """A LoRA that a denoiser is called with, not merged into its weights.

    rank, targets, ranks: what `--lora-rank`, `--lora-targets` and `--lora-rank-pattern` say in training.
    """

    rank: int
    targets: str | None = None
    ranks: str | None = None


@dataclass(frozen=True, kw_only=True)
class ModelSpec:
    """A model as its config.json describes it.

    `config` keeps config.json's own words; the family (`model_type`) knows what they mean and what a missing one is.
    """

    name: str
    """What to call the model in reports."""
    model_type: str
    """The family, as config.json names it."""
    architecture: str | None = None
    """The class that config.json names first under `architectures`."""
    config: Mapping[str, Any]
    """The values of config.json."""
    stored: StoredWeights | None = None
    """Its weights as they are stored, where headers tell."""
    extra_weights: Mapping[str, int] = field(default_factory=dict)
    """Bytes of weights that are served besides the model's own (an adapter), by name."""
    adapter: KeptAdapter | None = None
    """The LoRA that a denoiser is called with."""
    component: str = ""
    """What the pipeline that a denoiser belongs to calls it."""
    components: tuple[PipelineComponent, ...] = ()
    """The other models of the diffusion pipeline that a denoiser belongs to, in the order in which they run."""
    assumptions: tuple[Assumption, ...] = ()
    """What was taken for granted when it was read; its reports begin with that."""

    @property
    def key(self) -> SpecKey:
        """The spec as a key of a cache: equal for specs that describe the same model."""
        return SpecKey(self)

    def with_head(self, head: str | None = None, num_labels: int | None = None) -> ModelSpec:
        """This model with the head of a task (a key of `HEADS`), with so many classes; None leaves each as it is.

        Raises UsageError where there is no such task.
        """
        check_type("--task", head, (str, NoneType), "the name of a task")
        check_type("--num-labels", num_labels, (int, NoneType), "a whole number")
        if head is not None and head not in HEADS:
            near = close_matches(head, list(HEADS)) or f": choose from {', '.join(HEADS)}."
            raise UsageError(f"--task cannot be {quoted(head)}{near}")
        architecture = self.architecture if head is None else HEADS[head]
        if num_labels is None:
            return replace(self, architecture=architecture)
        if "Classification" not in (architecture or ""):
            raise UsageError(
                "--num-labels counts the classes of a classification head, which this model does not have; name one "
                "with --task, such as --task sequence-classification."
            )
        return replace(self, architecture=architecture, config={**self.config, "num_labels": num_labels})

    @property
    def positions(self) -> int | None:
        """How many positions the config says that the model was made for; None where it does not say.

        Raises ConfigError where it says what no number of positions can be.
        """
        known = family(self.model_type)
        if known.positions_of_target:
            return None
        return Config(self.config, known.defaults, known.aliases).optional(_POSITIONS) or self._text_positions()

    def _text_positions(self) -> int | None:
        """Those of the decoder of `text_config`: stated there, or the default of its class."""
        from memcalc.models.registry import families

        text = self.config.get("text_config")
        if not isinstance(text, Mapping):
            return None
        where, inner = "config.json's 'text_config'", text.get("model_type")
        if inner not in families():
            return Config(text, where=where).optional(_POSITIONS)
        row = family(str(inner))
        return Config(text, row.defaults, row.aliases, where).optional(_POSITIONS)

    @classmethod
    def from_config(cls, config: Mapping[str, object], name: str = "model") -> Self:
        """The spec of a config.json that was read into `config`.

        Raises ConfigError where the family is not named, UnknownFamilyError where no family has that name.
        """
        from memcalc.models.registry import families

        if isinstance(config, str) or hasattr(config, "__fspath__"):
            raise UsageError(
                f"from_config needs the object of a config.json, not its path ({quoted(str(config))}); read the file "
                "with json.load."
            )
        check_type("config", config, Mapping, "the object of a config.json")
        check_type("name", name, str, "text")
        model_type = config.get("model_type")
        part = config.get("_class_name")
        if model_type is None and isinstance(part, str) and part in families():
            return cls(name=name, model_type=part, config=dict(config))
        if model_type is None and isinstance(part, str):
            raise ConfigError(
                f"config.json describes {quoted(part)}, a part of a diffusion pipeline; give the pipeline's folder, "
                "the one with model_index.json."
            )
        if model_type is not None and not isinstance(model_type, str):
            raise ConfigError("config.json has no 'model_type' that is a string; correct it.")
        if not model_type:
            raise ConfigError(
                'config.json has no \'model_type\', so the family is unknown; add it (such as "model_type": "llama").'
            )
        family(model_type)
        architectures = config.get("architectures")
        first = architectures[0] if isinstance(architectures, (list, tuple)) and architectures else None
        return cls(
            name=name,
            model_type=model_type,
            architecture=first if isinstance(first, str) else None,
            config=dict(config),
        )


HEADS = {
    "causal-lm": "ForCausalLM",
    "masked-lm": "ForMaskedLM",
    "seq2seq-lm": "ForConditionalGeneration",
    "sequence-classification": "ForSequenceClassification",
    "token-classification": "ForTokenClassification",
    "question-answering": "ForQuestionAnswering",
    "image-classification": "ForImageClassification",
    "embedding": "Model",
}
"""Tasks, and how the class of Transformers ends whose head serves them."""


class SpecKey:
    """A spec that can be hashed, by what describes the model; its name does not."""

    __slots__ = ("spec", "text")

    def __init__(self, spec: ModelSpec) -> None:
        self.spec = spec
        self.text: str = (
            f"{spec.model_type} {spec.architecture} {json.dumps(dict(spec.config), sort_keys=True, default=repr)}"
            f"{spec.adapter}{[(part.name, part.spec and part.spec.key.text) for part in spec.components]}"
        )

    def __eq__(self, other: object) -> bool:
        return isinstance(other, SpecKey) and self.text == other.text

    def __hash__(self) -> int:
        return hash(self.text)
