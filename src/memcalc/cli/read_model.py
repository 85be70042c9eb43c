"""A model as one word: a path, a model of the Hub, or a parameter count, for commands that ask about it many times."""

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from memcalc.cli.errors import warn
from memcalc.cli.model_options import NOTHING_GIVEN, ModelOptions, read_head
from memcalc.common.escaping import quoted
from memcalc.errors import UsageError

if TYPE_CHECKING:
    from memcalc.common.assumption import Assumption
    from memcalc.models.spec import ModelSpec
    from memcalc.setup.setup import InferenceSetup, TrainingSetup
    from memcalc.sources.loaded_model import LoadedModel
    from memcalc.sources.model_spec import Described


@dataclass(frozen=True)
class ReadModel:
    """What a word named: the spec of a count, or what was loaded."""

    name: str
    options: ModelOptions
    count: "tuple[ModelSpec, tuple[Assumption, ...]] | None" = None
    loaded: "LoadedModel | None" = None

    def described(self, setup: "TrainingSetup | InferenceSetup") -> "Described":
        """What is estimated under `setup`, with what the model's files decide filled in. Raises MemcalcError."""
        from memcalc.sources.model_spec import Described, describe

        if self.loaded is None:
            assert self.count is not None
            return Described(self.count[0], setup, self.count[1])
        ignored, labels = read_head(self.options.how, pipeline=self.loaded.is_pipeline)
        if self.loaded.is_pipeline:
            from memcalc.sources.diffusers_spec import describe_pipeline

            found = describe_pipeline(self.loaded, self.name, setup)
            if found is not None:
                return found
            raise UsageError(
                f"{self.name} is a pipeline whose denoiser memcalc does not know; from-file and from-hub count its "
                "weights."
            )
        how = self.options.how
        found = describe(self.loaded, self.name, setup, generic=how["generic"], generic_ignore=ignored)
        if how["head"] is None and labels is None:
            return found
        return replace(found, spec=found.spec.with_head(how["head"], labels))

    def spec(self) -> "ModelSpec":
        """What its config says, whatever it is run for. Raises MemcalcError."""
        from memcalc.sources.diffusers_spec import pipeline_spec
        from memcalc.sources.model_spec import spec_of

        if self.loaded is None:
            assert self.count is not None
            return self.count[0]
        if self.loaded.components:
            return pipeline_spec(self.loaded, self.name)[0]
        return spec_of(self.loaded, self.name, generic=False)[0]


def read_model(text: str, options: ModelOptions = NOTHING_GIVEN, what: str = "MODEL") -> ReadModel:
    """The model that `text` names.

    `what` names the argument in messages. Raises MemcalcError where it is no model.
    """
    from memcalc.cli.model_argument import is_local
    from memcalc.cli.shape_options import SHAPE
    from memcalc.models.llama_shape import canonical_spec
    from memcalc.sources.display_names import short_name
    from memcalc.units import parse_parameters

    local = is_local(text)
    if not local and "/" not in text:
        try:
            count = parse_parameters(text)
        except UsageError:
            raise no_model(text, what) from None
        spec, lines = canonical_spec(count, **options.shape(text))
        return ReadModel(spec.name, options, (spec, tuple(lines)))
    options.refuse(SHAPE, text)
    loaded = load_model(text, options, local=local)
    return ReadModel(short_name(text) if local else loaded.name, options, loaded=loaded)


def load_model(model: str, options: ModelOptions, *, local: bool) -> "LoadedModel":
    """What a path or a model of the Hub holds. Raises MemcalcError."""
    from memcalc.sources import load

    where = options.where
    if local:
        options.refuse(("revision", "token"), model)
        del where["revision"], where["token"]
        return load(model, kind="file", **where)
    return load(model, kind="hub", progress=warn, **where)


def no_model(text: str, what: str = "MODEL") -> UsageError:
    """The error for a word that names no model; `what` is the argument or option that it stands in."""
    return UsageError(
        f"{what} cannot be {quoted(text)}: give a path, a model of the Hub such as ORG/NAME, or a parameter count "
        "such as 8B."
    )
