"""Everything worth a line in a report about where a model came from: files, quantization, dtypes, disagreements."""

from collections.abc import Mapping

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
) -> tuple[str, ...]:
    """The lines, each once, the most surprising first.

    Args:
        model: what was loaded.
        parameters, expected, tied, layers: what the config builds, as `reconcile` takes them.
        dtype: the dtype that the user asked for, None for the model's own.
    """
    lines: list[str] = []
    if model.checkpoint is not None:
        lines += reconcile(model.checkpoint, parameters=parameters, expected=expected, tied=tied, layers=layers)
        lines += model.checkpoint.notes
        lines += _quantized(model.checkpoint)
        lines += _dtypes(model.checkpoint, model.config, dtype)
    lines += model.notes
    if model.ignored:
        known = sum(file.nbytes or 0 for file in model.ignored)
        lines.append(
            f"{len(model.ignored):,} other weight files ({format_bytes(known)}) are not counted; inspect names them"
        )
    if model.custom_code:
        lines.append("the config asks for code of the repository (auto_map), which is never run")
    return tuple(dict.fromkeys(lines))


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
