"""A model whose modules lie on several GPUs of one process, as Accelerate runs it: each module on its own GPU, inputs
copied to it before it runs, and weights that wait in host memory brought one layer at a time.

Source: accelerate/hooks.py and big_modeling.py of Accelerate 1.15 (`dispatch_model`, `AlignDevicesHook`).
"""

from __future__ import annotations

from collections.abc import Mapping
from copy import copy
from typing import Any

from memcalc.autograd.graph import Grads, Node, record
from memcalc.autograd.tape import WEIGHTS, Allocation, Tape
from memcalc.autograd.tensor import Tensor, dense_stride
from memcalc.errors import UsageError
from memcalc.nn import parameter_bytes
from memcalc.nn.model import Batch, Network, Outputs
from memcalc.nn.module import Buffer, Module, Parameter
from memcalc.nn.stack import Stack
from memcalc.parallel.device_map import CPU, Device, Mapped
from memcalc.parallel.engine import leaf
from memcalc.parallel.setup import DeviceMap

RETURNED = "weights from host memory"
"""Part of the weights row: what an offloaded layer has on the GPU while it runs."""


COPIES = "copies between GPUs"
"""What modules on different GPUs of a process send to each other."""


class Placement:
    """Where each module and tensor of a network lies, which has been built for it (`split_stacks`).

    network: its stacks have no block that stands for one on another device.
    mapped, ask: the map, and what was asked.
    weights: what each device has of the weights, where dtypes of the tensors do not say it.
    """

    def __init__(
        self,
        network: Network,
        mapped: Mapped,
        ask: DeviceMap,
        weights: Mapping[Device, Mapping[str, int]] | None = None,
    ) -> None:
        self.network, self.mapped, self.ask, self.weights = network, mapped, ask, weights or {}
        gpus = [device for device in mapped.entries.values() if isinstance(device, int)]
        self.main: int = min(gpus, default=0)
        self.cards = sorted({self.main, *gpus})
        self._device_of: dict[int, Device] = {}
        self._entries: list[tuple[Module, Device]] = []
        self._blocks = {
            id(block) for _, stack in network.modules() if isinstance(stack, Stack) for block in stack.blocks
        }
        self._walk(network, "", CPU)

    def _walk(self, module: Module, name: str, above: Device) -> None:
        """Note where the tensors of a module and of all below it lie; what an adapter added lies with its layer."""
        device = self.mapped.devices.get(name, above)
        if name in self.mapped.entries:
            self._entries.append((module, device))
        for attribute, tensor in module.direct_tensors():
            full = f"{name}.{attribute}" if name else attribute
            place = self.mapped.devices.get(full, device)
            stays = isinstance(tensor, Buffer) and not isinstance(place, int)  # buffers are never offloaded
            self._device_of.setdefault(id(tensor), self.main if stays else place)
        for path, child in module.children():
            self._walk(child, f"{name}.{path}" if name and path else name or path, device)

    def device(self, tensor: Parameter) -> Device:
        """Where a weight or buffer lies: a GPU, `cpu` or `disk`."""
        return self._device_of.get(id(tensor), self.main)

    @property
    def host_bytes(self) -> int:
        """Bytes of the weights that wait in host memory or on disk."""
        if self.weights:
            return sum(sum(parts.values()) for device, parts in self.weights.items() if not isinstance(device, int))
        away = (t for _, t in self.network.tensors() if not isinstance(self.device(t), int))
        return parameter_bytes.in_files(away)

    def attach(self) -> None:
        """Put the hooks in place, around a bound network."""
        if len(self.cards) == 1 and all(isinstance(device, int) for _, device in self._entries):
            return
        self.network.hooks = self._run_network
        for module, device in self._entries:
            place = _OnCard(device if isinstance(device, int) else self.main)
            if id(module) in self._blocks:  # its hook is around its forward, which checkpoints (modeling_layers.py)
                module.move_inputs = place.move
            else:
                module.hooks = place
            if not isinstance(device, int):
                self._offload(module)
        for _, parameter in self.network.parameters():
            node, device = leaf(parameter), self.device(parameter)
            if node is not None and isinstance(device, int):
                node.card = device

    def _offload(self, module: Module) -> None:
        for _, inner in module.modules():
            if any(not isinstance(tensor, Buffer) for _, tensor in inner.direct_tensors()):
                inner.hooks = _Offloaded(self.main)

    def _run_network(self, network: Network, batch: Batch) -> Outputs:
        """Run the model; what it returns is copied to the GPU of its inputs (`io_same_device`)."""
        batch.ids.tape.card = self.main
        outputs = network.call(batch)
        outputs.replace(lambda output: moved(output, self.main))
        return outputs

    # -- what one GPU has of it -----------------------------------------------------------------------------------

    def tape_of(self, tape: Tape, card: int) -> Tape:
        """The tape as one GPU sees it: what lies on others takes nothing."""
        own = copy(tape)
        own.allocations = [a if a.card == card else _nothing(a) for a in tape.allocations]
        own.inputs = list(tape.inputs) if card == self.main else []
        return own

    def tensors_of(self, card: Device) -> list[tuple[str, Parameter]]:
        """Parameters and buffers of a GPU, or those that wait in host memory."""
        return [(name, tensor) for name, tensor in self.network.tensors() if self.device(tensor) == card]


def _nothing(allocation: Allocation) -> Allocation:
    """An allocation of the same life that takes no memory."""
    empty = Allocation(allocation.row, allocation.name, 0, allocation.born)
    empty.dies, empty.saved, empty.handed_over = allocation.dies, allocation.saved, allocation.handed_over
    return empty


class _OnCard:
    """Run a module on a GPU: inputs that lie elsewhere are copied to it first."""

    def __init__(self, card: int) -> None:
        self.card = card

    def move(self, x: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Tensor, Any, Any]:
        """The inputs on the GPU, which runs from now on."""
        x.tape.card = self.card
        return (
            moved(x, self.card),
            tuple(_moved_all(value, self.card) for value in args),
            {name: _moved_all(value, self.card) for name, value in kwargs.items()},
        )

    def __call__(self, module: Module, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        x, args, kwargs = self.move(x, args, kwargs)
        return module.call(x, *args, **kwargs)


class _Offloaded(_OnCard):
    """Run a layer whose weights wait in host memory: they are on the GPU while it runs."""

    def __call__(self, module: Module, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        tape = x.tape
        tape.card = self.card
        held = [
            tape.allocate(tensor.numel * tensor.dtype.itemsize, WEIGHTS, RETURNED)
            for _, tensor in module.direct_tensors()
            if not isinstance(tensor, Buffer)
        ]
        try:
            return super().__call__(module, x, *args, **kwargs)
        finally:
            held.clear()


def moved(x: Tensor, card: int) -> Tensor:
    """x on another GPU; itself if it lies there. Its gradient is copied back."""
    allocation = x.storage.allocation
    if allocation.card == card or isinstance(x, Parameter):
        return x
    tape = x.tape
    before, tape.card = tape.card, card
    out = tape.empty(x.shape, x.dtype, dense_stride(x.shape, x.stride))
    record(tape, out, _moved_backward, (x,), allocation.card)
    tape.send(COPIES, x.numel * x.dtype.itemsize)
    tape.card = before
    return out


def _moved_backward(node: Node, grads: Grads) -> list[Tensor | None]:
    (grad,) = grads
    return [None if grad is None else moved(grad, node.context)]


def _moved_all(value: Any, card: int) -> Any:
    if isinstance(value, Tensor):
        return moved(value, card)
    if isinstance(value, (tuple, list)):
        return type(value)(_moved_all(item, card) for item in value)
    if isinstance(value, dict):
        return {key: _moved_all(item, card) for key, item in value.items()}
    return value


def split_stacks(network: Network, mapped: Mapped) -> None:
    """Let no block of a stack stand for one on another device. Raises UsageError for shared blocks over several."""
    for name, stack in list(network.modules()):
        if not isinstance(stack, Stack):
            continue
        if not stack.shared:
            stack.split([mapped.devices[f"{name}.{position}"] for position in range(stack.depth)])
        elif len(set(mapped.entries.values())) > 1:
            raise UsageError(
                "--device-map over several devices is not described for blocks that share their weights; leave it out."
            )
