"""What every way of using several GPUs answers: hooks on the tape of one rank, and what stands beside it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from memcalc.autograd.graph import AccumulateGrad
from memcalc.autograd.tape import Allocation, Tape
from memcalc.autograd.tensor import Tensor
from memcalc.nn import parameter_bytes
from memcalc.nn.model import Batch, Network, Outputs
from memcalc.nn.module import Buffer, Module, Parameter
from memcalc.nn.stack import Stack
from memcalc.optim.weight import SCALAR, Weight
from memcalc.parallel.setup import ParallelSetup
from memcalc.tables.dtypes import FP32, DType

WHOLE = "whole on every rank"
"""Group of weights that tensor parallel does not divide."""

Part = tuple[str, int]
"""Name and bytes of a part of a row."""


@dataclass(frozen=True, eq=False)
class Job:
    """What an engine is put around: a bound model and how it is trained."""

    network: Network
    tensors: tuple[tuple[str, Parameter], ...]
    layout: ParallelSetup
    compute: DType
    """The dtype that the model computes in where the engine casts its weights; that of the weights otherwise."""
    accumulates: bool
    """Whether gradients of earlier micro-batches exist."""
    words: int = 0
    """Vocabulary of the whole model."""
    autocast: DType | None = None
    """The dtype of Accelerate's autocast, where that prepares the model."""


class Engine:
    """One rank of a data-parallel library. This one does nothing: a single GPU.

    An engine hooks into modules and leaves of a bound network (`attach`), as its library does; what is gathered,
    reduced or freed goes on the tape. What stands from one step to the next it gives by row of the box.
    """

    STANDING = "gradients of trained weights"
    """What gradients are called that stood before the micro-batch."""
    LOSSES = 0
    """Tensors of one element that the library makes of the loss before backward."""
    reduces_afterwards = False
    """Whether gradients are reduced once backward is through, not in its final callback."""
    prepares_teachers = False
    """Whether TRL gives it a teacher as it does a reference (`prepare_deepspeed`); elsewhere a teacher stays whole."""
    learns = False
    """Whether a step differs from the one before it because of what that one showed."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.layout = job.layout
        self.held: list[Allocation] = []
        """What was made on the tape and stays until the optimizer has stepped."""
        self.parameters = [value for _, value in job.tensors if not isinstance(value, Buffer)]
        self.buffers_of_model = [value for _, value in job.tensors if isinstance(value, Buffer)]

    def learn(self, before: Engine | None) -> None:
        """Take over what the engine of the step before has seen."""

    def attach(self, tape: Tape) -> None:
        """Put the hooks in place."""
        if self.layout.accelerate:
            self.job.network.hooks = self.run_root

    def run_root(self, network: Network, batch: Batch) -> Outputs:
        """Run the model as the loop's library does: Accelerate puts autocast inside it and converts what comes out."""
        if not self.layout.accelerate or network.is_redirected:  # autocast is around the forward that was replaced
            return network.call(batch)
        tape = batch.ids.tape
        with tape.autocasting(self.job.autocast):
            outputs = network.call(batch)
        outputs.convert(FP32)
        return outputs

    def hold_frozen(self, network: Network, *, shared: bool) -> int | None:
        """Hold a bound model that is run under no_grad as the library does: one of its own, or the trained one again.

        Gives the bytes of its weights on this rank; None where they are whole.
        """
        return None

    def backward_over(self) -> None:
        """Backward is through: what libraries do in its final callback."""

    # -- what stands ----------------------------------------------------------------------------------------------

    def kept_bytes(self, tensor: Parameter) -> int:
        """Bytes that this rank has of a weight or buffer from the start."""
        return tensor.numel * tensor.dtype.itemsize

    def weights(self) -> Iterable[Part]:
        """Parts of the weights row, the same in every phase."""
        return parameter_bytes.by_label(value for _, value in self.job.tensors).items()

    def states(self) -> Iterator[Part]:
        """What stands beside the optimizer's states: master weights."""
        yield from ()

    def gradients(self, phase: str, scratch: int = 0) -> Iterator[Part]:
        """Gradients that stand during a phase outside the tape; `scratch` is what the optimizer's step takes."""
        if phase in ("clip", "step") or self.job.accumulates:
            yield self.STANDING, sum(parameter_bytes.gradients(self.parameters))

    def buffers(self, phase: str) -> Iterator[Part]:
        """Communication buffers that stand during a phase outside the tape."""
        yield from ()

    def temporaries(self, phase: str, step: Part) -> Iterator[Part]:
        """What is alive for a moment in `clip` and `step`; `step` is the scratch of the optimizer itself."""
        if phase == "clip":
            yield "norms of the gradients", self.clipping()
        elif phase == "step":
            yield step

    def clipping(self) -> int:
        """Bytes of the norms that clipping makes: of each gradient, stacked, and of all."""
        count = sum(parameter.copies for parameter in self.parameters if parameter.reached)
        return SCALAR * (count + 2)

    def updated(self, weights: Sequence[tuple[Parameter, Weight]]) -> tuple[Weight, ...]:
        """The weights that this rank's optimizer updates, in order, of those that a single GPU would."""
        if self.layout.tensor == 1 or self.layout.sequence:
            return tuple(weight for _, weight in weights)
        divided = {
            id(parameter)
            for _, module in self.job.network.modules()
            if module.collective is not None
            for _, parameter in module.tensors()
        }
        return tuple(
            weight if id(parameter) in divided else replace(weight, group=WHOLE) for parameter, weight in weights
        )

    def parameter_groups(self, weights: Sequence[Weight]) -> list[Sequence[Weight]]:
        """The weights as the optimizer gets them: torch's refuses a list that mixes divided and whole ones."""
        if self.layout.tensor == 1 or self.layout.sequence:
            return [weights]
        whole = [weight for weight in weights if weight.group == WHOLE]
        divided = [weight for weight in weights if weight.group != WHOLE]
        return [group for group in (divided, whole) if group] or [()]

    def host(self) -> Iterator[Part]:
        """What this rank keeps in host memory."""
        yield from ()


def leaf(parameter: Parameter) -> AccumulateGrad | None:
    """The end of the graph at a trained weight."""
    return parameter.node if isinstance(parameter.node, AccumulateGrad) else None


def same_modules(trained: Network, again: Network) -> dict[str, Module] | None:
    """The modules of `trained` by the names that they have without adapters; None where blocks of `again` differ."""
    copies = [{name: module.copies for name, module in one.modules() if module.copies} for one in (trained, again)]
    found = {name.replace(".base_layer", ""): module for name, module in reversed(list(trained.modules()))}
    if any(name not in found for name, _ in again.modules()):
        return None
    return found if all(copies[0].get(name) == count for name, count in copies[1].items()) else None


def see_weights(trained: Sequence[tuple[str, Parameter]], again: Sequence[tuple[str, Parameter]]) -> None:
    """Let the weights of a network be those of the trained one, which has them as base layers of adapters."""
    of_base = {name.replace(".base_layer.", "."): parameter for name, parameter in trained}
    for name, parameter in again:
        parameter.storage, parameter.dtype = of_base[name].storage, of_base[name].dtype


def own_parameters(modules: Iterable[Module], taken: set[int]) -> list[Parameter]:
    """The parameters below `modules` that are not `taken` yet, in order; they are taken then."""
    found = []
    for module in modules:
        for _, parameter in module.parameters():
            if id(parameter) not in taken:
                taken.add(id(parameter))
                found.append(parameter)
    return found


def in_model_order(module: Module, seen: set[int]) -> Iterator[Parameter]:
    """Every parameter of the model in torch's order; that of a block that stands for others comes once for each."""
    for _, parameter in module.direct_tensors():
        if id(parameter) not in seen and not isinstance(parameter, Buffer):
            seen.add(id(parameter))
            yield parameter
    if not isinstance(module, Stack) or module.shared:
        for _, child in module.children():
            yield from in_model_order(child, seen)
        return
    below = set(seen)
    for _, block in module.positions:
        inside = set(seen)
        yield from in_model_order(block, inside)
        below |= inside
    seen |= below


def tensors_of(value: object) -> Iterator[Tensor]:
    """The tensors in a module's arguments or results."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from tensors_of(item)
    elif isinstance(value, dict):
        yield from tensors_of(list(value.values()))
    elif isinstance(value, Outputs):
        yield from tensors_of((value.loss, value.returned))


def replaced(value: Any, by_id: dict[int, Tensor]) -> Any:
    """Arguments with some of the tensors in them replaced."""
    if isinstance(value, Tensor):
        return by_id.get(id(value), value)
    if isinstance(value, tuple) and hasattr(value, "_fields"):  # a named tuple takes its fields one by one
        return type(value)(*(replaced(item, by_id) for item in value))
    if isinstance(value, (tuple, list)):
        return type(value)(replaced(item, by_id) for item in value)
    if isinstance(value, dict):
        return {key: replaced(item, by_id) for key, item in value.items()}
    return value
