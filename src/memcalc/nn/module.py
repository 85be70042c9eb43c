"""Modules: weights with names and shapes, in the order in which `torch.nn.Module.parameters()` gives them.

A module is built from numbers alone; `Module.bind` puts its weights on a tape. Blocks that repeat are held by a
`Stack`, which builds and traces one block per distinct kind and lets it answer for all of that kind.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from copy import deepcopy
from typing import TYPE_CHECKING, Any, ParamSpec, Protocol, TypeVar

from memcalc.autograd.graph import AccumulateGrad, require_gradient
from memcalc.autograd.tape import GRADIENTS, WEIGHTS, Tape
from memcalc.autograd.tensor import Tensor, contiguous_stride
from memcalc.common.assumption import Assumption
from memcalc.common.sizes import Shape
from memcalc.nn.run_context import run_context
from memcalc.tables.dtypes import FP32, DType


class Parameter(Tensor):
    """A weight: a shape until it is bound to a tape, then a leaf of the graph.

    `dtype` is None until bound, unless the module fixes it. `copies` is how many weights of the model it stands for.
    `keeps_gradient` says that no optimizer has it: it gets a gradient that nothing zeroes.
    """

    __slots__ = ("copies", "fixed_dtype", "group", "keeps_gradient", "trainable")

    def __init__(self, *shape: int, dtype: DType | None = None, group: str = "other") -> None:
        self.shape: Shape = shape
        self.stride = contiguous_stride(shape)
        self.fixed_dtype = dtype
        self.trainable = True
        self.keeps_gradient = False
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


Hooks = Callable[..., Any]
"""Called with a module and its arguments in place of its forward (`register_forward_pre_hook`, `_forward_hook`)."""

QUANTIZATION_CONSTANTS = "quantization constants"
"""Group of the buffers that belong to quantized weights."""


class Buffer(Parameter):
    """A tensor that belongs to the model but is no parameter (inverse frequencies of a rotary embedding).

    It is in fp32 unless `dtype` says otherwise; None is the dtype of the weights.
    """

    __slots__ = ()

    def __init__(self, *shape: int, dtype: DType | None = FP32, group: str = "other") -> None:
        super().__init__(*shape, dtype=dtype, group=group)


Given = ParamSpec("Given")
Made = TypeVar("Made", covariant=True)


class Forwards(Protocol[Given, Made]):
    """A module as its caller sees it: a call takes what `forward` takes, and gives what it gives."""

    @property
    def hooks(self) -> Hooks | None: ...

    def call(self, *args: Any, **kwargs: Any) -> Any: ...

    def forward(self, *args: Given.args, **kwargs: Given.kwargs) -> Made: ...


class Module:
    """A part of a model. Attributes that are parameters, buffers or modules are found by walking them in order."""

    copies: int = 1
    """How many modules of the model this one stands for."""
    scope: str | None = None
    """The part of the box that the memory of this module is shown under; None leaves the caller's."""
    supports_checkpointing: bool = True
    """Transformers can checkpoint this block."""
    no_checkpointing_reason: str = "Transformers cannot checkpoint activations in this family"
    """Why it cannot, for the error message."""
    skips_checkpointing: bool = False
    """This block is not among those that the setup checkpoints (`--checkpoint-every-n-blocks`)."""
    input_is_keyword: bool = False
    """The block's input is a keyword argument: torch.utils.checkpoint then keeps it alive in its closure instead of
    saving it for backward."""
    is_input_embedding: bool = False
    """Transformers' `get_input_embeddings` of a tower returns this module."""
    output_needs_gradient: bool = False
    """The output is made to require a gradient though no weight does (`enable_input_require_grads`)."""
    assumption: Assumption | None = None
    """An assumption that the report states if this module runs."""

    hooks: Hooks | None = None
    """What runs around this module's forward, where a parallel engine asks for it."""
    move_inputs: Hooks | None = None
    """What copies the inputs of a block to its GPU, outside of checkpointing, where one process uses several."""
    collective: Hooks | None = None
    """What runs in its place where its weights are divided over tensor-parallel ranks."""

    if not TYPE_CHECKING:  # else no attribute of any module would be checked

        def __getattr__(self, name: str) -> Any:
            """A weight that an adapter replaces while this module runs is made when it is first asked for."""
            waiting = self.__dict__.get("_adapted", {})
            if name not in waiting:
                raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")
            made = waiting.pop(name)()
            self.__dict__[name] = made
            return made

    def __call__(self: Forwards[Given, Made], *args: Given.args, **kwargs: Given.kwargs) -> Made:
        """Run `forward`. The arguments live until it returns, as in torch."""
        made: Made = self.call(*args, **kwargs) if self.hooks is None else self.hooks(self, *args, **kwargs)
        return made

    def call(self, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Run the module without its hooks, but with what its ranks send to each other."""
        if self.collective is not None:
            return self.collective(self, x, *args, **kwargs)
        return self.run(x, *args, **kwargs)

    def run(self, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Run `forward` under this module's name alone."""
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

    def direct_tensors(self) -> Iterator[tuple[str, Parameter]]:
        """Parameters and buffers of this module itself, by attribute name."""
        for name, value in vars(self).items():
            if isinstance(value, Parameter):
                yield name, value

    def tensors(self) -> Iterator[tuple[str, Parameter]]:
        """All parameters and buffers with dotted names; a tied weight comes once, under its first name."""
        seen: set[int] = set()
        for prefix, module in self.modules():
            for name, value in module.direct_tensors():
                if id(value) not in seen:
                    seen.add(id(value))
                    yield (f"{prefix}.{name}" if prefix else name), value

    def parameters(self) -> Iterator[tuple[str, Parameter]]:
        """All parameters, in torch's order."""
        return ((name, value) for name, value in self.tensors() if not isinstance(value, Buffer))

    def parameters_in_update_order(self, seen: set[int]) -> Iterator[tuple[Parameter, int]]:
        """The parameters as torch walks them, each with how many of it this place stands for.

        `seen` holds the identities of those that came already; a tied weight comes once.
        """
        for _, value in self.direct_tensors():
            if id(value) not in seen and not isinstance(value, Buffer):
                seen.add(id(value))
                yield value, 1
        for _, child in self.children():
            yield from child.parameters_in_update_order(seen)

    def bind(self, tape: Tape, dtype: DType, *, accumulated: bool = False) -> tuple[tuple[str, Parameter], ...]:
        """Put every weight on `tape` in `dtype`; returns them, as `tensors` does.

        With `accumulated`, gradients of earlier micro-batches exist.
        """
        run_context(tape).weights_dtype = dtype
        tensors = tuple(self.tensors())
        for _, parameter in tensors:
            is_buffer = isinstance(parameter, Buffer)
            parameter.dtype = parameter.fixed_dtype or dtype
            parameter.storage = tape.external_tensor(parameter.shape, parameter.dtype, WEIGHTS, parameter.group).storage
            if is_buffer:
                tape.buffers.append((parameter.storage.allocation, parameter.copies))
            elif parameter.trainable and tape.grad_enabled:
                stands = accumulated or parameter.keeps_gradient
                gradient = tape.external_tensor(parameter.shape, parameter.dtype, GRADIENTS, "") if stands else None
                parameter.node = AccumulateGrad(tape, parameter.group, gradient)
        return tensors


def tie(module: Module, to: Module) -> None:
    """Let `module` use the weights of `to`, which is built alike."""
    for (_, mine), (_, theirs) in zip(module.modules(), to.modules(), strict=True):
        vars(mine).update(theirs.direct_tensors())


class TrainedCopy(Module):
    """A frozen module that stays in memory unused, and the trained copy that runs in its place."""

    def __init__(self, original: Module) -> None:
        self.original_module = original
        self.trained: Any = deepcopy(original)
        self.copies = original.copies
        for _, parameter in self.trained.parameters():
            parameter.trainable = True

    def __call__(self, x: Any, *args: Any, **kwargs: Any) -> Any:
        """Run the copy."""
        return self.trained(x, *args, **kwargs)

    if TYPE_CHECKING:
        weight: Parameter
    else:

        def __getattr__(self, name: str) -> Any:
            """What others look at in the module (a weight, a window) is the copy's, as in PEFT's wrapper."""
            if "trained" not in self.__dict__:
                raise AttributeError(name)
            return getattr(self.trained, name)
