"""What comes from outside, in a message: short, on one line, and without anything that a terminal would obey."""

_LONGEST = 40


def printable(text: str) -> str:
    """`text` with escapes in place of all that is not printable (line ends, control and bidirectional characters)."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape", "surrogatepass").decode() for c in text)


def quoted(value: object) -> str:
    """A value as JSON writes it (true, null, NaN; strings in single quotes), cut after 40 characters."""
    if isinstance(value, str):
        return repr(value if len(value) <= _LONGEST else value[:_LONGEST] + "...")
    import json  # costs milliseconds that only an error has to pay

    try:
        text = printable(json.dumps(value, ensure_ascii=False))
    except (TypeError, ValueError, RecursionError):
        text = printable(repr(value))
    return text if len(text) <= _LONGEST else text[: _LONGEST - 3] + "..."
