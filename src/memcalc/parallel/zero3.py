"""DeepSpeed ZeRO stage 3: every weight in shards, gathered for each submodule that has weights of its own.

Source: deepspeed/runtime/zero/{stage3,parameter_offload,partitioned_param_coordinator}.py of DeepSpeed 0.19.6; the
names are its own.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from memcalc.autograd.graph import AccumulateGrad, Grads, Node, record
from memcalc.autograd.tape import OVERHEAD, Tape
from memcalc.autograd.tensor import Storage, Tensor
from memcalc.common.sizes import rounded
from memcalc.nn import parameter_bytes
from memcalc.nn.model import Outputs
from memcalc.nn.module import Buffer, Parameter
from memcalc.optim.weight import SCALAR, Weight
from memcalc.parallel import traffic
from memcalc.parallel.engine import Engine, Job, Part, leaf, replaced, tensors_of
from memcalc.parallel.zero3_coordinator import REDUCE_STREAM, Coordinator, Recorded, Sharded
from memcalc.parallel.zero_bucket import LOSSES
from memcalc.tables.dtypes import FP32, short

BUCKET = "reduce buckets (ZeRO)"
GATHERED = "gathered weights (ZeRO-3)"
NORMS = "gradient norms (ZeRO)"
_UNSCALING = 4
"""Scalars that are alive while a sub-group's gradients are unscaled and clipped."""
_SUMMING = 6
"""Scalars that are alive while offloaded gradients' norms are summed."""
MASTER = 4
"""Bytes of an element of the fp32 partition."""


class Submodule:
    """A module with the weights that it has itself, if any, and the hooks around it."""

    def __init__(self, engine: Zero3, params: tuple[Sharded, ...]) -> None:
        self.engine = engine
        self.params = params
        self.waiting = 0
        """Gradients of inputs that backward still has to bring (`ds_grads_remaining`)."""

    def __call__(self, module: Any, *args: Any, **kwargs: Any) -> Any:
        """Fetch the weights, run the module, release them; what passes in and out leads to the hooks of backward."""
        coordinator = self.engine.coordinator
        coordinator.fetch(self, self.params)
        passed = self._passed(args, self._post_backward)
        self.waiting = sum(x.node is not None for x in tensors_of(passed))
        out = module.call(*passed, **kwargs)
        del passed
        coordinator.release(self, self.params, self.params)
        return self._passed(out, self._pre_backward)

    def _passed(self, value: Any, backward: Any) -> Any:
        """Tensors that need a gradient, each behind a node whose backward runs a hook."""

        def behind(x: Tensor) -> Tensor:
            view = Tensor(x.shape, x.stride, x.dtype, x.storage, is_view=True)
            record(self.engine.tape, view, backward, (x,))
            return view

        if isinstance(value, Outputs):
            value.replace(lambda x: x if x.node is None else behind(x))
            return value
        return replaced(value, {id(x): behind(x) for x in tensors_of(value) if x.node is not None})

    def _pre_backward(self, node: Node, grads: Grads) -> list[Tensor | None]:
        self.engine.coordinator.fetch(self, self.params, backward=True)
        return list(grads)

    def _post_backward(self, node: Node, grads: Grads) -> list[Tensor | None]:
        self.waiting -= 1
        if self.waiting == 0:
            self.engine.coordinator.release(self, self.params, self.params, backward=True)
        return list(grads)


class Zero3(Engine):
    """Rank 0 of stage 3."""

    LOSSES = LOSSES
    learns = True

    def __init__(self, job: Job) -> None:
        super().__init__(job)
        self.options = job.layout.zero
        self.offloads = "optimizer" in job.layout.offload
        self.offloads_params = "parameters" in job.layout.offload
        self.ranks = job.layout.data
        self.dtype = self.parameters[0].dtype if self.parameters else job.compute
        self.recorded: Recorded | None = None
        self.sharded = {id(p): Sharded(p, self.ranks, self.options, self.offloads_params) for p in self.parameters}
        self.waiting: list[tuple[Sharded, list[object]]] = []
        self.elements = 0
        self.norms: list[Storage] = []

    def learn(self, before: Engine | None) -> None:
        """Take over the order of submodules, by which weights are prefetched and kept."""
        if isinstance(before, Zero3):
            self.recorded = before.coordinator.recorded

    # -- hooks ----------------------------------------------------------------------------------------------------

    def attach(self, tape: Tape) -> None:
        """Shard every weight, and hook into every module that has weights of its own."""
        self.tape = tape
        tape.keeps_linear_inputs = True
        self.coordinator = Coordinator(tape, self.options, self.recorded)
        for index, shard in enumerate(self.sharded.values()):
            shard.order = index
            self.coordinator.by_order[index] = shard
            if not shard.persists:
                shard.settle(tape)
            node = leaf(shard.parameter)
            if node is not None:
                node.post_accumulate_hook = partial(self._arrived, shard)
        for _, module in self.job.network.modules():
            own = [p for _, p in module.direct_tensors() if not isinstance(p, Buffer)]
            module.hooks = Submodule(self, tuple(self.sharded[id(p)] for p in own))

    def _arrived(self, shard: Sharded, node: AccumulateGrad) -> None:
        gradient, node.gradient = node.gradient, None
        assert gradient is not None
        held: list[object] = [gradient.storage]
        del gradient
        limit = self.options.reduce_bucket_size
        if self.elements + shard.numel > limit and self.elements > 0:
            self._reduce()
        if self.options.contiguous_gradients and self.elements + shard.numel <= limit:
            held.clear()
        self.waiting.append((shard, held))
        self.elements += shard.numel

    def _reduce(self) -> None:
        """Interleave the gradients by rank, reduce them, and add this rank's part to its shard of the gradients."""
        if not self.waiting:
            return
        itemsize = self.dtype.itemsize
        flat: list[Storage] = []
        traffic.scatter(self.tape, self.elements * itemsize, self.ranks)
        shards = [shard for shard, _ in self.waiting]
        in_place = self.options.contiguous_gradients and self.elements <= self.options.reduce_bucket_size
        ragged = len(shards) > 1 or shards[0].numel % self.ranks
        if ragged and (self.options.reduce_scatter or not in_place):
            padding = [self._new(n * itemsize) for shard in shards for n in shard.padding]
            flat.append(self._new(sum(shard.chunk for shard in shards) * self.ranks * itemsize))
            del padding
        for shard, held in self.waiting:
            if self.offloads:
                self._to_host(shard)
            held.clear()
        self.waiting.clear()
        self.elements = 0
        flat.clear()

    def _to_host(self, shard: Sharded) -> None:
        chunk = min(shard.chunk, shard.numel)
        on_device = self._new(chunk * self.dtype.itemsize)
        wide = self._new(8 * chunk)
        del wide
        self.norms.append(self._new(SCALAR))
        del on_device

    def _new(self, nbytes: int) -> Storage:
        stream = 0 if self.options.overlap_comm is False else REDUCE_STREAM
        return self.tape.allocate(nbytes, OVERHEAD, BUCKET, stream)

    def backward_over(self) -> None:
        """The epilogue: reduce what waits, and release what no hook released."""
        self._reduce()
        self.coordinator.reset()
        for norm in self.norms:
            self.tape.keep(norm)

    # -- what stands ----------------------------------------------------------------------------------------------

    @property
    def trained(self) -> list[Sharded]:
        """The weights that are trained, with those of equal blocks."""
        return [s for s in self.sharded.values() if leaf(s.parameter) is not None for _ in range(s.parameter.copies)]

    @property
    def chunks(self) -> list[int]:
        """Elements of this rank's shard of every trained weight."""
        return [shard.chunk for shard in self.trained]

    def frozen_shards(self) -> list[int]:
        """Bytes of this rank's shard of every weight that is not trained."""
        frozen = [s for s in self.sharded.values() if leaf(s.parameter) is None]
        return [s.chunk * self.dtype.itemsize for s in frozen for _ in range(s.parameter.copies)]

    def weights(self) -> Iterator[Part]:
        """The flat shard of the trained weights, those of frozen ones, what stays gathered, and buffers."""
        if not self.offloads_params:
            if self.chunks:
                yield f"{short(self.dtype)} weight shards", rounded(sum(self.chunks) * self.dtype.itemsize)
            yield f"{short(self.dtype)} frozen weight shards", sum(map(rounded, self.frozen_shards()))
        yield from parameter_bytes.by_label(self.buffers_of_model).items()

    def states(self) -> Iterator[Part]:
        """The fp32 master weights of this rank's shards."""
        if not self.offloads:
            yield "fp32 master weights", sum(rounded(n * MASTER) for n in self.sub_groups())

    def buffers(self, phase: str) -> Iterator[Part]:
        """The bucket, small weights that stay gathered but for the step, and the norm of the step before."""
        if self.chunks:
            yield BUCKET, rounded(self.options.reduce_bucket_size * self.dtype.itemsize)
        if phase != "step":
            yield "small weights that stay gathered", self._persistent()
        if not self.offloads:
            yield NORMS, SCALAR * (2 + len(self.sub_groups()) * (phase == "step"))
        elif phase == "step":
            yield NORMS, SCALAR * len(self.chunks) + max(self._persistent(), _SUMMING * SCALAR)
        if phase == "backward":
            yield "scaled loss", LOSSES * SCALAR

    def gradients(self, phase: str, scratch: int = 0) -> Iterator[Part]:
        """This rank's shard of every gradient, from start to end."""
        if self.chunks and not self.offloads:
            yield "sharded gradients", rounded(sum(self.chunks) * self.dtype.itemsize)

    def persistent(self) -> list[int]:
        """Bytes of each weight that stays gathered, and goes at the beginning of the step; a lone rank's are shards."""
        kept = [s for s in self.sharded.values() if s.persists and (s.ranks > 1 or s.on_host)]
        return [s.numel * self.dtype.itemsize for s in kept for _ in range(s.parameter.copies)]

    def _persistent(self) -> int:
        return sum(map(rounded, self.persistent()))

    def sub_groups(self) -> list[int]:
        """Elements of the sub-groups that the optimizer steps one after another."""
        groups: list[int] = []
        filled = 0
        for shard in self.trained:
            if not groups or filled >= self.options.sub_group_size:
                groups.append(0)
                filled = 0
            groups[-1] += shard.chunk
            filled += shard.chunk
        return groups

    def temporaries(self, phase: str, step: Part) -> Iterator[Part]:
        """The gradient norm in fp64, then a sub-group's gradients flattened and cast, then the optimizer."""
        if phase != "step" or self.offloads or not self.chunks:
            return
        norms = max(SCALAR * (index + 1) + rounded(8 * chunk) for index, chunk in enumerate(self.chunks))
        largest = max(self.sub_groups())
        master = rounded(largest * MASTER)
        flat = rounded(largest * self.dtype.itemsize) if len(self.chunks) > 1 else 0
        totals = 2 * SCALAR
        cast = 0 if self.dtype is FP32 else master  # fp32 gradients are flattened, and that is all
        unscaled = totals + (cast or flat) + _UNSCALING * SCALAR
        early, late = max(norms, totals + flat + cast, unscaled), totals + (cast or flat) + step[1]
        if early >= late:
            yield "gradient norms or fp32 gradients (ZeRO)", early
        else:
            yield "fp32 gradients (ZeRO)", late - step[1]
            yield step

    def updated(self, weights: Sequence[tuple[Parameter, Weight]]) -> tuple[Weight, ...]:
        """A flat fp32 tensor for each sub-group."""
        if self.offloads or not weights:
            return ()
        return tuple(
            replace(weights[0][1], shape=(n,), itemsize=MASTER, copies=1, group="partition") for n in self.sub_groups()
        )

    def host(self) -> Iterator[Part]:
        """Pinned shards of what is offloaded, with the fp32 partition, its gradients and states."""
        size = sum(self.chunks)
        if self.offloads_params:
            yield "weight shards (pinned)", sum(s.chunk * s.parameter.copies for s in self.sharded.values()) * 2
        if self.offloads:
            yield "fp32 master weights (pinned)", size * MASTER
            yield "fp32 gradients (pinned)", size * MASTER
            yield "sharded gradients (pinned)", size * self.dtype.itemsize
            yield "optimizer states", 2 * size * MASTER
