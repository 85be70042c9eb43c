"""YAML from outside, read with PyYAML's safe loader under bounds: no objects, no bombs, no duplicate keys."""

from __future__ import annotations

from typing import Any

from memcalc.common.escaping import quoted
from memcalc.errors import ConfigError

DEEPEST = 64
MOST_NODES = 20_000
"""Nodes of a file, every alias counted as often as it is used."""

_PLAIN = "tag:yaml.org,2002:"
_PLAIN_TAGS = frozenset(
    _PLAIN + name for name in ("str", "int", "float", "bool", "null", "map", "seq", "merge", "timestamp", "binary")
)


def load(text: str, where: str) -> Any:
    """The one document of a YAML text, as plain values.

    Raises:
        ConfigError: it is no YAML, is too deep or too large when its aliases are expanded, has a tag that asks for
            an object, names a key twice, or holds several documents.
    """
    import yaml

    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    try:
        _check(yaml, text, where, loader)
        node = yaml.compose(text, Loader=loader)
        if node is None:
            return None
        _no_duplicates(yaml, node, where)
        return yaml.load(text, Loader=loader)
    except yaml.YAMLError as problem:
        mark = getattr(problem, "problem_mark", None)
        place = f" at line {mark.line + 1}" if mark is not None else ""
        why = getattr(problem, "problem", None) or "it cannot be parsed"
        raise ConfigError(f"{where} is no valid YAML{place} ({_short(why)}): correct the file.") from None
    except (RecursionError, ValueError, OverflowError) as problem:
        raise ConfigError(
            f"{where} holds a value that is no plain YAML ({_short(problem)}): correct the file."
        ) from None


def _short(problem: object) -> str:
    return quoted(str(problem))[1:-1]


def _check(yaml: Any, text: str, where: str, loader: Any) -> None:
    """Bounds and tags, read off the events: nothing is built yet."""
    sizes: dict[str, int] = {}
    open_nodes: list[tuple[str | None, int]] = []
    nodes = documents = 0
    for event in yaml.parse(text, Loader=loader):
        line = event.start_mark.line + 1
        if isinstance(event, yaml.DocumentStartEvent):
            documents += 1
            if documents > 1:
                raise ConfigError(f"{where} holds several YAML documents (line {line}): give one per file.")
        tag = getattr(event, "tag", None)
        if tag is not None and tag not in _PLAIN_TAGS:
            raise ConfigError(
                f"{where} asks for an object at line {line} (tag {quoted(tag)}): memcalc reads plain values only; "
                "remove the tag."
            )
        if isinstance(event, yaml.AliasEvent):
            if event.anchor not in sizes:
                raise ConfigError(f"{where} has an alias at line {line} that stands for nothing finished: remove it.")
            nodes += sizes[event.anchor]
        elif isinstance(event, yaml.NodeEvent):
            nodes += 1
            if isinstance(event, yaml.CollectionStartEvent):
                open_nodes.append((event.anchor, nodes))
            elif event.anchor is not None:
                sizes[event.anchor] = 1
        elif isinstance(event, yaml.CollectionEndEvent):
            anchor, before = open_nodes.pop()
            if anchor is not None:
                sizes[anchor] = nodes - before + 1
        if len(open_nodes) > DEEPEST:
            raise ConfigError(f"{where} is nested more than {DEEPEST} levels deep at line {line}: flatten it.")
        if nodes > MOST_NODES:
            raise ConfigError(
                f"{where} has more than {MOST_NODES:,} values (aliases expanded) at line {line}: "
                "no run file is that large; give the training file itself."
            )


def _no_duplicates(yaml: Any, root: Any, where: str) -> None:
    waiting, done = [root], set()
    while waiting:
        node = waiting.pop()
        if id(node) in done:
            continue
        done.add(id(node))
        if isinstance(node, yaml.SequenceNode):
            waiting.extend(node.value)
        elif isinstance(node, yaml.MappingNode):
            keys: set[str] = set()
            for key, value in node.value:
                waiting.append(value)
                if not isinstance(key, yaml.ScalarNode):
                    raise ConfigError(
                        f"{where} has a key that is no word at line {key.start_mark.line + 1}: correct it."
                    )
                if key.value in keys and key.value != "<<":
                    raise ConfigError(
                        f"{where} gives {quoted(key.value)} twice (again at line {key.start_mark.line + 1}): "
                        "keep one of them."
                    )
                keys.add(key.value)
