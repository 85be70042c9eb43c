"""Where allocations come from: the operation, the module and the line of the recipe that made each.

The recorder's tape walks up the Python frames at every allocation and at every node of the graph. It looks at code
alone, never at local variables: in CPython 3.11 and 3.12 that would keep tensors alive.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from types import FrameType
from typing import Any

import memcalc
from memcalc.autograd.tape import TEMPORARY, Allocation, Tape
from memcalc.autograd.tensor import Storage, Tensor
from memcalc.common.sizes import Shape
from memcalc.nn.module import Module
from memcalc.nn.stack import Stack
from memcalc.tables.dtypes import DType

_ROOT = memcalc.__path__[0]
_ENGINE = "autograd/engine.py"


@dataclass(frozen=True)
class ModulePath:
    """The dotted name of a module: with `{}` in place of its block's number, and that number."""

    template: str = ""
    block: int | None = None

    def __str__(self) -> str:
        return self.template if self.block is None else self.template.format(self.block)

    def beside(self, block: int | None) -> str:
        """The name as said of something in block `block`: {n} is the same block, {n+1} the next."""
        if self.block is None or block is None or abs(self.block - block) > 1:
            return str(self)
        return self.template.format(("{n}", "{n+1}", "{n-1}")[self.block - block])


NOWHERE = ModulePath()


@dataclass(frozen=True)
class Origin:
    """What made an allocation, or a node of the graph.

    operation: the function of `memcalc.ops`, named as torch's.
    module: the module that ran it.
    source: file and line of the recipe.
    function: the function that this line is in.
    in_backward: the operation's backward made it.
    """

    operation: str
    module: ModulePath
    source: str
    function: str
    in_backward: bool = False


class Scope(str):
    """The name of a part of the box that knows where it was asked for."""

    origin: Origin


@dataclass
class Birth:
    """The birth of an allocation: its number among all of the run, its origin, and its tensor's layout if known."""

    number: int
    origin: Origin
    layout: tuple[Shape, DType] | None


class RecordingTape(Tape):
    """A tape that knows the origin of each allocation and node."""

    def __init__(self, recording: Recording, phase: str, sum_out_of_place: bool) -> None:
        self.recording = recording
        self.module = NOWHERE
        self.births: dict[int, Birth] = {}
        """By identity of the allocation."""
        self.inputs_layout: dict[int, tuple[Shape, DType]] = {}
        """Layouts of what exists before the tape starts, by identity of the allocation."""
        self._scope = ""
        self._running: Origin | None = None
        self._layout: tuple[Shape, DType] | None = None
        self._made = 0
        super().__init__(phase, sum_out_of_place=sum_out_of_place)

    @property
    def scope(self) -> str:
        """The part that allocations belong to, with the place in the recipe that asks for it (a node keeps it)."""
        found = Scope(self._scope)
        found.origin = self._origin(sys._getframe(1))
        return found

    @scope.setter
    def scope(self, scope: str) -> None:
        self._scope = str(scope)
        if isinstance(scope, Scope) and _place(sys._getframe(1).f_code.co_filename) == _ENGINE:
            self._running = scope.origin

    def allocate(self, nbytes: int, row: str = TEMPORARY, name: str | None = None, stream: int = 0) -> Storage:
        """New device memory, with its origin."""
        storage = super().allocate(nbytes, row, name or self._scope, stream)
        self._made += 1
        birth = Birth(self._made, self._origin(sys._getframe(1)), self._layout)
        self.births[id(storage.allocation)] = birth
        self.recording.made(self, birth)
        return storage

    def empty(self, shape: Shape, dtype: DType, stride: Shape | None = None) -> Tensor:
        """A new tensor, whose layout is noted."""
        self._layout = shape, dtype
        try:
            return super().empty(shape, dtype, stride)
        finally:
            self._layout = None

    def external_tensor(self, shape: Shape, dtype: DType, row: str, name: str) -> Tensor:
        """A tensor that exists before the tape starts, whose layout is noted."""
        tensor = super().external_tensor(shape, dtype, row, name)
        self.inputs_layout[id(tensor.storage.allocation)] = shape, dtype
        return tensor

    def birth(self, allocation: Allocation) -> Birth | None:
        """What is known of an allocation's birth."""
        return self.births.get(id(allocation))

    def _origin(self, frame: FrameType | None) -> Origin:
        operation = ""
        while frame is not None:
            code = frame.f_code
            place = _place(code.co_filename)
            if place.startswith("ops/"):
                operation = _within(operation, code.co_name)
            elif place == _ENGINE:
                return self._in_backward(code.co_name, frame.f_lineno)
            elif place and not place.startswith(("autograd/", "provenance/", "common/")):
                name = operation.lstrip("_") or code.co_name
                return Origin(name, self.module, f"{place}:{frame.f_lineno}", code.co_qualname)
            frame = frame.f_back
        return Origin(operation, self.module, "", "")

    def _in_backward(self, function: str, line: int) -> Origin:
        of = self._running
        if of is None:
            return Origin("gradient of the loss", NOWHERE, f"{_ENGINE}:{line}", function, True)
        name = "sum of gradients" if function == "_add_gradient" else of.operation
        return Origin(name, of.module, of.source, of.function, True)


_LOSSES = {"log_softmax": "cross_entropy"}
"""Operations that say more than the one that calls them."""


def _within(inner: str, outer: str) -> str:
    """The name of an operation that calls another: the outer one's, as torch's user knows it."""
    if outer.startswith("_") and inner:
        return inner
    return f"{inner} of {outer}" if inner and _LOSSES.get(inner) == outer else outer


@lru_cache(maxsize=1024)
def _place(filename: str) -> str:
    """A file's path inside the package; empty for files outside it."""
    return filename[len(_ROOT) + 1 :].replace("\\", "/") if filename.startswith(_ROOT) else ""


def source_of(function: Callable[..., Any]) -> str:
    """File and line where a function of the package begins; its file alone is not enough to find a rule."""
    code = getattr(function, "__wrapped__", function).__code__
    return f"{_place(code.co_filename)}:{code.co_firstlineno}"


class Looked(Exception):
    """The run was stopped where it was to be looked at."""


class Recording:
    """A recorder (`memcalc.nn.recorder`): holds the run's last tape and the names of its model's modules.

    look: called with the tape when allocation `at` of the last run is made, which then is `Looked` at and stops.
    run: how many tapes are made before the last one.
    """

    def __init__(
        self, look: Callable[[RecordingTape], None] | None = None, at: int | None = None, run: int | None = None
    ) -> None:
        self.tapes: list[RecordingTape] = []
        self.networks: list[Module] = []
        self._look, self._at, self._run = look, at, run

    @property
    def tape(self) -> RecordingTape:
        """The tape of the last run."""
        return self.tapes[-1]

    def new_tape(self, phase: str, sum_out_of_place: bool = False) -> RecordingTape:
        """The tape of a run that begins."""
        self.tapes.append(RecordingTape(self, phase, sum_out_of_place))
        return self.tape

    def made(self, tape: RecordingTape, birth: Birth) -> None:
        """Told of every allocation; stops the run that is looked at."""
        if self._look is not None and birth.number == self._at and len(self.tapes) == self._run:
            self._look(tape)
            raise Looked

    def watch(self, network: Module) -> None:
        """Have every module of a bound model say when it runs."""
        if any(network is known for known in self.networks):
            return
        self.networks.append(network)
        for path, module in _named(network):
            if "run" not in vars(module):
                vars(module)["run"] = self._watched(module, path)

    def _watched(self, module: Module, path: ModulePath) -> Callable[..., Any]:
        run = type(module).run

        def watched(x: Any, *args: Any, **kwargs: Any) -> Any:
            tape = self.tape
            before, tape.module = tape.module, path
            try:
                return run(module, x, *args, **kwargs)
            finally:
                tape.module = before

        return watched


def _named(network: Module) -> list[tuple[ModulePath, Module]]:
    """Every module with its path; blocks of a stack have their number apart."""
    found: list[tuple[ModulePath, Module]] = []
    waiting: list[tuple[ModulePath, Module]] = [(NOWHERE, network)]
    while waiting:
        path, module = waiting.pop()
        found.append((path, module))
        for name, child in module.children():
            waiting.append((_below(path, name, isinstance(module, Stack)), child))
    return found


def _below(path: ModulePath, name: str, in_stack: bool) -> ModulePath:
    if in_stack:  # blocks inside blocks: the inner number is the one that varies
        return ModulePath(f"{path}.{{}}" if path.template else "{}", int(name))
    template = f"{path.template}.{name}" if path.template and name else path.template or name
    return ModulePath(template, path.block)


def parameter_paths(network: Module) -> dict[int, ModulePath]:
    """The paths of all weights and buffers, by identity; a tied weight has its first."""
    found: dict[int, ModulePath] = {}
    for path, module in _named(network):
        for name, value in module.direct_tensors():
            found.setdefault(id(value), _below(path, name, False))
    return found
