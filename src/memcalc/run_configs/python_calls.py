"""Keyword arguments of calls in a Python text: parsed, never run."""

from __future__ import annotations

import ast
import textwrap
import warnings
from dataclasses import dataclass, field
from typing import Any

from memcalc.errors import ConfigError


@dataclass
class Call:
    """A call: the name that is called (`FastLanguageModel.from_pretrained`), and its literal keywords."""

    name: str
    keywords: dict[str, Any] = field(default_factory=dict)
    variables: list[str] = field(default_factory=list)
    """Keywords whose value is no literal and no name of one."""
    positional: list[Any] = field(default_factory=list)


def calls(text: str, where: str) -> list[Call]:
    """All calls of a Python text, in order, with the keywords that are literals or names of literals in the file.

    Raises:
        ConfigError: the text is no Python.
    """
    tree = _parsed(text, where)
    assigned: dict[str, Any] = {}
    twice: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and len(node.targets) == 1 and isinstance(node.targets[0], ast.Name):
            name = node.targets[0].id
            found, value = _literal(node.value, {})
            if not found or (name in assigned and assigned[name] != value):
                twice.add(name)
            elif name not in twice:
                assigned[name] = value
    known = {name: value for name, value in assigned.items() if name not in twice}
    found_calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    found_calls.sort(key=lambda node: (node.lineno, node.col_offset))
    return [_call(node, known) for node in found_calls]


def _parsed(text: str, where: str) -> ast.Module:
    text = textwrap.dedent(text)
    text = "\n".join("" if line.lstrip().startswith(("!", "%")) else line for line in text.splitlines())
    line = None
    for closing in ("", ")", "))", ")))"):
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                return ast.parse(text.rstrip() + closing)
        except SyntaxError as problem:
            line = line or problem.lineno
        except (RecursionError, MemoryError, ValueError):
            raise ConfigError(f"{where} is nested too deeply to be parsed as Python: give the calls alone.") from None
    raise ConfigError(f"{where} is no valid Python at line {line}: correct the file.")


def _call(node: ast.Call, known: dict[str, Any]) -> Call:
    made = Call(_dotted(node.func))
    for keyword in node.keywords:
        if keyword.arg is None:
            continue
        found, value = _literal(keyword.value, known)
        if found:
            made.keywords[keyword.arg] = value
        elif isinstance(keyword.value, ast.Call):
            made.keywords[keyword.arg] = None
        else:
            made.variables.append(keyword.arg)
    for argument in node.args:
        found, value = _literal(argument, known)
        made.positional.append(value if found else None)
    return made


def _literal(node: ast.expr, known: dict[str, Any]) -> tuple[bool, Any]:
    if isinstance(node, ast.Name):
        return (True, known[node.id]) if node.id in known else (False, None)
    if isinstance(node, ast.Attribute) and _dotted(node).startswith(("torch.", "jnp.")):
        return True, node.attr
    try:
        return True, ast.literal_eval(node)
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        return False, None


def _dotted(node: ast.expr) -> str:
    parts: list[str] = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    if isinstance(node, ast.Name):
        parts.append(node.id)
    return ".".join(reversed(parts))
