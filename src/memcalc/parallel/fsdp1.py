"""FullyShardedDataParallel: a flat parameter for each unit, whose shards are cut wherever they fall.

Source: torch/distributed/fsdp/{_flat_param,_runtime_utils,_exec_order_utils}.py of PyTorch 2.14, `use_orig_params`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from memcalc.autograd.tape import GRADIENTS, Tape
from memcalc.common.sizes import rounded
from memcalc.nn import parameter_bytes
from memcalc.nn.model import Network
from memcalc.nn.module import Parameter
from memcalc.nn.run_context import run_context
from memcalc.optim.weight import Weight
from memcalc.parallel.engine import Engine, Job, Part
from memcalc.parallel.fsdp1_units import SHARDED, FlatUnit
from memcalc.parallel.wrapping import units
from memcalc.tables.dtypes import ALIASES, FP32, DType, short


class FSDP1(Engine):
    """Rank 0 of FullyShardedDataParallel: it never has a shorter shard."""

    STANDING = "gradients of earlier micro-batches"

    def __init__(self, job: Job) -> None:
        super().__init__(job)
        layout = job.layout
        self.casts = any(p.dtype is not job.compute for p in self.parameters if not p.fixed_dtype)
        given = layout.reduce_dtype
        self.reduce_dtype: DType = ALIASES[given] if given else FP32 if self.casts else job.compute
        self.accumulates_whole = job.accumulates and not layout.sync_every_micro_step
        self.accumulates_sharded = job.accumulates and layout.sync_every_micro_step
        self.post_forward_order: list[FlatUnit] = []
        wrapped = units(job.network, "root" if layout.wrap == "root" else "blocks", peft=layout.peft)
        self.units = [
            FlatUnit(self, unit, layout.data, reshard=not unit.root and layout.reshard is not False)
            for unit in wrapped
            if unit.parameters or unit.root
        ]

    def attach(self, tape: Tape) -> None:
        """Shard every unit, and put its hooks around its module."""
        self._wrap(tape)
        run_context(tape).weights_dtype = self.job.compute
        if not self.job.accumulates:  # shards of gradients go with the first hook of the next step
            nbytes = sum(rounded(u.shard * u.stored.itemsize) * u.copies for u in self.units if u.trains)
            before = tape.allocate(nbytes, GRADIENTS, SHARDED)
            del before

    def _wrap(self, tape: Tape) -> None:
        self.tape = tape
        for unit in self.units:
            unit.settle(tape)
            for module in unit.modules:
                module.hooks = unit

    def hold_frozen(self, network: Network, *, shared: bool) -> int:
        """A model of its own is wrapped alike (`prepare_fsdp` of TRL 1.16), and its root is never sharded again."""
        layout = self.layout
        beside = FSDP1(replace(self.job, network=network, tensors=tuple(network.tensors()), layout=layout))
        beside._wrap(self.tape)
        whole = 0
        for unit in beside.units:
            if unit.root and shared:
                unit.unsharded = True  # since the trained model's own pass
            elif unit.root:
                unit.unsharded = True  # since the pass of the step before
                whole = rounded(unit.numel * unit.compute.itemsize)
        return whole + sum(nbytes for _, nbytes in beside.weights())

    def backward_over(self) -> None:
        """The final callback: what no gradient reached is freed, and weights are leaves again."""
        for unit in self.units:
            unit.finish()
        self.post_forward_order.clear()

    # -- what stands ----------------------------------------------------------------------------------------------

    def weights(self) -> Iterator[Part]:
        """One shard for each unit, and the whole buffers."""
        sizes: dict[str, int] = {}
        for unit in self.units:
            name = f"{short(unit.stored)} flat weight shards"
            sizes[name] = sizes.get(name, 0) + rounded(unit.shard * unit.stored.itemsize) * unit.copies
        yield from sizes.items()
        yield from parameter_bytes.by_label(self.buffers_of_model).items()

    def gradients(self, phase: str, scratch: int = 0) -> Iterator[Part]:
        """A shard for each unit; while micro-batches are not reduced, whole flat gradients in the compute dtype."""
        trained = [unit for unit in self.units if unit.reached]
        if phase in ("clip", "step") or self.accumulates_sharded:
            nbytes = sum(rounded(unit.shard * unit.stored.itemsize) * unit.copies for unit in trained)
            yield SHARDED, nbytes
        elif self.accumulates_whole:
            yield self.STANDING, sum(rounded(u.numel * u.compute.itemsize) * u.copies for u in trained)

    def updated(self, weights: Sequence[tuple[Parameter, Weight]]) -> tuple[Weight, ...]:
        """The pieces of the trained weights that lie in this rank's shards; others get no gradient."""
        pieces = {id(p): n for unit in self.units for p, n in unit.pieces()}
        stored = {id(p): unit.stored for unit in self.units for p in unit.params}
        return tuple(
            replace(weight, shape=(pieces[id(parameter)],), itemsize=stored[id(parameter)].itemsize)
            for parameter, weight in weights
            if pieces[id(parameter)]
        )
