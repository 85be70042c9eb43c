"""DeepSpeed ZeRO stage 3: every weight in shards, gathered for each submodule that has weights of its own.

Source: deepspeed/runtime/zero/{stage3,parameter_offload,partitioned_param_coordinator}.py of DeepSpeed 0.19.6; the
names are its own.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial

from memcalc.autograd.graph import AccumulateGrad
from memcalc.autograd.tape import OVERHEAD, Tape
from memcalc.autograd.tensor import Storage
from memcalc.common.sizes import rounded
from memcalc.nn import parameter_bytes
from memcalc.nn.model import Network
from memcalc.nn.module import Buffer, Parameter
from memcalc.optim.weight import SCALAR, Weight
from memcalc.parallel import traffic
from memcalc.parallel.engine import Engine, Job, Part, leaf, same_modules, see_weights
from memcalc.parallel.zero3_coordinator import Coordinator, Recorded
from memcalc.parallel.zero3_shards import REDUCE_STREAM, SECONDARY, Sharded
from memcalc.parallel.zero3_submodules import Submodule
from memcalc.parallel.zero_bucket import LOSSES
from memcalc.tables.dtypes import FP32, short

BUCKET = "reduce buckets (ZeRO)"
NORMS = "gradient norms (ZeRO)"
_UNSCALING = 4
"""Scalars that are alive while a sub-group's gradients are unscaled and clipped."""
_SUMMING = 6
"""Scalars that are alive while offloaded gradients' norms are summed."""
MASTER = 4
"""Bytes of an element of the fp32 partition."""


class Zero3(Engine):
    """Rank 0 of stage 3."""

    LOSSES = LOSSES
    learns = True
    prepares_teachers = True

    def __init__(self, job: Job) -> None:
        super().__init__(job)
        self.options = job.layout.zero
        self.offloads = "optimizer" in job.layout.offload
        self.offloads_params = "parameters" in job.layout.offload
        self.ranks = job.layout.shards
        self.dtype = self.parameters[0].dtype if self.parameters else job.compute
        self.communicated = FP32 if job.layout.ulysses else self.dtype
        """The dtype of the bucket (`seq_parallel_communication_data_type` with several ranks in a sequence)."""
        self.recorded: Recorded | None = None
        self.drops_small = False
        """Whether no trace is complete in backward, so that even small weights are freed after their use."""
        self.beside: Zero3 | None = None
        """The engine of a frozen model that is not the trained one."""
        self.frozen_recorded: Recorded | None = None
        self.sharded = {id(p): Sharded(p, self.ranks, self.options, self.offloads_params) for p in self.parameters}
        self.waiting: list[tuple[Sharded, list[object]]] = []
        self.elements = 0
        self.norms: list[Storage] = []

    def learn(self, before: Engine | None) -> None:
        """Take over the order of submodules, by which weights are prefetched and kept."""
        if isinstance(before, Zero3):
            self.recorded = before.coordinator.recorded
            self.drops_small = self.recorded.uses is None
            self.frozen_recorded = None if before.beside is None else before.beside.coordinator.recorded

    # -- hooks ----------------------------------------------------------------------------------------------------

    def attach(self, tape: Tape) -> None:
        """Shard every weight, and hook into every module that has weights of its own."""
        self.tape = tape
        tape.keeps_linear_inputs = True
        shards = tuple(self.sharded.values())
        self.coordinator = Coordinator(tape, self.options, self.recorded, shards)
        for shard in shards:
            shard.fixed = shard.persists and not self.drops_small
            if not shard.fixed:
                shard.settle(self.coordinator)
            if shard.persists and not shard.fixed:  # the optimizer's step ends with gathering them
                shard.fill(tape, rounded(shard.nbytes))
            node = leaf(shard.parameter)
            if node is not None:
                node.post_accumulate_hook = partial(self._arrived, shard)
        self._hook(self.job.network, self.sharded)

    def _hook(self, network: Network, sharded: Mapping[int, Sharded]) -> None:
        """Hook into every module; weights are found by their parameters."""
        adapted = {name for name, _ in self.job.network.modules() if name.endswith(".base_layer")}
        for name, module in network.modules():
            name = f"{name}.base_layer" if f"{name}.base_layer" in adapted and network is not self.job.network else name
            own = [sharded[id(p)] for _, p in module.direct_tensors() if not isinstance(p, Buffer)]
            past = [s for s in sharded.values() if s.external] if module is network else []
            module.hooks = Submodule(self.coordinator, name, (*own, *past))

    def hold_frozen(self, network: Network, *, shared: bool) -> int:
        """Another model is sharded by an engine of its own, without an optimizer (`prepare_deepspeed` of TRL 1.16)."""
        tensors = tuple(network.tensors())
        if shared and same_modules(self.job.network, network) is not None:
            see_weights(self.job.tensors, tensors)
            of_base = {name.replace(".base_layer.", "."): p for name, p in self.job.tensors}
            seen = {id(p): self.sharded[id(of_base[name])] for name, p in tensors if not isinstance(p, Buffer)}
            self._hook(network, seen)
            return 0
        layout = replace(self.layout, zero=self.layout.zero_of_frozen)
        self.beside = Zero3(replace(self.job, network=network, tensors=tensors, layout=layout, accumulates=False))
        self.beside.recorded = self.frozen_recorded
        self.beside.attach(self.tape)
        return self.beside.held_without_optimizer()

    def held_without_optimizer(self) -> int:
        """Bytes of the weights of an engine that trains nothing: a shard of each, and small ones gathered for good."""
        shards = sum(rounded(s.chunk * self.dtype.itemsize) * s.parameter.copies for s in self.sharded.values())
        buffers = sum(nbytes for _, nbytes in parameter_bytes.by_label(self.buffers_of_model).items())
        return (0 if self.offloads_params else shards) + self._persistent() + buffers

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
        itemsize = self.communicated.itemsize
        flat: list[Storage] = []
        traffic.scatter(self.tape, self.elements * itemsize, self.ranks)
        shards = [shard for shard, _ in self.waiting]
        in_place = self.options.contiguous_gradients and self.elements <= self.options.reduce_bucket_size
        ragged = len(shards) > 1 or shards[0].numel % self.ranks
        if ragged and (self.options.reduce_scatter or not in_place):
            padding = [self._new(n * itemsize) for shard in shards for n in shard.padding]
            flat.append(self._new(sum(shard.chunk for shard in shards) * self.ranks * itemsize))
            del padding
        if self.communicated is not self.dtype:
            flat += [self._new(shard.chunk * self.dtype.itemsize) for shard in shards]
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
            yield BUCKET, rounded(self.options.reduce_bucket_size * self.communicated.itemsize)
        if phase != "step" and not self.drops_small:
            yield "small weights that stay gathered", self._persistent()
        if not self.offloads:
            yield NORMS, SCALAR * (2 + len(self.sub_groups()) * (phase == "step"))
        elif phase == "step":
            yield NORMS, SCALAR * len(self.chunks) + max(self._persistent(), _SUMMING * SCALAR)
        if phase == "step" and self.options.hpz_partition_size > 1:
            yield SECONDARY, sum(shard.secondary * shard.parameter.copies for shard in self.sharded.values())
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
