"""Modules: weights with names and shapes, in the order in which `torch.nn.Module.parameters()` gives them.

A module is built from numbers alone; `Module.bind` puts its weights on a tape. Blocks that repeat are held by a
`Stack`, which builds and traces one block per distinct kind and lets it answer for all of that kind.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from itertools import groupby
from typing import Any

from memcalc.errors import UsageError
from memcalc.model.autograd import AccumulateGrad, require_gradient
from memcalc.model.checkpointing import checkpointed, reentrant
from memcalc.model.tape import GRADIENTS, WEIGHTS, Tape, TracedBlock
from memcalc.model.tensor import Shape, Tensor, contiguous_stride
from memcalc.tables.dtypes import FP32, DType


class Parameter(Tensor):
    """A weight: a shape until it is bound to a tape, then a leaf of the graph.

    `dtype` is None until bound, unless the module fixes it. `copies` is how many weights of the model it stands for.
    """

    __slots__ = ("copies", "fixed_dtype", "group", "trainable")

    def __init__(self, *shape: int, dtype: DType | None = None, group: str = "other") -> None:
        self.shape: Shape = shape
        self.stride = contiguous_stride(shape)
        self.fixed_dtype = dtype
        self.trainable = True
        self.copies = 1
        self.group = group
        self.node = None
        self.slot = 0
        self.is_view = False

    @property
    def reached(self) -> bool:
        """Whether backward brought a gradient: a weight that the loss does not use is never updated."""
        return isinstance(self.node, AccumulateGrad) and self.node.reached

    @property
    def count(self) -> int:
        """How many weights this stands for: its elements, unless they are packed."""
        return self.numel


CONSTANTS = "quantization constants"
"""Group of the buffers that belong to quantized weights."""


class Buffer(Parameter):
    """A tensor that belongs to the model but is no parameter (inverse frequencies of a rotary embedding).

    It is in fp32 unless `dtype` says otherwise; None is the dtype of the weights.
    """

    __slots__ = ()

    def __init__(self, *shape: int, dtype: DType | None = FP32, group: str = "other") -> None:
        super().__init__(*shape, dtype=dtype, group=group)


class Module:
    """A part of a model. Attributes that are parameters, buffers or modules are found by walking them in order."""

    copies: int = 1
    """How many modules of the model this one stands for."""
    scope: str | None = None
    """The part of the box that the memory of this module is shown under; None leaves the caller's."""
    checkpoints: bool = True
    """Whether this module can be checkpointed, where it is a block of a stack."""
    not_checkpointed: str = "Transformers cannot checkpoint activations in this family"
    """Why not, where it cannot."""
    left_out: bool = False
    """Whether this block is not among those that the setup checkpoints (`--checkpoint-every`)."""
    by_keyword: bool = False
    """Whether this block takes its input by keyword: checkpointing holds it then, but does not save it."""
    feeds: bool = False
    """Whether Transformers takes this for the input embedding of a tower."""
    output_needs_gradient: bool = False
    """Whether what comes out is made to need a gradient though no weight does (`enable_input_require_grads`)."""
    note: str = ""
    """What an estimate in which this module runs rests on, where that needs saying."""

    def __getattr__(self, name: str) -> Any:
        """A weight that an adapter replaces while this module runs is made when it is first asked for."""
        waiting = self.__dict__.get("_adapted", {})
        if name not in waiting:
            raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")
        made = waiting.pop(name)()
        self.__dict__[name] = made
        return made

    def __call__(self, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Run `forward`. The arguments live until it returns, as in torch."""
        scope = self.scope
        if scope is None and not self.output_needs_gradient:
            return self.forward(x, *args, **kwargs)
        tape = x.tape
        before, tape.scope = tape.scope, scope or tape.scope
        try:
            if self.output_needs_gradient:
                return require_gradient(self.forward(x, *args, **kwargs))
            return self.forward(x, *args, **kwargs)
        finally:
            tape.scope = before

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """What the module does to its input."""
        raise NotImplementedError

    def children(self) -> Iterator[tuple[str, Module]]:
        """Direct submodules with their names, in order of registration."""
        for name, value in self.__dict__.items():
            if not isinstance(value, (Module, list)):
                continue
            if isinstance(value, Module):
                yield name, value
            else:
                for index, item in enumerate(value):
                    if isinstance(item, Module):
                        yield f"{name}.{index}", item

    def modules(self, prefix: str = "") -> Iterator[tuple[str, Module]]:
        """This module and all below it, with dotted names, parents first."""
        waiting = [(prefix, self)]
        while waiting:  # not by recursion, in which every module would pass through all above it
            prefix, module = waiting.pop()
            yield prefix, module
            below = [
                (f"{prefix}.{name}" if prefix and name else prefix or name, child) for name, child in module.children()
            ]
            waiting += reversed(below)

    def own(self) -> Iterator[tuple[str, Parameter]]:
        """Parameters and buffers that hang on this module itself."""
        for name, value in vars(self).items():
            if isinstance(value, Parameter):
                yield name, value

    def tensors(self) -> Iterator[tuple[str, Parameter]]:
        """All parameters and buffers with dotted names; a tied weight comes once, under its first name."""
        seen: set[int] = set()
        for prefix, module in self.modules():
            for name, value in module.own():
                if id(value) not in seen:
                    seen.add(id(value))
                    yield (f"{prefix}.{name}" if prefix else name), value

    def parameters(self) -> Iterator[tuple[str, Parameter]]:
        """All parameters, in torch's order."""
        return ((name, value) for name, value in self.tensors() if not isinstance(value, Buffer))

    def in_order(self, seen: set[int]) -> Iterator[tuple[Parameter, int]]:
        """The parameters as torch walks them, each with how many of it this place stands for.

        `seen` holds the identities of those that came already; a tied weight comes once.
        """
        for _, value in self.own():
            if id(value) not in seen and not isinstance(value, Buffer):
                seen.add(id(value))
                yield value, 1
        for _, child in self.children():
            yield from child.in_order(seen)

    def bind(self, tape: Tape, dtype: DType, *, accumulated: bool = False) -> tuple[tuple[str, Parameter], ...]:
        """Put every weight on `tape` in `dtype`; returns them, as `tensors` does.

        With `accumulated`, gradients of earlier micro-batches exist.
        """
        tape.weights = dtype
        tensors = tuple(self.tensors())
        for _, parameter in tensors:
            is_buffer = isinstance(parameter, Buffer)
            parameter.dtype = parameter.fixed_dtype or dtype
            parameter.storage = tape.untracked(parameter.shape, parameter.dtype, WEIGHTS, parameter.group).storage
            if is_buffer:
                tape.buffers.append((parameter.storage.allocation, parameter.copies))
            elif parameter.trainable and tape.grad_enabled:
                held = tape.untracked(parameter.shape, parameter.dtype, GRADIENTS, "") if accumulated else None
                parameter.node = AccumulateGrad(tape, parameter.group, held)
        return tensors


class Block:
    """A traced block of a stack, called as the module is. With checkpointing on, it keeps only its inputs."""

    def __init__(self, module: Module, traced: TracedBlock) -> None:
        self.module = module
        self.traced = traced

    def __call__(self, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Run the block inside its own span of the tape."""
        tape = x.tape
        tape.traced_blocks += 1
        if tape.hidden is not None:
            tape.hidden.append((x, self.traced.copies))
        tape.enter(tape.phase, self.traced)
        if tape.checkpointing and tape.grad_enabled and not self.module.left_out:
            if not self.module.checkpoints:
                raise UsageError(f"{self.module.not_checkpointed}; use none.")
            run = reentrant if tape.reentrant else checkpointed
            if self.module.by_keyword:
                out = run(tape, self._named, *args, x=x, **kwargs)
            else:
                out = run(tape, self.module, x, *args, **kwargs)
        else:
            out = self.module(x, *args, **kwargs)
        for tensor in out if isinstance(out, tuple) else (out,):
            if isinstance(tensor, Tensor):
                tensor.storage.allocation.handed_over = True
        tape.enter(tape.phase, None)
        return out

    def _named(self, *args: Any, x: Tensor, **kwargs: Any) -> Any:
        return self.module(x, *args, **kwargs)


class Stack(Module):
    """Blocks that repeat. Builds and traces the first block, one of every kind after it, and the last where asked.

    `kinds[i]` tells blocks apart: blocks of equal kind have equal shapes and do the same. The first is traced by
    itself because the model still holds its input; `last_differs` is for stacks whose blocks share a tensor that
    needs a gradient (encoder states, a position bias): the last block is the first to send one. With `shared`, all
    blocks of a kind are one module, whose weights exist once (ALBERT).
    """

    def __init__(
        self, kinds: Sequence[Hashable], build: Callable[[int], Module], *,
        name: str = "block", last_differs: bool = False, shared: bool = False,
    ) -> None:  # fmt: skip
        self.shared = shared
        self.name = name
        self.depth = len(kinds)
        self._kinds = tuple(kinds)
        self._build = build
        self._last_differs = last_differs or shared
        self.blocks: list[Module] = []
        self._traced: list[TracedBlock] = []
        self._arrange(self._kinds)

    def _arrange(self, kinds: Sequence[Hashable]) -> None:
        self.blocks, self._traced = [], []
        for position, answers_for in _representatives(kinds, self._last_differs):
            block = self._build(position)
            self.blocks.append(block)
            self._traced.append(TracedBlock(self.name, self.depth, kinds[position], position, answers_for))
            if self.shared:
                continue
            if len(answers_for) > 1:
                _stand_for(block, len(answers_for))

    def rename(self, name: str) -> None:
        """Go by another name: stacks that run one after another are told apart by it."""
        self.name = name
        for traced in self._traced:
            traced.stack = name

    def split(self, marks: Sequence[Hashable]) -> None:
        """Build the blocks anew, and tell those of one kind apart by their marks, one a position."""
        if len(set(marks)) > 1:
            self._kinds = tuple(zip(self._kinds, marks, strict=True))
            self._arrange(self._kinds)

    @property
    def positions(self) -> list[tuple[int, Module]]:
        """Every position of the stack with the block that answers for it."""
        pairs = zip(self.blocks, self._traced, strict=True)
        return sorted(
            ((position, block) for block, traced in pairs for position in traced.positions), key=lambda pair: pair[0]
        )

    def children(self) -> Iterator[tuple[str, Module]]:
        """The traced blocks, named by their positions as torch names them."""
        for block, traced in zip(self.blocks, self._traced, strict=True):
            yield str(traced.position), block

    def __iter__(self) -> Iterator[Block]:
        return map(Block, self.blocks, self._traced)

    def in_order(self, seen: set[int]) -> Iterator[tuple[Parameter, int]]:
        """The parameters of all blocks in the order of their positions.

        A run of equal blocks comes twice, the second time for all but the first: so every neighbour that a weight has
        is there, and the counts are right.
        """
        if self.shared:
            yield from super().in_order(seen)
            return
        before = set(seen)
        alone = {id(block) for block, traced in zip(self.blocks, self._traced, strict=True) if traced.copies == 1}
        for _, run in groupby(self.positions, key=lambda pair: id(pair[1])):
            blocks = list(run)
            mine = set(seen if id(blocks[0][1]) in alone else before)  # a block may share weights with another
            walked = list(blocks[0][1].in_order(mine))
            yield from walked
            if len(blocks) > 1:
                yield from ((parameter, n * (len(blocks) - 1)) for parameter, n in walked)
            seen |= mine


def tie(module: Module, to: Module) -> None:
    """Let `module` use the weights of `to`, which is built alike."""
    for (_, mine), (_, theirs) in zip(module.modules(), to.modules(), strict=True):
        vars(mine).update(theirs.own())


def _stand_for(block: Module, copies: int) -> None:
    """Let a block and all of its weights answer for so many of the model."""
    for _, module in block.modules():
        module.copies = copies
        for _, parameter in module.own():
            parameter.copies = copies


def _representatives(kinds: Sequence[Hashable], last_differs: bool) -> list[tuple[int, list[int]]]:
    """Which positions to trace, in order, each with the positions that it answers for."""
    if not kinds:
        return []
    groups: dict[Hashable, list[int]] = {}
    last = len(kinds) - 1
    for position in range(1, last if last_differs else last + 1):
        groups.setdefault(kinds[position], []).append(position)
    chosen = [(0, [0]), *((positions[0], positions) for positions in groups.values())]
    if last_differs and last > 0:
        chosen.append((last, [last]))
    return sorted(chosen, key=lambda item: item[0])
