"""Data flows one way: what each room may import, read off the source."""

import ast
import subprocess
import sys
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path
from typing import NamedTuple

import pytest
from support.paths import SOURCE

ROOMS = (
    ("errors", "units", "common"),
    ("config",),
    ("optim",),
    ("tables",),
    ("autograd",),
    ("ops",),
    ("nn",),
    ("models",),
    ("peft",),
    ("setup",),
    ("parallel",),
    ("training", "inference"),
    ("breakdown",),
    ("peak",),
    ("allocator",),
    ("report",),
    ("estimation", "diffusion", "timeline"),
    ("run_configs", "sources"),
    ("decide",),
    ("provenance",),
    ("verification",),
    ("render",),
    ("library",),
    ("cli",),
    ("__init__", "__main__"),
)
"""Each room may import what stands before it, or beside it in its own line."""

RANK = {room: rank for rank, rooms in enumerate(ROOMS) for room in rooms}
FIRST_OUTER = RANK["run_configs"]
"""From here on a room may read files, ask the Hub and print."""

CORE_MUST_NOT = {"typer", "rich", "huggingface_hub", "safetensors", "click", "os", "pathlib", "logging", "sys", "time"}
NOWHERE = {"click", "torch", "transformers"}


def modules() -> list[Path]:
    """All modules but the one that runs the package."""
    return sorted(path for path in SOURCE.rglob("*.py") if path.name != "__main__.py")


def module_name(path: Path) -> str:
    return ".".join(("memcalc", *path.relative_to(SOURCE).with_suffix("").parts)).removesuffix(".__init__")


BY_NAME = {name: path for path in modules() if (name := module_name(path)) != "memcalc"}
"""Every file but the package's public face, which stands behind all of them."""

KNOTS = (
    {"autograd.tensor", "autograd.graph", "autograd.tape", "autograd.offloading"},
    {"allocator.caching", "allocator.blocks", "allocator.expandable"},
    {"parallel.fsdp1", "parallel.fsdp1_units"},
    {"parallel.fsdp2", "parallel.fsdp2_groups"},
    {"setup.setup", "setup.conflicts", "setup.lengths"},
)
"""Files that name each other as types, as a tensor knows the node that made it and a node its tensors."""


def room(path: Path) -> str:
    return path.relative_to(SOURCE).parts[0].removesuffix(".py")


class Import(NamedTuple):
    """One module that a file imports."""

    name: str
    at_start: bool
    """At module level, so at start-up."""
    for_types: bool
    """Under TYPE_CHECKING, so never."""


@cache
def imported(path: Path) -> tuple[Import, ...]:
    """Every module that `path` imports."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    top = {id(node) for node in tree.body}
    guarded = {
        id(inside)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"
        for inside in ast.walk(node)
    }
    found = []
    for node in ast.walk(tree):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and [alias.name for alias in node.names] == ["getrefcount"]:
            continue  # liveness is reference counting: the core may ask for a count, and for nothing else of sys
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            inner = [f"{node.module}.{alias.name}" for alias in node.names]
            names = [name if name in BY_NAME else node.module or "" for name in inner]
        found += [Import(name, id(node) in top, id(node) in guarded) for name in names]
    return tuple(found)


@pytest.mark.parametrize("path", modules(), ids=str)
def test_a_room_imports_only_what_stands_before_it(path: Path) -> None:
    """Every import counts, those in functions and under TYPE_CHECKING too."""
    for name, *_ in imported(path):
        first, *rest = name.split(".")
        if first == "memcalc" and rest:
            assert RANK[room(path)] >= RANK[rest[0]], f"{path} imports {name}"


def test_no_files_import_each_other() -> None:
    """There is an order in which every file stands behind those that it imports."""
    imports = {
        name: {one.name for one in imported(path) if one.name in BY_NAME and one.name != name and not one.for_types}
        for name, path in BY_NAME.items()
    }
    assert list(TopologicalSorter(imports).static_order())


def test_few_files_name_each_other_as_types() -> None:
    """With what is imported for types alone, the knots are the circles, and each is one still."""
    knots = {f"memcalc.{name}": number for number, names in enumerate(KNOTS) for name in names}
    imports: dict[str, set[str]] = {name: set() for name in BY_NAME}
    tied = set()
    for name, path in BY_NAME.items():
        for one in imported(path):
            if name in knots and knots[name] == knots.get(one.name):
                tied |= {(name, one.name)} if one.for_types else set()
            elif one.name in BY_NAME and one.name != name:
                imports[name].add(one.name)
    assert list(TopologicalSorter(imports).static_order())
    assert {knots[name] for name, _ in tied} == set(range(len(KNOTS)))


@pytest.mark.parametrize("path", [path for path in modules() if RANK.get(room(path), 99) < FIRST_OUTER], ids=str)
def test_the_core_is_pure(path: Path) -> None:
    for name, *_ in imported(path):
        assert name.split(".")[0] not in CORE_MUST_NOT, f"{path} imports {name}"


@pytest.mark.parametrize("path", modules(), ids=str)
def test_imports_that_are_nowhere_allowed(path: Path) -> None:
    for name, at_start, _ in imported(path):
        first = name.split(".")[0]
        assert first not in NOWHERE, f"{path} imports {name}"
        assert not (first == "huggingface_hub" and at_start), f"{path} imports {name} at start-up"
        assert not (first == "rich" and at_start), f"{path} imports {name} at start-up"
        assert not (first == "typer" and room(path) != "cli"), f"{path} imports {name}"
        assert not (name.startswith("memcalc.cli") and room(path) != "cli"), f"{path} imports {name}"


def loaded_by(arguments: list[str]) -> set[str]:
    """Modules that are loaded after the command line `arguments` ran."""
    program = (
        "import sys, atexit; from memcalc.cli import app\n"
        "atexit.register(lambda: print(*sorted(sys.modules), file=sys.stderr))\n"
        f"app({arguments!r})"
    )
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    return set(run.stderr.split())


@pytest.mark.parametrize("arguments", [["gpus"], ["--help"], ["--version"]])
def test_light_commands_load_nothing_heavy(arguments: list[str]) -> None:
    loaded = loaded_by(arguments)
    assert not {name for name in loaded if name.split(".")[0] in {"huggingface_hub", "safetensors", "yaml"}}
    assert "memcalc.setup.setup" not in loaded


def test_the_package_runs_as_the_command() -> None:
    run = subprocess.run([sys.executable, "-m", "memcalc", "--version"], capture_output=True, text=True, check=True)
    assert run.stdout.startswith("memcalc ")


def test_an_estimate_does_not_load_the_hub() -> None:
    loaded = loaded_by(["estimate", "--params", "4B"])
    assert not {name for name in loaded if name.split(".")[0] in {"huggingface_hub", "safetensors", "rich"}}
    assert "memcalc.render.json_report" not in loaded
