"""`memcalc calibration`: what `verify` measured on this machine."""

from dataclasses import asdict
from typing import Annotated

import typer

from memcalc.cli.output import JSON, print_json, print_table, write
from memcalc.errors import MemcalcError, UsageError
from memcalc.render.tables import Column
from memcalc.units import format_bytes

_COLUMNS = (
    Column("GPU", whole=True),
    Column("driver"),
    Column("torch"),
    Column("processes", right=True),
    Column("context", right=True, whole=True),
    Column("workspace", right=True, whole=True),
    Column("reserve", right=True, whole=True),
)


def command(
    json: Annotated[bool, JSON] = False,
    clear: Annotated[bool, typer.Option("--clear", help="Forget everything that was measured.")] = False,
) -> None:
    """Show what `memcalc verify` measured on this machine: CUDA context, workspaces and allocator reserve.

    An estimate with --gpu uses it where GPU, driver and torch are the same, and says so; an option that is given wins.
    """
    from memcalc.verification.calibration import calibrations, config_file

    if clear:
        if json:
            raise UsageError("--clear has nothing to print as JSON; leave out one of the two.")
        try:
            config_file().unlink(missing_ok=True)
        except OSError as problem:
            raise MemcalcError(f"{config_file()} cannot be removed ({problem.strerror}).") from None
        return
    found = calibrations()
    if json:
        print_json([asdict(one) for one in found])
        return
    if not found:
        write("nothing was measured on this machine yet: memcalc verify MODEL -- python train.py\n")
        return
    rows = [
        (
            one.gpu,
            one.driver,
            one.torch,
            str(one.processes),
            format_bytes(one.context),
            "" if one.workspace is None else format_bytes(one.workspace),
            f"{one.reserve:.1%}",
        )
        for one in found
    ]
    print_table(_COLUMNS, rows)
    write(f"kept in {config_file()}\n")
