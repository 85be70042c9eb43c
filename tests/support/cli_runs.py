"""Running the command line in this process, and what holds for every refusal."""

import json
from typing import Any

from typer.testing import CliRunner

from memcalc.cli import app
from support.reports import lines


def run(*arguments: str, code: int = 0, **options: Any) -> Any:
    """The result of `memcalc ARGUMENTS`, which must exit with `code`."""
    result = CliRunner().invoke(app, list(arguments), **options)
    assert result.exit_code == code, (arguments, result.exit_code, result.stdout, result.stderr)
    return result


def refused(code: int, *arguments: str) -> str:
    """What stderr says when `memcalc ARGUMENTS` is refused: one harmless line, and nothing on stdout."""
    result = run(*arguments, code=code)
    assert result.stdout == ""
    assert result.stderr.startswith("memcalc: ")
    assert result.stderr.count("\n") == 1
    assert result.stderr.rstrip("\n").isprintable()
    assert "Traceback" not in result.stderr
    assert "fault in memcalc" not in result.stderr
    assert len(result.stderr) < 600
    return str(result.stderr)


def answer(*arguments: str, code: int = 0) -> dict[str, Any]:
    """What `memcalc ARGUMENTS --json` prints."""
    found: dict[str, Any] = json.loads(run(*arguments, "--json", code=code).stdout)
    return found


def assumes(found: dict[str, Any], *words: str) -> bool:
    """Whether one of the assumptions has all of `words`."""
    return any(all(word in line for word in words) for line in lines(found))


def weights(found: dict[str, Any]) -> int:
    """Bytes of MODEL WEIGHTS at the peak."""
    return int(found["components"]["model_weights"]["peak_bytes"])
