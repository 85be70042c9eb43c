"""A stage of a pipeline: consecutive blocks of a decoder, with the embedding on the first and the head on the last.

Source: torch/distributed/pipelining/stage.py of PyTorch 2.14 for what runs, Transformers for how blocks are divided.
"""

from __future__ import annotations

from memcalc import ops
from memcalc.autograd.graph import AccumulateGrad
from memcalc.autograd.tape import BEFORE, TEMPORARY, Allocation, Tape
from memcalc.autograd.tensor import Storage, Tensor, contiguous_stride
from memcalc.common.sizes import Shape
from memcalc.errors import UsageError
from memcalc.models.common.causal_lm import CausalLM, DecoderModel
from memcalc.nn.model import Batch, Network, Outputs
from memcalc.nn.module import Module
from memcalc.nn.run_context import run_context
from memcalc.parallel.setup import ParallelSetup
from memcalc.tables.dtypes import FP32


class Identity(Module):
    """Stands where another stage has the module (torch.nn.Identity)."""

    def forward(self, x: Tensor) -> Tensor:
        """x itself."""
        return x


class Stage(Network):
    """The part of a model that one stage of a pipeline runs; a whole model is first and last.

    It takes the hidden states that the stage before it sent, and gives hidden states, or the loss of one micro-batch.
    """

    first: bool
    last: bool
    sends_and_forgets = False
    """Whether received tensors come and go with their micro-batch and outputs are freed once sent (Megatron-Core)."""

    def boundary(self, batch: int, length: int) -> Shape:
        """Shape of what stages send to each other."""
        raise NotImplementedError


def received(tape: Tape, shape: Shape, *, held: bool) -> Tensor:
    """What the stage before sent: in a buffer that stands (`held`), or made for this micro-batch."""
    dtype = run_context(tape).weights_dtype
    storage = Storage(tape, Allocation(TEMPORARY, "", 0, BEFORE)) if held else tape.empty(shape, dtype).storage
    out = Tensor(shape, contiguous_stride(shape), dtype, storage)
    out.node = AccumulateGrad(tape, "gradient that is sent back", None, TEMPORARY)
    return out


class PipelineStage(Stage):
    """The part of a decoder of Transformers, under torch.distributed.pipelining."""

    def __init__(self, whole: CausalLM, model: DecoderModel, blocks: range, *, first: bool, last: bool) -> None:
        self.model = model
        self.first, self.last = first, last
        model.layers.keep(blocks)
        self.hidden = model.embed_tokens.weight.shape[-1] if hasattr(model.embed_tokens, "weight") else 0
        if not first:
            model.embed_tokens = Identity()
        if last:
            self.lm_head = whole.lm_head
            self._logits = whole.logits
        else:
            model.norm = Identity()

    def forward(self, batch: Batch) -> Outputs:
        """Loss and logits of the last stage, hidden states in place of the loss of any other."""
        shape = self.boundary(*batch.ids.shape)
        sent = None if self.first else received(batch.ids.tape, shape, held=True)
        hidden = self.model(batch.ids, batch.padding, embeds=sent)
        del sent
        if not self.last:
            return Outputs(hidden)
        with batch.ids.tape.scoped("LM head and loss"):
            logits = self._logits(hidden)
            flat = ops.view(ops.to(logits, FP32), -1, logits.shape[-1])
            loss = ops.cross_entropy(flat, ops.view(batch.ids, -1))
        return Outputs(loss, (logits,))

    def boundary(self, batch: int, length: int) -> Shape:
        """Shape of what stages send to each other."""
        return (batch, length, self.hidden)


def stage_of(network: Network, layout: ParallelSetup) -> Network:
    """The part of a model, unbound, that stage `layout.stage` of a pipeline runs.

    Raises UsageError where the model is no plain decoder, or has fewer blocks than there are stages.
    """
    stages = layout.pipeline * layout.virtual
    if not (isinstance(network, CausalLM) and isinstance(network.model, DecoderModel)):
        raise UsageError(
            "--pipeline-parallel-size cuts a decoder with one stack of blocks into stages, which this model is not; "
            "leave it out."
        )
    depth = network.model.layers.depth
    if stages > depth:
        raise UsageError(
            f"--pipeline-parallel-size makes {stages} stages of {depth} blocks; take no more stages than blocks."
        )
    index = layout.stage or 0
    return PipelineStage(
        network, network.model, blocks_of(depth, stages, index), first=index == 0, last=index == stages - 1
    )


def blocks_of(depth: int, stages: int, index: int) -> range:
    """The blocks of a stage: evenly many, and the first stages take the rest."""
    each, rest = divmod(depth, stages)
    start = index * each + min(index, rest)
    return range(start, start + each + (index < rest))
