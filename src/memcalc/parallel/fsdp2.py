"""`fully_shard`: every weight in shards along its first dimension, gathered a group at a time.

Source: torch/distributed/fsdp/_fully_shard of PyTorch 2.14.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from memcalc import ops
from memcalc.autograd.tape import GRADIENTS, Tape
from memcalc.autograd.tensor import Storage
from memcalc.common.sizes import rounded
from memcalc.nn import parameter_bytes
from memcalc.nn.model import Network
from memcalc.nn.module import Parameter
from memcalc.nn.run_context import run_context
from memcalc.optim.weight import SCALAR, Weight
from memcalc.parallel.engine import Engine, Job, Part, leaf, replaced, same_modules, see_weights, tensors_of
from memcalc.parallel.fsdp2_groups import SHARDED, Group
from memcalc.parallel.fsdp2_params import FSDPParam
from memcalc.parallel.wrapping import units
from memcalc.tables.dtypes import ALIASES, FP32, DType, short


class FSDP2(Engine):
    """Rank 0 of `fully_shard`, the most loaded one: it never has a shorter shard."""

    STANDING = "gradients of earlier micro-batches"

    def __init__(self, job: Job) -> None:
        super().__init__(job)
        layout = job.layout
        self.offloads = "parameters" in layout.offload
        self.has_policy = layout.accelerate or any(
            p.dtype is not job.compute for p in self.parameters if not p.fixed_dtype
        )
        self.reduce_dtype = self._reduce_dtype()
        self.accumulates_whole = job.accumulates and not layout.sync_every_micro_step
        self.accumulates_sharded = job.accumulates and layout.sync_every_micro_step
        self.all_gather_state: Storage | None = None
        self.post_forward_order: list[Group] = []
        self.reduce_scatter_states: list[Storage] = []
        self.groups = list(self._groups())
        self.by_id = {id(p.parameter): p for group in self.groups for p in group.params}

    def _reduce_dtype(self) -> DType | None:
        """The dtype of the reduction: fp32 where the policy computes in 16 bits; None for that of the gradients."""
        given = self.layout.reduce_dtype
        if given is not None:
            return ALIASES[given]
        return FP32 if self.has_policy and not self.layout.accelerate else None

    def param_dtype(self, parameter: Parameter) -> DType | None:
        """The dtype that a parameter is gathered in; None where that is its own."""
        return self.job.compute if self.has_policy and parameter.dtype.floating else None

    def _groups(self) -> Iterator[Group]:
        layout = self.layout
        for unit in units(self.job.network, layout.wrap, experts=layout.expert > 1, peft=layout.peft):
            ranks = layout.data * layout.tensor // layout.expert if unit.expert else layout.shards
            reshard = unit.reshard if layout.reshard is None or layout.wrap == "plan" else layout.reshard
            yield Group(self, unit, ranks, reshard=reshard, root=unit.root)

    def attach(self, tape: Tape) -> None:
        """Shard every weight, and put the groups' hooks around their modules."""
        self.tape = tape
        for group in self.groups:
            for p in group.params:
                p.settle(tape)
                node = leaf(p.parameter)
                if node is not None and self.accumulates_whole and self.reduce_dtype in (None, p.compute):
                    node.gradient = tape.external_tensor(p.parameter.shape, p.compute, GRADIENTS, "")
            for module in group.modules:
                module.hooks = group
        run_context(tape).weights_dtype = self.job.compute

    def hold_frozen(self, network: Network, *, shared: bool) -> int:
        """A model of its own is gathered as a whole: `prepare_fsdp` of TRL 1.16 calls `fully_shard` on it alone."""
        tensors = tuple(network.tensors())
        modules = same_modules(self.job.network, network) if shared else None
        if modules is not None:
            see_weights(self.job.tensors, tensors)
            for name, module in network.modules():
                if isinstance(group := modules[name].hooks, Group):
                    module.hooks = partial(group.run, modules[name])
            return 0
        layout = self.layout if shared else replace(self.layout, wrap="root", reshard=True, accelerate=False)
        job = replace(self.job, network=network, tensors=tensors, layout=layout, accumulates=False)
        beside = FSDP2(job)
        beside.attach(self.tape)
        return sum(nbytes for _, nbytes in beside.weights())

    def cast_inputs(self, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """Floating inputs in the dtype that the policy computes in (`cast_forward_inputs`)."""
        dtype = self.job.compute
        wrong = [x for x in tensors_of((args, kwargs)) if x.dtype.floating and x.dtype is not dtype]
        if not wrong or not self.has_policy:
            return args, kwargs
        by_id = {id(x): ops.to(x, dtype) for x in wrong}
        return replaced(args, by_id), replaced(kwargs, by_id)

    def backward_over(self) -> None:
        """The final callback: post-backward of groups whose inputs needed no gradient, then the rest goes."""
        for group in sorted(self.groups, key=lambda group: not group.root):
            if group.state != "post_backward":
                group.post_backward()
            group.state = "idle"
            group.partial = None
            group.buffer, group.waiting = None, False
            group.post_forward_indices.clear()
        self.post_forward_order.clear()
        self.reduce_scatter_states.clear()

    # -- what stands ----------------------------------------------------------------------------------------------

    def kept_bytes(self, tensor: Parameter) -> int:
        """The padded shard of a weight."""
        p = self.by_id.get(id(tensor))
        if p is None:
            return super().kept_bytes(tensor)
        return 0 if self.offloads else p.local * p.stored.itemsize

    def weights(self) -> Iterator[Part]:
        """Shards, a storage each, and the whole buffers."""
        sizes: dict[str, int] = {}
        for group in self.groups:
            for p in () if self.offloads else group.params:
                name = f"{short(p.stored)} {p.parameter.group}"
                sizes[name] = sizes.get(name, 0) + rounded(p.local * p.stored.itemsize) * p.parameter.copies
        for name, nbytes in parameter_bytes.by_label(self.buffers_of_model).items():
            sizes[name] = sizes.get(name, 0) + nbytes
        yield from sizes.items()

    def gradients(self, phase: str, scratch: int = 0) -> Iterator[Part]:
        """Sharded ones, a storage for each group; while micro-batches are not reduced, whole ones."""
        if phase in ("clip", "step") or self.accumulates_sharded:
            if not self.offloads:
                yield SHARDED, sum(self._sharded_gradients())
        elif self.accumulates_whole:
            yield self.STANDING, sum(self._whole_gradients())

    def _sharded_gradients(self) -> Iterator[int]:
        for group in self.groups:
            reached = [p for p in group.params if p.parameter.reached]
            if reached:
                yield rounded(sum(p.local * p.count * p.stored.itemsize for p in reached)) * group.copies

    def _whole_gradients(self) -> Iterator[int]:
        for group in self.groups:
            for p in group.params:
                if p.parameter.reached:
                    yield self._whole_gradient(p) * p.parameter.copies

    def _whole_gradient(self, p: FSDPParam) -> int:
        numel = p.parameter.numel
        if self.layout.tensor > 1 and p.parameter.group == "embedding":  # DTensor's is as large as the whole table
            numel = self.job.words * p.parameter.shape[-1]
        return rounded(numel * (self.reduce_dtype or p.compute).itemsize)

    def release(self, p: FSDPParam, count: int) -> None:
        """Free `count` accumulated whole gradients of a parameter's kind."""
        if count:
            self.tape.release(self._whole_gradient(p) * count, GRADIENTS, self.STANDING)

    def host(self) -> Iterator[Part]:
        """With offloading: pinned shards and gradients, and the states of torch's AdamW in plain memory."""
        if self.offloads:
            params = [(p, p.local * p.parameter.copies) for group in self.groups for p in group.params]
            trained = sum(n * p.stored.itemsize for p, n in params if p.parameter.reached)
            yield "weight shards (pinned)", sum(n * p.stored.itemsize for p, n in params)
            yield "sharded gradients (pinned)", trained
            yield "optimizer states", 2 * trained

    def parameter_groups(self, weights: Sequence[Weight]) -> list[Sequence[Weight]]:
        """All weights are sharded alike."""
        return [weights]

    def clipping(self) -> int:
        """As on one GPU, and what the norm of sharded tensors takes besides."""
        return 0 if self.offloads else super().clipping() + 2 * SCALAR

    def updated(self, weights: Sequence[tuple[Parameter, Weight]]) -> tuple[Weight, ...]:
        """The shards of the trained weights; none where they are on the host."""
        if self.offloads:
            return ()
        return tuple(
            replace(weight, shape=p.local_shape, itemsize=p.stored.itemsize)
            for p, weight in ((self.by_id[id(parameter)], weight) for parameter, weight in weights)
        )
