"""Stacks of repeated blocks, of which those are traced that differ in kind or in their neighbours' kinds."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from itertools import groupby
from typing import Any

from memcalc.autograd.checkpointing import checkpointed, reentrant
from memcalc.autograd.spans import TracedBlock
from memcalc.autograd.tensor import Tensor
from memcalc.errors import UsageError
from memcalc.nn.module import Module, Parameter
from memcalc.nn.run_context import run_context


class Block:
    """A traced block of a stack, called as its module is. With checkpointing on, it saves only its inputs."""

    def __init__(self, module: Module, traced: TracedBlock) -> None:
        self.module = module
        self.traced = traced

    def __call__(self, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Run the block inside its own span of the tape."""
        tape = x.tape
        run = run_context(tape)
        run.traced_blocks += 1
        if run.hidden_states is not None:
            run.hidden_states.append((x, self.traced.copies))
        tape.begin_span(tape.phase, self.traced)
        if self.module.move_inputs is not None:
            x, args, kwargs = self.module.move_inputs(x, args, kwargs)
        if run.checkpointing and tape.grad_enabled and not self.module.skips_checkpointing:
            if not self.module.supports_checkpointing:
                raise UsageError(f"{self.module.no_checkpointing_reason}; use none.")
            checkpoint = reentrant if run.reentrant else checkpointed
            if self.module.input_is_keyword:
                out = checkpoint(tape, self._named, *args, x=x, **kwargs)
            else:
                out = checkpoint(tape, self.module, x, *args, **kwargs)
        else:
            out = self.module(x, *args, **kwargs)
        for tensor in out if isinstance(out, tuple) else (out,):
            if isinstance(tensor, Tensor):
                tensor.storage.allocation.handed_over = True
        tape.begin_span(tape.phase, None)
        return out

    def _named(self, *args: Any, x: Tensor, **kwargs: Any) -> Any:
        return self.module(x, *args, **kwargs)


class Stack(Module):
    """Blocks that repeat (`torch.nn.ModuleList`), of which few are traced: a block stands for others of its kind that
    have neighbours of the same kinds, because what a block leaves to the next one depends on both.

    kinds: one hashable a position; blocks of equal kind have equal shapes and run the same operations.
    build: makes the block of a position.
    name: names the stack in spans; stacks that run one after another need different names.
    shared: all blocks of a kind are one module, whose weights exist once (ALBERT).
    """

    def __init__(
        self, kinds: Sequence[Hashable], build: Callable[[int], Module], *, name: str = "block", shared: bool = False
    ) -> None:
        self.shared = shared
        self.name = name
        self.depth = len(kinds)
        self._kinds = tuple(kinds)
        self._build = build
        self._every_block = _EVERY_BLOCK.get()
        self.blocks: list[Module] = []
        self._traced: list[TracedBlock] = []
        self._arrange(self._kinds)

    def _arrange(self, kinds: Sequence[Hashable]) -> None:
        self.blocks, self._traced = [], []
        every = [(position, [position]) for position in range(self.depth)]
        for position, answers_for in every if self._every_block else _representatives(kinds, 2 if self.shared else 1):
            block = self._build(position)
            self.blocks.append(block)
            self._traced.append(TracedBlock(self.name, self.depth, kinds[position], position, answers_for))
            if self.shared:
                continue
            if len(answers_for) > 1:
                _set_copies(block, len(answers_for))

    def rename(self, name: str) -> None:
        """Change the name of the stack."""
        self.name = name
        for traced in self._traced:
            traced.stack = name

    def split(self, marks: Sequence[Hashable]) -> None:
        """Split kinds by `marks`, one a position, and build the blocks again."""
        if len(set(marks)) > 1:
            self._kinds = tuple(zip(self._kinds, marks, strict=True))
            self._arrange(self._kinds)

    def keep(self, positions: range) -> None:
        """Be these blocks alone: a part of the stack."""
        build, start = self._build, positions.start
        self._kinds = self._kinds[positions.start : positions.stop]
        self._build = lambda position: build(position + start)
        self.depth = len(self._kinds)
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

    def parameters_in_update_order(self, seen: set[int]) -> Iterator[tuple[Parameter, int]]:
        """The parameters of all blocks in the order of their positions.

        Each run of identical blocks is yielded twice: once for its first block, once for the remaining n - 1. Optimizer
        steps that look at neighbouring weights then see every pair.
        """
        if self.shared:
            yield from super().parameters_in_update_order(seen)
            return
        before = set(seen)
        alone = {id(block) for block, traced in zip(self.blocks, self._traced, strict=True) if traced.copies == 1}
        for _, run in groupby(self.positions, key=lambda pair: id(pair[1])):
            blocks = list(run)
            mine = set(seen if id(blocks[0][1]) in alone else before)  # a block may share weights with another
            walked = list(blocks[0][1].parameters_in_update_order(mine))
            yield from walked
            if len(blocks) > 1:
                yield from ((parameter, n * (len(blocks) - 1)) for parameter, n in walked)
            seen |= mine


_EVERY_BLOCK = ContextVar("every_block", default=False)


@contextmanager
def every_block_by_itself() -> Iterator[None]:
    """Models that are built inside have no block that stands for others: the tape holds each allocation of them."""
    before = _EVERY_BLOCK.set(True)
    try:
        yield
    finally:
        _EVERY_BLOCK.reset(before)


def _set_copies(block: Module, copies: int) -> None:
    """Set `copies` of a block, its modules and its weights."""
    for _, module in block.modules():
        module.copies = copies
        for _, parameter in module.direct_tensors():
            parameter.copies = copies


def _representatives(kinds: Sequence[Hashable], alone: int = 1) -> list[tuple[int, list[int]]]:
    """Which positions to trace, in order, each with the positions that it answers for.

    Traced blocks follow each other as blocks of the model do: each has neighbours of the same kinds as those that it
    answers for. The last `alone` blocks of a kind are traced by themselves.
    """
    walk: list[int] = []
    newest = 0  # where the walk met a context for the first time, last of all
    answers: dict[Hashable, list[int]] = {}
    contexts = _contexts(kinds, alone)
    for position, context in enumerate(contexts):
        known = answers.setdefault(context, [])
        known.append(position)
        if len(known) == 1:
            newest = len(walk)
            walk.append(position)
            continue
        again = next((index for index in range(newest, len(walk)) if contexts[walk[index]] == context), None)
        if again is None:
            walk.append(position)
        else:
            del walk[again + 1 :]  # a loop in which there was nothing new
    traced = set(walk)
    for positions in answers.values():
        positions[:] = [position for position in positions if position == positions[0] or position not in traced]
    chosen = []
    for position in walk:
        known = answers[contexts[position]]
        chosen.append((position, known if position == known[0] else [position]))
    return chosen


def _contexts(kinds: Sequence[Hashable], alone: int) -> list[Hashable]:
    """What tells the block of each position apart: its kind, those of its neighbours, and being among the last."""
    left = Counter(kinds)
    before, behind = (_NOTHING, *kinds[:-1]), (*kinds[1:], _NOTHING)
    contexts: list[Hashable] = []
    for context in zip(before, kinds, behind, strict=True):
        contexts.append((*context, min(left[context[1]], alone + 1)))
        left[context[1]] -= 1
    return contexts


_NOTHING = object()
"""Stands for the neighbour that the first and the last block do not have."""
