"""Components of a pipeline that lie in host memory until they run: whole models, blocks, or single layers.

Source: accelerate 1.15, hooks.py (`cpu_offload_with_hook`, `cpu_offload`), as enable_model_cpu_offload and
enable_sequential_cpu_offload use them; diffusers 0.42.1, hooks/group_offloading.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from memcalc.autograd.tape import WEIGHTS, Tape
from memcalc.autograd.tensor import Storage
from memcalc.common.sizes import rounded
from memcalc.models.common.autoencoder import Autoencoder
from memcalc.models.common.denoiser import Denoiser
from memcalc.nn.model import Network
from memcalc.nn.module import QUANTIZATION_CONSTANTS, Buffer, Module, Parameter
from memcalc.nn.stack import Stack
from memcalc.tables.dtypes import INT8


class Placement:
    """Which weights are on the GPU when; `labels` are the parts of the box by component.

    Before anything runs only what `standing` says is there.
    """

    def __init__(
        self, tape: Tape, kind: str, networks: Mapping[str, Network], labels: Mapping[str, str], upcast: str = ""
    ) -> None:
        """Offload `networks` by name as `kind` says; group offload leaves those of Transformers on the GPU.

        `upcast` names the one that is widened from 16 to 32 bits while it runs; it is bound to the tape as it is then.
        """
        self.tape, self.kind, self.labels, self.upcast = tape, kind, labels, upcast
        grouped = kind.startswith("group")
        self.offloaded = frozenset(
            name
            for name, network in networks.items()
            if kind != "none" and not (grouped and not isinstance(network, (Denoiser, Autoencoder)))
        )
        self._standing: dict[str, int] = {}
        self._held: dict[str, Storage] = {}
        """Components that are on the GPU for a while."""
        denoisers = [name for name, network in networks.items() if isinstance(network, Denoiser)]
        self._order = [name for name in networks if name not in denoisers[:-1]]
        """Components as they push each other out: each the one before it, and no other."""
        self._copies: dict[str, dict[int, int]] = {}
        self._second: dict[int, Storage] = {}
        """Bytes of weights that come although they never left, by component and layer; and those that are there."""
        self._alone: dict[str, int] = {}
        """Bytes that come and go with a whole component, by its name."""
        for name, network in networks.items():
            self._prepare(name, network)

    def _prepare(self, name: str, network: Network) -> None:
        tensors = [tensor for _, tensor in network.tensors()]
        if name not in self.offloaded:
            whole = _bytes(tensors)
            self._standing[name] = whole // 2 if name == self.upcast else whole
            self._alone[name] = whole - self._standing[name]
        elif self.kind == "model":
            self._standing[name] = self._stay(name, network)
            self._alone[name] = _bytes(tensors) - self._standing[name]
        elif self.kind == "group":
            # A buffer outside blocks is in a list of its group beside the module: it stays, and comes twice.
            buffers = _bytes(t for t in _outside_blocks(network) if isinstance(t, Buffer))
            self._standing[name] = buffers
            self._alone[name] = self._by_block(network, self.labels[name]) + buffers
        else:
            keeps_buffers = self.kind == "sequential"
            self._standing[name] = _bytes(t for t in tensors if isinstance(t, Buffer)) if keeps_buffers else 0
            for _, module in network.modules():
                own = [t for _, t in module.direct_tensors() if not (keeps_buffers and isinstance(t, Buffer))]
                if own:
                    self._comes_with(module, _bytes(own, 1), self.labels[name])

    def _stay(self, name: str, network: Network) -> int:
        """Bytes of LLM.int8 weights, which stay on the GPU although they are moved.

        bitsandbytes' layers keep what they compute with (`state.CB`, `state.SCB`) when the model goes to the host. A
        weight that comes back is a second copy, until its layer has run and points at the first one again.
        """
        total = 0
        for _, module in network.modules():
            own = [tensor for _, tensor in module.direct_tensors()]
            kept = [tensor for tensor in own if tensor.dtype.name == INT8.name]
            total += _bytes(kept)
            if kept:
                total += _bytes(tensor for tensor in own if tensor.group == QUANTIZATION_CONSTANTS)
                self._copies.setdefault(name, {})[id(module)] = _bytes(kept)
                module.hooks = self._pointed_back
        return total

    def _pointed_back(self, own: Module, x: Any, *args: Any, **kwargs: Any) -> Any:
        out = own.call(x, *args, **kwargs)
        self._second.pop(id(own), None)
        return out

    def _by_block(self, network: Module, label: str) -> int:
        """Let each block of a list come while it runs; returns the bytes of the rest, which comes with the network."""
        rest = _bytes(tensor for _, tensor in network.direct_tensors())
        for name, value in vars(network).items():
            if isinstance(value, Stack):
                for block in value.blocks:
                    self._comes_with(block, _bytes((t for _, t in block.tensors()), 1), label)
            elif isinstance(value, list):
                for block in (part for part in value if isinstance(part, Module)):
                    self._comes_with(block, _bytes(t for _, t in block.tensors()), label)
            elif isinstance(value, Module) and isinstance(network, Autoencoder) and name in _HALVES:
                self._comes_with(value, self._by_block(value, label), label)
            elif isinstance(value, Module):
                rest += _bytes(tensor for _, tensor in value.tensors())
        return rest

    def _comes_with(self, module: Module, nbytes: int, label: str) -> None:
        """Have `nbytes` on the GPU while `module` runs."""
        tape = self.tape

        def run(own: Module, x: Any, *args: Any, **kwargs: Any) -> Any:
            held = tape.allocate(nbytes, WEIGHTS, label)
            out = own.call(x, *args, **kwargs)
            del held
            return out

        if nbytes:
            module.hooks = run

    @property
    def standing(self) -> dict[str, int]:
        """Bytes of weights that are on the GPU all the time, by part of the box."""
        return {self.labels[name]: nbytes for name, nbytes in self._standing.items() if nbytes}

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        """Run a component: it comes if it is not there, and what it pushes out goes first."""
        if self.kind == "model":
            place = self._order.index(name)
            before = self._order[place - 1] if place else ""
            self._held.pop(before, None)
            for module in self._copies.get(before, {}):
                self._second.pop(module, None)
            if name not in self._held:
                for module, nbytes in self._copies.get(name, {}).items():
                    self._second[module] = self.tape.allocate(nbytes, WEIGHTS, self.labels[name])
                self._held[name] = self.tape.allocate(self._alone[name], WEIGHTS, self.labels[name])
            yield
            return
        coming = self._alone.get(name, 0)
        held = self.tape.allocate(coming, WEIGHTS, self.labels[name]) if coming else None
        yield
        del held

    def finish(self) -> None:
        """All leave when the call ends."""
        self._held.clear()
        self._second.clear()


def _outside_blocks(network: Module) -> Iterator[Parameter]:
    yield from (tensor for _, tensor in network.direct_tensors())
    for value in vars(network).values():
        if isinstance(value, Module) and not isinstance(value, Stack):
            yield from (tensor for _, tensor in value.tensors())


MOVED_BY_BLOCK = ("AutoencoderKL", "AutoencoderKLWan")
"""Autoencoders that group offload can move by blocks: of the others only `forward` would bring the weights, which a
pipeline does not call (RuntimeError in diffusers 0.42.1)."""

_HALVES = ("encoder", "decoder", "quant_conv", "post_quant_conv")
"""`_group_offload_block_modules` of autoencoders."""


def _bytes(tensors: Any, copies: int | None = None) -> int:
    """Bytes of bound tensors, each rounded; all blocks that they stand for, or so many `copies`."""
    found: list[Parameter] = list(tensors)
    return sum(rounded(t.numel * t.dtype.itemsize) * (t.copies if copies is None else copies) for t in found)
