"""The answer for MODEL as `memcalc MODEL` takes it: a count, a path, a model of the Hub, or a framework's run file."""

from memcalc.cli.bare_model import meant_by
from memcalc.cli.job import Request
from memcalc.cli.loaded_model import answer
from memcalc.cli.model_options import ModelOptions
from memcalc.cli.read_model import load_model, no_model
from memcalc.cli.shape_options import SHAPE
from memcalc.common.escaping import quoted
from memcalc.errors import UsageError
from memcalc.sources.display_names import short_name


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
        from memcalc.cli.run_file import estimate_run, refuse_path
        from memcalc.run_configs.read import read

        options.refuse(("base", "adapter"), model)
        found, how, where = read([model]), options.how, options.where
        del where["base"], where["adapter"]
        if of_run is None:
            refuse_path(found)
        found.model = found.model if of_run is None else of_run
        how["head"] = how["head"] or found.setup.get("task")
        estimate_run(found, request, how, where, lambda words: read([model], words))
        return
    job, local = request.read(), words[0] == "from-file"
    loaded = load_model(model, options, local=local)
    answer(job, loaded, short_name(model) if local else loaded.name, **options.how)
