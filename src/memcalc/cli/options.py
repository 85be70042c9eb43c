"""The setup's fields as options of the command line: declared once, in `memcalc.setup.setup`, and read here.

Every option takes text and is read here, so that a slip is answered in the same words everywhere.
"""

import re
from collections.abc import Mapping
from functools import cache
from inspect import Parameter
from typing import Annotated, Any, Literal, NamedTuple, get_args, get_origin

import typer

from memcalc.common.escaping import quoted
from memcalc.errors import UsageError, option_name
from memcalc.setup.inference_options import CacheType
from memcalc.setup.sentences import choice_sentence, value_type
from memcalc.setup.setup import InferenceSetup, TrainingSetup

SETUPS: dict[str, type[TrainingSetup] | type[InferenceSetup]] = {"training": TrainingSetup, "inference": InferenceSetup}
"""The setup of each `--mode`."""

_WHOLE = re.compile(r"[+-]?(?:[0-9]{1,3}(?:,[0-9]{3}){1,8}|[0-9][0-9_]{0,30})")
_DECIMAL = re.compile(r"[+-]?(?:[0-9]{1,30}(?:\.[0-9]{0,60})?|\.[0-9]{1,60})(?:[eE][+-]?[0-9]{1,2})?")


class Declared(NamedTuple):
    """A field of one or more setups, as an option."""

    name: str
    kind: Any
    default: Any
    help: str
    panel: str
    unset: str
    """What the default None stands for, in a few words."""
    modes: tuple[str, ...]

    @property
    def option(self) -> str:
        """The option's name on the command line."""
        return option_name(self.name)

    def parameter(self) -> Parameter:
        """The option as a keyword parameter of a command."""
        if self.kind is bool:
            names, values = f"{self.option}/--no-{self.option[2:]}", {}
        else:
            choices = get_args(self.kind) if get_origin(self.kind) is Literal else ()
            names = self.option
            values = {
                "metavar": "|".join(choices) or _METAVARS[self.kind],
                "autocompletion": _completion(self.name, choices),
            }
        shown = self.unset if self.default is None else str(self.default).lower()
        default = False if shown in ("", "false") else shown
        info = typer.Option(names, help=self._help(), show_default=default, rich_help_panel=self.panel, **values)
        kind = bool if self.kind is bool else str
        return Parameter(self.name, Parameter.KEYWORD_ONLY, default=None, annotation=Annotated[kind | None, info])

    def read(self, given: Any) -> Any:
        """The value that `given`, text or a flag, stands for. Raises UsageError."""
        return given if isinstance(given, bool) else read_value(self.option, self.kind, given)

    def _help(self) -> str:
        return self.help if len(self.modes) == len(SETUPS) else f"{self.help} ({self.modes[0]})"


SAME_WORDS = {
    "bfloat16": "bf16",
    "float16": "fp16",
    "half": "fp16",
    "float32": "fp32",
    "flash-attention-2": "flash",
    "flash-attention-3": "flash",
    "flash-attention": "flash",
    "cut-cross-entropy-loss": "cut-cross-entropy",
}
"""Words of Transformers and PyTorch for values that have shorter names here."""


def _plain_word(text: str) -> str:
    """A value as it is compared: case does not matter, nor `_` for `-`, nor who says it."""
    word = text.strip().lower().replace("_", "-").removeprefix("torch.")
    return SAME_WORDS.get(word, word)


_METAVARS = {int: "N", float: "X", str: "TEXT"}


@cache
def declared() -> Mapping[str, Declared]:
    """Every option of every setup, by field name, in the order of declaration."""
    found: dict[str, Declared] = {}
    for mode, setup in SETUPS.items():
        for name, field in setup.model_fields.items():
            modes = (*found[name].modes, mode) if name in found else (mode,)
            extra = field.json_schema_extra
            assert isinstance(extra, dict)
            kind, text = value_type(field.annotation), field.description or ""
            panel, unset = str(extra["panel"]), str(extra.get("unset", ""))
            found[name] = Declared(name, kind, field.default, text, panel, unset, modes)
    return found


def read_value(option: str, kind: Any, text: str) -> Any:
    """`text` as a value of `kind`: int, float, str, or one of a Literal's strings.

    Raises:
        UsageError: it is none; the message names `option` and what would do.
    """
    if get_origin(kind) is Literal:
        choices = [str(choice) for choice in get_args(kind)]
        found = {_plain_word(choice): choice for choice in choices}.get(_plain_word(text))
        if found is None and option == "--kv-dtype" and text.strip().lower() in get_args(CacheType):
            raise UsageError(
                f"--kv-dtype is for all engines, and {text.strip().lower()} is one of llama.cpp's types; give "
                "--engine llama.cpp with --cache-type-k and --cache-type-v."
            )
        if found is None:
            raise UsageError(choice_sentence(option, text, choices))
        return found
    if kind is int:
        if not _WHOLE.fullmatch(text.strip()):
            if text.strip().isdecimal():
                raise UsageError(f"{option} must be a smaller number than {quoted(text)}.")
            raise UsageError(f"{option} needs a whole number, not {quoted(text)}.")
        return int(re.sub("[_,]", "", text))
    if kind is float:
        if not _DECIMAL.fullmatch(text.strip()):
            raise UsageError(f"{option} needs a number, not {quoted(text)}.")
        return float(text)
    if not text.strip():
        raise UsageError(f"{option} is empty: give a value, or leave the option out.")
    return text


def read_count(option: str, text: str) -> int:
    """`text` as a whole number of at least one. Raises UsageError."""
    value: int = read_value(option, int, text)
    if value < 1:
        raise UsageError(f"{option} must be at least 1, not {value}.")
    return value


SAME = {("inference", "precision"): "dtype"}
"""In a mode, an option of the other one that can only mean the option named."""


def build_setup(mode: str, given: Mapping[str, Any]) -> TrainingSetup | InferenceSetup:
    """The setup of `mode` from the options that the user gave (None: not given), checked.

    Raises:
        UsageError: an option of the other mode, a value that cannot be read, or values that contradict each other.
    """
    values: dict[str, Any] = {}
    for name, value in given.items():
        if value is None:
            continue
        option = declared()[SAME.get((mode, name), name)]
        if mode not in option.modes:
            raise UsageError(
                f"{option.option} belongs to --mode {option.modes[0]}, not to {mode}: leave it out, or change --mode."
            )
        read = option.read(value)
        if values.setdefault(option.name, read) != read:
            same = {option.name, *(other for (_, other), meant in SAME.items() if meant == option.name)}
            twice = " and ".join(sorted(map(option_name, same)))
            raise UsageError(f"{twice} say the same in --mode {mode}: give one of them.")
    return SETUPS[mode](**values)


def _completion(name: str, choices: tuple[str, ...]) -> Any:
    return _complete_optimizer if name == "optimizer" else _completing(choices)


def _complete_optimizer(incomplete: str) -> list[str]:
    from memcalc.tables.optimizers import OPTIMIZERS

    return [name for name in OPTIMIZERS if name.startswith(incomplete)]


def _completing(choices: tuple[str, ...]) -> Any:
    if not choices:
        return None

    def complete(incomplete: str) -> list[str]:
        return [choice for choice in choices if choice.startswith(incomplete)]

    return complete
