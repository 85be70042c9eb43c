"""Everything worth a line in a report about where a model came from: files, quantization, dtypes, disagreements."""

from collections.abc import Iterable, Iterator, Mapping

from memcalc.common.assumption import Assumption
from memcalc.sources.checkpoint.checkpoint import Checkpoint
from memcalc.sources.config_vs_weights import Shapes, dtypes, reconcile
from memcalc.sources.loaded_model import LoadedModel
from memcalc.units import format_bytes, format_count


def remarks(
    model: LoadedModel,
    *,
    parameters: int | None = None,
    expected: Shapes | None = None,
    tied: bool | None = None,
    layers: int | None = None,
    dtype: str | None = None,
) -> tuple[Assumption, ...]:
    """The lines, each once, the most surprising first.

    Args:
        model: what was loaded.
        parameters, expected, tied, layers: what the config builds, as `reconcile` takes them.
        dtype: the dtype that the user asked for, None for the model's own.
    """
    lines: list[Assumption] = []
    if model.checkpoint is not None:
        found = reconcile(model.checkpoint, parameters=parameters, expected=expected, tied=tied, layers=layers)
        lines += _coded("config_and_weights_differ", found)
        lines += _coded("checkpoint_contents", model.checkpoint.notes)
        lines += _coded("stored_quantization", _quantized(model.checkpoint))
        lines += _coded("stored_dtype", _dtypes(model.checkpoint, model.config, dtype))
    lines += _coded("files_used", model.notes)
    if model.ignored:
        known = sum(file.nbytes or 0 for file in model.ignored)
        text = f"{len(model.ignored):,} other weight files ({format_bytes(known)}) are not counted; inspect names them"
        lines.append(Assumption("other_weight_files", text))
    if model.custom_code:
        text = "the config asks for code of the repository (auto_map), which is never run"
        lines.append(Assumption("custom_code_not_run", text))
    return tuple(dict.fromkeys(lines))


def _coded(code: str, lines: Iterable[str]) -> Iterator[Assumption]:
    return (Assumption(code, line) for line in lines)


def _quantized(checkpoint: Checkpoint) -> list[str]:
    if not checkpoint.quantized_parameters:
        return []
    method = checkpoint.quantization or ", ".join(checkpoint.packings)
    packed, total = format_count(checkpoint.quantized_parameters), format_count(checkpoint.parameters)
    return [f"stored quantized ({method}): {packed} of {total} parameters, the others wide"]


def _dtypes(checkpoint: Checkpoint, config: Mapping[str, object] | None, asked: str | None) -> list[str]:
    """Only where the three differ; the bytes of the other choice are offered with it."""
    found = dtypes(checkpoint, config, asked)
    if found.stored in (None, found.loaded) and found.declared in (None, found.loaded):
        return []
    line = found.line()
    if found.stored is not None and found.stored != found.loaded:
        as_loaded, as_stored = (format_bytes(checkpoint.loaded_bytes(name)) for name in (found.loaded, None))
        line += f" (weights {as_loaded} instead of {as_stored})"
    return [line]
