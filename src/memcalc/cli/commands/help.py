"""`memcalc help`: half a screen about a topic."""

from typing import Annotated

import typer

from memcalc.cli.help_topics import TOPICS
from memcalc.cli.output import write
from memcalc.common.escaping import quoted
from memcalc.errors import UsageError, close_matches


def _complete(incomplete: str) -> list[str]:
    return [topic for topic in TOPICS if topic.startswith(incomplete)]


def command(
    topic: Annotated[
        str | None, typer.Argument(help="One of the topics.", show_default=False, autocompletion=_complete)
    ] = None,
) -> None:
    """Explain a topic in half a screen."""
    if topic is None:
        write("Topics: " + ", ".join(TOPICS) + "\n")
        return
    text = TOPICS.get(topic.lower().replace("_", "-"))
    if text is None:
        near = close_matches(topic, TOPICS) or f": choose from {', '.join(TOPICS)}."
        raise UsageError(f"there is no topic {quoted(topic)}{near}")
    write(text)
