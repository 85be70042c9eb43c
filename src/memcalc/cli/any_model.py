"""MODEL as `memcalc MODEL` takes it, with its options, for commands that answer for all of them in their own way."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from inspect import Parameter
from typing import Annotated, Any

import typer

from memcalc.cli import model_options as option
from memcalc.cli.bare_model import meant_by
from memcalc.cli.errors import warn
from memcalc.cli.job import Request
from memcalc.cli.option_groups import Group, spelt
from memcalc.cli.shape_options import SHAPE, read_shape, shape_parameters
from memcalc.common.escaping import quoted
from memcalc.errors import UsageError
from memcalc.sources.display_names import short_name

_WHERE = {
    "revision": (str | None, option.REVISION),
    "token": (str | None, option.TOKEN),
    "timeout": (str | None, option.TIMEOUT),
    "weights": (str | None, option.WEIGHTS),
    "base": (str | None, option.BASE),
}
_HOW = {
    "generic": (bool, option.GENERIC),
    "generic_ignore": (str | None, option.GENERIC_IGNORE),
    "head": (str | None, option.HEAD),
    "num_labels": (str | None, option.LABELS),
}


@dataclass(frozen=True)
class ModelOptions:
    """The options of a model as they were given: None, or False, where they were not."""

    given: Mapping[str, Any]

    @property
    def how(self) -> dict[str, Any]:
        """Those that say what a config stands for: generic, generic_ignore, head and num_labels."""
        return {name: self.given.get(name, False if name == "generic" else None) for name in _HOW}

    @property
    def where(self) -> dict[str, Any]:
        """Those that say what is read and from where: revision, token, weights, base, and timeout in seconds."""
        found = {name: self.given.get(name) for name in _WHERE}
        return {**found, "timeout": option.read_timeout(found["timeout"])}

    def shape(self, model: str) -> dict[str, Any]:
        """The shape of `model`, which is a count. Raises UsageError for an option that says nothing about a count."""
        self.refuse((*_HOW, *(name for name in _WHERE if name != "timeout")), model)
        return read_shape(self.given)

    def refuse(self, names: Iterable[str], model: str) -> None:
        """Raise UsageError for one of the options `names` that was given, and says nothing about `model`."""
        for name in names:
            if self.given.get(name) not in (None, False):
                raise UsageError(f"{spelt(name)} says nothing about {quoted(model)}; leave it out.")


NOTHING_GIVEN = ModelOptions({})


def _options() -> list[Parameter]:
    return [*(_parameter(name, *kind) for name, kind in {**_WHERE, **_HOW}.items()), *shape_parameters()]


def _parameter(name: str, kind: Any, info: Any) -> Parameter:
    default = False if kind is bool else None
    return Parameter(name, Parameter.KEYWORD_ONLY, default=default, annotation=Annotated[kind, info])


MODEL = Group("options", _options, ModelOptions)
"""The options of a command's models."""

RUN_FILE = Group(
    "of_run",
    lambda: [
        _parameter(
            "of_run",
            str | None,
            typer.Option(
                "--model",
                metavar="PATH|ID|COUNT",
                help="The model of a run file, in place of its own.",
                show_default=False,
                rich_help_panel="Model",
            ),
        )
    ],
    lambda given: given["of_run"],
)
"""The option of a command that takes run files too."""


def answer_for(model: str, request: Request, options: ModelOptions, of_run: str | None) -> None:
    """Answer `request` for a count, a path, a model of the Hub, or a framework's run file, whose model `of_run` is.

    Raises:
        MemcalcError: it is no model, or it cannot be answered for.
    """
    words = meant_by(model)
    if words is None:
        raise no_model(model)
    if of_run is not None and words[0] != "from-config":
        raise UsageError(f"--model says nothing about {quoted(model)}; leave it out.")
    if words[0] == "estimate":
        from memcalc.models.llama_shape import canonical_spec
        from memcalc.units import parse_parameters

        request.read().answer(*canonical_spec(parse_parameters(model), **options.shape(model)))
        return
    options.refuse(SHAPE, model)
    if words[0] == "from-config":
        from memcalc.cli.commands.from_config import estimate_run, refuse_path
        from memcalc.run_configs.read import read

        options.refuse(("base",), model)
        found, how, where = read([model]), options.how, options.where
        del where["base"]
        if of_run is None:
            refuse_path(found)
        found.model = found.model if of_run is None else of_run
        how["head"] = how["head"] or found.setup.get("task")
        estimate_run(found, request, how, where, lambda words: read([model], words))
        return
    job, local = request.read(), words[0] == "from-file"
    loaded = load_model(model, options, local=local)
    option.answer(job, loaded, short_name(model) if local else loaded.name, **options.how)


def load_model(model: str, options: ModelOptions, *, local: bool) -> Any:
    """What a path or a model of the Hub holds. Raises MemcalcError."""
    from memcalc.sources import load

    where = options.where
    if local:
        options.refuse(("revision", "token"), model)
        return load(model, kind="file", weights=where["weights"], base=where["base"], timeout=where["timeout"])
    return load(model, kind="hub", progress=warn, **where)


def no_model(text: str, what: str = "MODEL") -> UsageError:
    """The error for a word that names no model; `what` is the argument or option that it stands in."""
    return UsageError(
        f"{what} cannot be {quoted(text)}: give a path, a model of the Hub such as ORG/NAME, or a parameter count "
        "such as 8B."
    )
