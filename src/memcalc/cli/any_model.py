"""MODEL as `memcalc MODEL` takes it, for commands that answer for all of them in their own way."""

from typing import Any

from memcalc.cli.bare_model import meant_by
from memcalc.cli.errors import warn
from memcalc.cli.job import Request
from memcalc.cli.model_options import answer, read_timeout
from memcalc.common.escaping import quoted
from memcalc.errors import UsageError
from memcalc.sources.display_names import short_name


def answer_for(model: str, request: Request, how: dict[str, Any], where: dict[str, Any]) -> None:
    """Answer `request` for a count, a path, a model of the Hub, or a framework's run file.

    Args:
        model: what was typed.
        request: the options of the job and of the answer.
        how: the options generic, generic_ignore, head and num_labels.
        where: the options revision, token, timeout, weights, base, and model, which says the model of a run file.

    Raises:
        MemcalcError: it is no model, or it cannot be answered for.
    """
    words = meant_by(model)
    if words is None:
        raise UsageError(
            f"MODEL cannot be {quoted(model)}: give a path, a model of the Hub such as ORG/NAME, or a parameter count "
            "such as 8B."
        )
    where = {**where, "timeout": read_timeout(where["timeout"])}
    if words[0] == "estimate":
        _refuse({**how, **where, "timeout": None})
        from memcalc.models.llama_shape import canonical_spec
        from memcalc.units import parse_parameters

        request.read().answer(*canonical_spec(parse_parameters(model)))
    elif words[0] == "from-config":
        from memcalc.cli.commands.from_config import estimate_run, refuse_path
        from memcalc.run_configs.read import read

        _refuse({"base": where.pop("base")})
        found, of_run = read([model]), where.pop("model")
        if of_run is None:
            refuse_path(found)
        found.model = found.model if of_run is None else of_run
        how = {**how, "head": how["head"] or found.setup.get("task")}
        estimate_run(found, request, how, where, lambda words: read([model], words))
    else:
        _refuse({"model": where.pop("model")})
        from memcalc.sources import load

        job, local = request.read(), words[0] == "from-file"
        if local:
            _refuse({name: where[name] for name in ("revision", "token")})
            loaded = load(model, kind="file", weights=where["weights"], base=where["base"])
        else:
            loaded = load(model, kind="hub", progress=warn, **where)
        answer(job, loaded, short_name(model) if local else loaded.name, **how)


def _refuse(options: dict[str, Any]) -> None:
    """Raise UsageError for an option that says nothing about this model."""
    for name, value in options.items():
        if value not in (None, False):
            option = {"head": "task"}.get(name, name).replace("_", "-")
            raise UsageError(f"--{option} says nothing about this model; leave it out.")
