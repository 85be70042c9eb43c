"""`memcalc inspect`: what memcalc understands of a model."""

import json as json_format
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated

import typer

from memcalc.cli import output
from memcalc.cli.errors import warn
from memcalc.cli.model_argument import is_local
from memcalc.cli.model_options import BASE, GENERIC, REVISION, TIMEOUT, TOKEN, WEIGHTS, read_timeout
from memcalc.common.escaping import quoted
from memcalc.errors import UsageError
from memcalc.render.terminal_text import visible
from memcalc.sources.display_names import short_name
from memcalc.units import format_bytes, format_count

if TYPE_CHECKING:
    from memcalc.sources.inspection import Inspection


def command(
    model: Annotated[
        str, typer.Argument(metavar="PATH|ORG/NAME", help="A path, or a model of the Hub.", show_default=False)
    ],
    revision: Annotated[str | None, REVISION] = None,
    token: Annotated[str | None, TOKEN] = None,
    timeout: Annotated[str | None, TIMEOUT] = None,
    weights: Annotated[str | None, WEIGHTS] = None,
    base: Annotated[str | None, BASE] = None,
    generic: Annotated[bool, GENERIC] = False,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object.", rich_help_panel="Output")] = False,
) -> None:
    """Show what memcalc understands of a model: family, shapes, parameters by part, stored bytes, what was ignored."""
    from memcalc.sources import load
    from memcalc.sources.inspection import inspect_model

    local = is_local(model)
    if not local and "/" not in model:
        raise UsageError(f"inspect needs a path, or a model of the Hub such as ORG/NAME, not {quoted(model)}.")
    loaded = load(
        model,
        kind="file" if local else "hub",
        revision=revision,
        token=token,
        timeout=read_timeout(timeout),
        weights=weights,
        base=base,
        progress=warn,
    )
    found = inspect_model(loaded, short_name(model) if local else loaded.name, generic=generic)
    if json:
        output.write(json_format.dumps(found.to_dict(), indent=2) + "\n")
    else:
        output.write(f"{visible(_title(found), output.speaks_unicode())}\n")
        output.print_fields(list(_fields(found)))


def _title(found: "Inspection") -> str:
    architecture = f" ({found.architecture})" if found.architecture else ""
    return f"{found.name}: {found.family or 'family unknown'}{architecture}"


def _fields(found: "Inspection") -> Iterator[tuple[str, str]]:
    """The findings: what, and its value."""
    counts = found.parameters
    yield "parameters", f"{counts.total:,} ({format_count(counts.total)})"
    if counts.active is not None and counts.active != counts.total:
        yield "  active", f"{counts.active:,} ({format_count(counts.active)})"
    for part, count in sorted(counts.parts.items(), key=lambda item: -item[1]):
        yield f"  {part}", f"{count:,}"
    if found.stored_bytes is not None:
        kinds = ", ".join(f"{name} {format_bytes(nbytes)}" for name, nbytes in found.stored_bytes_by_dtype.items())
        stored = f"{found.stored_bytes:,} bytes ({format_bytes(found.stored_bytes)})"
        yield "stored", f"{stored}: {kinds}" if kinds else stored
    yield "dtypes", ", ".join(f"{name} {dtype or 'unknown'}" for name, dtype in found.dtypes.items())
    if found.quantization:
        yield "quantized", found.quantization
    for file in found.ignored:
        size = "" if file["bytes"] is None else f" ({format_bytes(file['bytes'])})"
        yield "ignored", f"{file['path']}{size}: {file['reason']}"
    for note in found.notes:
        yield "note", note
    if found.shapes:
        yield "shapes", ", ".join(f"{key} {value}" for key, value in found.shapes.items())
