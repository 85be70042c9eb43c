"""The answer for the run that a file or a launch line of a framework describes."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from memcalc.cli.errors import warn
from memcalc.cli.job import Job, Request
from memcalc.cli.loaded_model import answer
from memcalc.cli.model_argument import is_local
from memcalc.cli.options import declared
from memcalc.common.assumption import Assumption
from memcalc.common.escaping import quoted
from memcalc.errors import UsageError, option_name
from memcalc.sources.display_names import short_name

if TYPE_CHECKING:
    from memcalc.decide.remedies import Remedy
    from memcalc.run_configs.mapping import Mapping
    from memcalc.setup.setup import TrainingSetup
    from memcalc.sources import LoadedModel

OF_MODEL = ("task", "num_labels")
"""Options of a model, not of a setup, that a run file can say."""


def refuse_path(found: "Mapping") -> None:
    """Raise UsageError where the run's own model is a path: such are not followed."""
    if found.model is not None and is_local(found.model):
        raise UsageError(
            f"the model is {quoted(found.model)} on a disk: a run file's paths are not followed; give --model PATH."
        )


def estimate_run(
    found: "Mapping",
    request: Request,
    how: dict[str, Any],
    where: dict[str, Any],
    reread: Callable[[Sequence[str]], "Mapping"] | None = None,
) -> None:
    """Answer for the run that was read: `how` and `where` hold the options of its model."""
    from memcalc.run_configs.model_names import repository

    if found.model is None:
        raise UsageError("the run's model is in none of the files: give --model PATH, ID or COUNT.")
    _must_be_known(found, request)
    name = repository(found.model)
    if name is None:
        raise UsageError(f"{found.model} is a shape of {found.framework}'s own: give --model PATH, ID or COUNT.")

    def job(below: dict[str, Any]) -> Job:
        return replace(request.job(found.mode, below), known_remedies=_remedies(found, reread))

    options = declared()
    below = {key: value for key, value in found.setup.items() if key in options and found.mode in options[key].modes}
    if below.get("parallel") == "fsdp1" and below.pop("cpu_offload", None) is not None:
        found.lack("FSDP 1's offloading is not modelled: shards are counted on the GPU, an upper bound")
    lines = _lines(found, below)
    if how["num_labels"] is None and "num_labels" in found.setup:
        how["num_labels"] = str(found.setup["num_labels"])
    if where["weights"] is None and not is_local(name):
        where["weights"] = found.facts.get("weights")
    loaded = _load(name, where)
    if loaded is None:
        from memcalc.models.llama_shape import canonical_spec
        from memcalc.units import parse_parameters

        spec, more = canonical_spec(parse_parameters(name))
        job(below).answer(spec, (*lines, *more))
        return
    if found.mode == "inference" and "seq_len" not in below and request.given.get("seq_len") is None:
        lines = (*lines, *_longest(loaded, below))
    shown = loaded.name if "/" in name and not is_local(name) else short_name(name)
    answer(job(below), loaded, shown, **how, assumptions=lines)


def _remedies(
    found: "Mapping", reread: Callable[[Sequence[str]], "Mapping"] | None
) -> "Callable[[TrainingSetup], Sequence[Remedy] | None] | None":
    """The remedies that the framework has, in its keys; None where its files cannot be read once more."""
    if reread is None:
        return None

    def known(setup: "TrainingSetup") -> "Sequence[Remedy] | None":
        from memcalc.decide.config_remedies import config_remedies

        return config_remedies(found.framework, setup, lambda words: reread(words).setup)

    return known


def _must_be_known(found: "Mapping", request: Request) -> None:
    """What an estimate cannot do without. Raises UsageError."""
    from memcalc.run_configs.optimizer_names import is_known

    given = {*found.setup, *(name for name, value in request.given.items() if value is not None)}
    of_text = found.mode == "training" and found.setup.get("trainer") != "diffusers"
    if of_text and "seq_len" not in given:
        sentence = next((text for text in found.asked if "--seq-len" in text), None)
        raise UsageError(f"{sentence or 'the sequence length is in none of the files: give --seq-len N'}.")
    optimizer = found.setup.get("optimizer")
    if optimizer is not None and request.given.get("optimizer") is None and not is_known(optimizer):
        sentence = next((text for text in found.lacks if "--optimizer" in text), f"{optimizer} is not modelled")
        raise UsageError(f"{sentence}.")
    if "parallel" in found.setup and "gpus" in declared() and "gpus" not in given:
        raise UsageError("the run is spread over GPUs whose number is in none of the files: give --gpus N.")


def _lines(found: "Mapping", below: dict[str, Any]) -> tuple[Assumption, ...]:
    """What the report owes to the files."""
    said_elsewhere = {*below, *OF_MODEL, *(("cpu_offload",) if found.setup.get("parallel") == "fsdp1" else ())}
    left_over = {key: value for key, value in found.setup.items() if key not in said_elsewhere}
    lost = [f"{option_name(key)} {value}" for key, value in left_over.items() if value not in (False, None, "plain", 1)]
    unmodelled = [f"not computed, as memcalc has no option for it: {', '.join(lost)}"] if lost else []
    by_code = {
        "run_framework": [f"read as a run of {found.framework}"],
        "run_file_assumed": found.assumed,
        "run_file_not_modelled": [*found.lacks, *unmodelled],
        "run_file_without_effect": found.dead,
    }
    return tuple(Assumption(code, line) for code, lines in by_code.items() for line in lines)


def _longest(loaded: "LoadedModel", below: dict[str, Any]) -> tuple[Assumption, ...]:
    """Serving without a length is for the model's own longest sequence."""
    config = loaded.config or {}
    inner = config.get("text_config")
    for values in (config, inner if isinstance(inner, dict) else {}):
        length = values.get("max_position_embeddings")
        if isinstance(length, int) and length > 0:
            below["seq_len"] = length
            text = f"the longest sequence is the model's own: {length} tokens (--seq-len for less)"
            return (Assumption("sequence_length_of_model", text),)
    return ()


def _load(name: str, where: dict[str, Any]) -> "LoadedModel | None":
    """The model on disk or on the Hub; None where `name` is a parameter count."""
    from memcalc.sources import load
    from memcalc.units import parse_parameters

    if is_local(name):
        return load(name, kind="file", weights=where["weights"], progress=warn)
    if "/" not in name:
        try:
            parse_parameters(name)
        except UsageError:
            pass
        else:
            return None
    return load(name, kind="hub", progress=warn, **where)
