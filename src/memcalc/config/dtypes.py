"""What a config.json declares about dtypes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from memcalc.common.escaping import quoted

INNER = ("text_config", "llm_config", "language_config", "thinker_config")
"""Where the config of the language model hides in that of a model with more senses."""


def declared_dtypes(config: Mapping[str, object]) -> Iterator[str]:
    """The words under `dtype` or its older name `torch_dtype`; the text model's own come before those at the top."""
    for inner in INNER:
        nested = config.get(inner)
        if isinstance(nested, Mapping):
            yield from declared_dtypes(nested)
    for key in ("dtype", "torch_dtype"):
        value = config.get(key)
        if isinstance(value, str):
            yield value.strip().removeprefix("torch.")
        elif value is not None and not isinstance(value, Mapping):  # Transformers takes one a part too
            yield quoted(value)
