"""The options of a model: one by one, and as a group for commands that take MODEL as `memcalc MODEL` does."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from inspect import Parameter
from typing import Annotated, Any

import typer

from memcalc.cli.option_groups import Group, spelt
from memcalc.cli.options import read_count, read_value
from memcalc.cli.shape_options import read_shape, shape_parameters
from memcalc.common.escaping import quoted
from memcalc.errors import UsageError

_HEADING = "Model"
LONGEST_TIMEOUT = 3600.0

WEIGHTS = typer.Option(
    "--weights",
    metavar="NAME",
    help="One weight file or GGUF type, where there are several.",
    show_default=False,
    rich_help_panel=_HEADING,
)
BASE = typer.Option(
    "--base",
    metavar="MODEL",
    help="The base model of an adapter, in place of the one that it names.",
    show_default=False,
    rich_help_panel=_HEADING,
)
ADAPTER = typer.Option(
    "--adapter",
    metavar="PATH",
    help="A LoRA for the model: a PEFT folder, or a file of kohya, ai-toolkit, XLabs or diffusers.",
    show_default=False,
    rich_help_panel=_HEADING,
)
GENERIC = typer.Option(
    "--generic", help="Estimate a decoder of an unknown family as a Llama-like one.", rich_help_panel=_HEADING
)
GENERIC_IGNORE = typer.Option(
    "--generic-ignore",
    metavar="KEYS",
    help="Keys of the config, with commas, that --generic passes over though they change the answer.",
    show_default=False,
    rich_help_panel=_HEADING,
)
HEAD = typer.Option(
    "--task",
    metavar="TASK",
    show_default="the one that the config names",
    rich_help_panel=_HEADING,
    help="Head to train: causal-lm, masked-lm, seq2seq-lm, sequence-classification, token-classification, "
    "question-answering, image-classification or embedding.",
)
LABELS = typer.Option(
    "--num-labels",
    metavar="N",
    help="Classes of a classification head.",
    show_default="the config's",
    rich_help_panel=_HEADING,
)
REVISION = typer.Option(
    "--revision",
    metavar="REVISION",
    help="Branch, tag or commit.",
    show_default="the main branch",
    rich_help_panel=_HEADING,
)
TOKEN = typer.Option(
    "--token",
    metavar="TOKEN",
    help="Access token for gated and private models.",
    show_default="the login's",
    rich_help_panel=_HEADING,
)
TIMEOUT = typer.Option(
    "--timeout",
    metavar="SECONDS",
    help="Longest time that the Hub may take for everything.",
    show_default="30",
    rich_help_panel=_HEADING,
)


def read_timeout(text: str | None) -> float:
    """Seconds of --timeout. Raises UsageError."""
    if text is None:
        return 30.0
    seconds: float = read_value("--timeout", float, text)
    if not 0 < seconds <= LONGEST_TIMEOUT:
        raise UsageError(
            f"--timeout must be more than 0 and at most {LONGEST_TIMEOUT:.0f} seconds, not {text.strip()}."
        )
    return seconds


FOR_TRANSFORMERS = "--generic and --teacher are for transformers; a diffusion pipeline has no use for them."


def read_head(how: Mapping[str, Any], *, pipeline: bool) -> tuple[list[str], int | None]:
    """The keys of --generic-ignore and the number of --num-labels.

    Args:
        how: the options generic, generic_ignore, head and num_labels as they were given.
        pipeline: whether the model is a diffusion pipeline.

    Raises:
        UsageError: one of them says nothing about such a model.
    """
    if how["generic_ignore"] is not None and not how["generic"]:
        raise UsageError("--generic-ignore names keys that --generic passes over; add --generic, or leave it out.")
    labels = None if how["num_labels"] is None else read_count("--num-labels", how["num_labels"])
    if pipeline and (how["head"] is not None or labels is not None):
        raise UsageError("--task and --num-labels choose what a transformer is trained for; a pipeline has none.")
    if pipeline and how["generic"]:
        raise UsageError(FOR_TRANSFORMERS)
    from memcalc.nn.module_paths import split_names

    return sorted(split_names(how["generic_ignore"] or "")), labels


_WHERE = {
    "revision": (str | None, REVISION),
    "token": (str | None, TOKEN),
    "timeout": (str | None, TIMEOUT),
    "weights": (str | None, WEIGHTS),
    "base": (str | None, BASE),
    "adapter": (str | None, ADAPTER),
}
_HOW = {
    "generic": (bool, GENERIC),
    "generic_ignore": (str | None, GENERIC_IGNORE),
    "head": (str | None, HEAD),
    "num_labels": (str | None, LABELS),
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
        """Those that say what is read and from where; timeout in seconds."""
        found = {name: self.given.get(name) for name in _WHERE}
        return {**found, "timeout": read_timeout(found["timeout"])}

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
