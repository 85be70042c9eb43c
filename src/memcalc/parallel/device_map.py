"""On which device Transformers puts each module where `device_map` is a word: auto, balanced, balanced_low_0 or
sequential.

Source: Transformers 5.24, transformers/integrations/accelerate.py (`get_balanced_memory`, `infer_auto_device_map`), and
Accelerate 1.15, accelerate/utils/modeling.py (`get_max_layer_size`), read, and run on meta tensors.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from memcalc.nn.module import Buffer, Module
from memcalc.nn.quantized_layers import ModuleFormat, is_quantizable
from memcalc.nn.stack import Stack
from memcalc.parallel.setup import DeviceMap
from memcalc.tables.dtypes import DType
from memcalc.tables.weight_formats import WeightFormat

CPU, DISK = "cpu", "disk"
Device = int | str
"""Index of a GPU, `cpu` or `disk`."""

BUFFER_SHARE = 1.25
"""What each GPU may take beyond an even share, in largest layers, so that the last one is not left with the rest."""
SINGLE_GPU_SHARE = 0.9
"""Share of a single GPU that is filled with weights where nobody says how much."""
QUANTIZED_SHARE = 0.9
"""Share of each device that weights may fill where they are quantized while they are loaded (`adjust_max_memory`)."""


@dataclass(eq=False)
class ModulePart:
    """A module or a tensor of a model with its dotted name and the bytes of all that is below it.

    `whole` says that it is not divided over devices (`_no_split_modules`); `tensors` are the names and sizes of those
    that hang on it directly. A tied weight has its size at its first name alone.
    """

    name: str
    module: Module | None = None
    whole: bool = False
    tensors: list[tuple[str, int]] = field(default_factory=list)
    parameters: list[ModulePart] = field(default_factory=list)
    buffers: list[ModulePart] = field(default_factory=list)
    children: list[ModulePart] = field(default_factory=list)
    nbytes: int = 0

    def below(self) -> Iterator[ModulePart]:
        """This part and all modules below it."""
        yield self
        for child in self.children:
            yield from child.below()

    def within(self, name: str) -> bool:
        """Whether `name` is this part or below it."""
        return name == self.name or name.startswith(self.name + ".")


@dataclass(frozen=True)
class ModelParts:
    """A model as `device_map` sees it: its modules, and the groups of names that share a weight."""

    root: ModulePart
    tied: tuple[tuple[str, ...], ...]


def model_parts(network: Module, sizes: Mapping[int, int]) -> ModelParts:
    """Every module of a model, those of all blocks, with bytes of each weight by its identity in `sizes`."""
    names: dict[int, list[str]] = {}
    root = _part(network, "", sizes, names, every=True)
    return ModelParts(root, tuple(tuple(sorted(group)) for group in names.values() if len(group) > 1))


def _part(
    module: Module, name: str, sizes: Mapping[int, int], names: dict[int, list[str]], *, every: bool
) -> ModulePart:
    part = ModulePart(name, module)
    for attribute, tensor in module.direct_tensors():
        full = _joined(name, attribute)
        known = names.setdefault(id(tensor), []) if every else []
        nbytes = 0 if known else sizes.get(id(tensor), 0)
        known.append(full)
        part.tensors.append((full, nbytes))
        leaf = ModulePart(full, nbytes=nbytes)
        (part.buffers if isinstance(tensor, Buffer) else part.parameters).append(leaf)
    if isinstance(module, Stack) and not module.shared:
        for position, block in module.positions:
            child = _part(block, f"{name}.{position}", sizes, names, every=False)
            child.whole = True
            part.children.append(child)
    else:
        part.children = [
            _part(child, _joined(name, path), sizes, names, every=every) for path, child in module.children()
        ]
    part.nbytes = sum(nbytes for _, nbytes in part.tensors) + sum(child.nbytes for child in part.children)
    return part


def _joined(prefix: str, name: str) -> str:
    return f"{prefix}.{name}" if prefix and name else prefix or name


def weight_sizes(
    network: Module, dtype: DType, form: WeightFormat | None = None, format_of: ModuleFormat | None = None
) -> dict[int, int]:
    """Bytes of each tensor of a wide network by its identity, as Transformers counts them before it loads anything.

    Of weights that will be in `form`, or in what `format_of` says, only the elements count (`param_element_size`).
    """
    sizes: dict[int, int] = {}
    for name, module in network.modules():
        own = form if form is None or format_of is None else format_of(name)
        narrow = own is not None and is_quantizable(module, own)
        for _, tensor in module.direct_tensors():
            elements = tensor.numel
            sizes[id(tensor)] = elements * (tensor.fixed_dtype or dtype).itemsize
            if own is not None and narrow and len(tensor.shape) > 1:
                sizes[id(tensor)] = elements * own.bits // 8
    return sizes


@dataclass(frozen=True)
class Mapped:
    """The outcome: `entries` of the map by dotted name, and the device of every module and tensor of the model."""

    entries: Mapping[str, Device]
    devices: Mapping[str, Device]


def mapped_modules(network: Module, ask: DeviceMap, sizes: Mapping[int, int], *, quantizes: bool) -> Mapped:
    """Where each module of a network goes, as the words of `device_map` have it.

    quantizes: weights are quantized while they are loaded, which needs room of its own.
    """
    parts = model_parts(network, sizes)
    room = dict(ask.room)
    if ask.word != "sequential":
        room = balanced_memory(parts, room, low_zero=ask.word == "balanced_low_0", asked=ask.asked)
    if quantizes:
        room = {device: nbytes * QUANTIZED_SHARE for device, nbytes in room.items()}
    entries = placed(parts, room)
    return Mapped(entries, devices_of(parts, entries))


def balanced_memory(
    parts: ModelParts, room: Mapping[Device, float], *, low_zero: bool, asked: bool
) -> dict[Device, float]:
    """What each device may take so that GPUs hold about as much; the last one keeps all its `room`.

    low_zero: leave the first GPU as empty as the others allow. asked: the user said how much room there is.
    """
    room = dict(room)
    gpus = [device for device in room if isinstance(device, int) and room[device] > 0]
    if not gpus:
        return room
    if len(gpus) == 1:
        low_zero = False
        if not asked:
            room[gpus[0]] *= SINGLE_GPU_SHARE
    total = parts.root.nbytes
    each = total // (len(gpus) - 1 if low_zero else len(gpus))
    everything = list(parts.root.below())
    largest_whole = max((part.nbytes for part in everything if part.whole), default=0)
    largest_leaf = max((sum(nbytes for _, nbytes in part.tensors) for part in everything), default=0)
    each += int(BUFFER_SHARE * max(largest_whole, largest_leaf))
    for gpu in sorted(gpus)[:-1]:
        room[gpu] = min(room[0] if low_zero and gpu == 0 else each, room[gpu])
    if low_zero:
        rest = max(0, total - sum(room[gpu] for gpu in range(1, len(gpus))))
        room[0] = min(rest, room[0])
    return room


def placed(parts: ModelParts, room: Mapping[Device, float]) -> dict[str, Device]:
    """The device of each module, by dotted name: one after another, each on the first device that has room left."""
    return _Placing(parts, room).run()


class _Placing:
    """Modules are taken in order; one that does not fit is taken apart, or goes to the next device."""

    def __init__(self, parts: ModelParts, room: Mapping[Device, float]) -> None:
        self.tied = parts.tied
        self.room = dict(room)
        self.devices = [*room, *([] if DISK in room else [DISK])]
        gpus = [device for device in self.devices if isinstance(device, int)]
        self.keeps_room = (gpus[0], CPU) if gpus else (CPU,)
        """Devices on which the largest layer has to fit beside what stays there: offloaded ones come back there."""
        root = parts.root
        self.waiting = [*root.parameters, *root.children, *root.buffers]
        self.used: dict[Device, float] = dict.fromkeys(self.devices, 0)
        self.map: dict[str, Device] = {}
        self._measure()

    def _measure(self) -> None:
        """Find the largest layers among what waits."""
        sizes: dict[str, int] = {}
        for part in self.waiting:
            for layer in _layers(part):
                sizes[layer.name] = layer.nbytes
        self.largest = max(sizes.values(), default=0)
        self.largest_names = [name for name, nbytes in sizes.items() if nbytes == self.largest and nbytes]

    def run(self) -> dict[str, Device]:
        current = 0
        while self.waiting:
            part = self.waiting.pop(0)
            self.largest_names = [name for name in self.largest_names if not part.within(name)]
            if not self.largest_names:
                self._measure()
            device = self.devices[current]
            reserved = self.largest if device in self.keeps_room else 0
            free = float("inf") if device == DISK else self.room[device] - reserved - self.used[device]
            kin = self._tied_to(part)
            size = part.nbytes + sum(other.nbytes for other in kin)
            if size <= free:
                self.used[device] += size
                self.map[part.name] = device
                for other in kin:
                    self.map[other.name] = device
                    self.waiting.remove(other)
                continue
            if kin and part.nbytes <= free and self._split_kin(part, kin):
                continue
            if part.children and not part.whole:
                self.waiting[:0] = [*part.parameters, *part.children]
                self._measure()
                continue
            self.used[device] += reserved
            current += 1
            self.waiting.insert(0, part)
        return self.map

    def _tied_to(self, part: ModulePart) -> list[ModulePart]:
        """What waits and shares a weight with `part`."""
        found: list[ModulePart] = []
        for group in self.tied:
            inside = [part.within(name) for name in group]
            if any(inside) and not all(inside):
                others = [name for name, here in zip(group, inside, strict=True) if not here]
                for name in others:
                    other = next((waiting for waiting in self.waiting if waiting.within(name)), None)
                    if other is not None and other not in found:
                        found.append(other)
        return found

    def _split_kin(self, part: ModulePart, kin: Sequence[ModulePart]) -> bool:
        """Take apart what shares a weight with `part`, so that less has to come with it."""
        for other in kin:
            if other.children and not other.whole:
                at = self.waiting.index(other)
                self.waiting[at : at + 1] = [*other.parameters, *other.children]
                self.waiting.insert(0, part)
                self._measure()
                return True
        return False


def _layers(part: ModulePart) -> Iterator[ModulePart]:
    """The modules below `part` that are moved as one: those without children, and whole blocks."""
    if part.module is None:
        return
    if part.whole or not part.children:
        yield part
        return
    for child in part.children:
        yield from _layers(child)


def devices_of(parts: ModelParts, mapped: Mapping[str, Device]) -> dict[str, Device]:
    """The device of every module and tensor by name: that of the nearest module that the map has, else `cpu`.

    A module of which all is on one device is in the map itself (`clean_device_map`), and its buffers with it.
    """
    found: dict[str, Device] = {}

    def keys_below(part: ModulePart) -> list[Device]:
        """The devices of the map's entries at `part` and below; fills in where they agree."""
        below = [device for child in part.children for device in keys_below(child)]
        below += [mapped[leaf.name] for leaf in (*part.parameters, *part.buffers) if leaf.name in mapped]
        if part.name in mapped:
            found[part.name] = mapped[part.name]
            return [mapped[part.name]]
        if len(below) > 1 and len(set(below)) == 1:
            found[part.name] = below[0]
        return below

    def inherit(part: ModulePart, device: Device) -> None:
        device = found.setdefault(part.name, device)
        for name, _ in part.tensors:
            found[name] = mapped.get(name, device)
        for child in part.children:
            inherit(child, device)

    keys_below(parts.root)
    inherit(parts.root, CPU)
    return found
