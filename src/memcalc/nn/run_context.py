"""How the forward pass that a tape records is run: what modules ask besides their inputs.

PyTorch's own modes (grad mode, autocast, dropout) stand on the tape, where operations find them. What Transformers
passes down as arguments and config attributes stands here.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from memcalc.autograd.spans import TracedBlock
from memcalc.autograd.tape import Tape
from memcalc.autograd.tensor import Tensor
from memcalc.tables.dtypes import FP32, DType

if TYPE_CHECKING:
    from memcalc.nn.kv_cache import Cache


@dataclass(frozen=True)
class Routed:
    """Logits [n, experts] that the router of a block gave, of which each token meets `per_token` experts."""

    block: TracedBlock | None
    logits: Tensor
    per_token: int


@dataclass(eq=False)
class RunContext:
    """Settings of one run, and what its modules collect on the way."""

    attention: str = "sdpa"
    """The attention implementation: eager, sdpa or flash."""
    training: bool = True
    """Modules are in training mode (`module.train()`)."""
    weights_dtype: DType = FP32
    """The dtype of the model's weights, and so of its floating inputs."""
    causal: bool = False
    """Attention without a mask is causal (`is_causal` of the kernels)."""
    padding: Tensor | None = None
    """The padding mask, if it was computed from other inputs instead of being an input itself."""
    position_ids: Tensor | None = None
    """Positions [b, s] of packed rows, which begin anew with each sample; None: rows hold one sample."""
    packing_read: bool = False
    """Whether a decoder took these positions."""
    # generation
    cache: Cache | None = None
    """KV cache and recurrent states (`past_key_values`); None in training."""
    beams: int = 1
    """Decoded sequences for each encoder input (`num_beams`)."""
    all_logits: bool = False
    """Generation computes the logits of every token instead of the last one only."""
    # activation checkpointing
    checkpointing: bool = False
    """Checkpoint the blocks of stacks."""
    reentrant: bool = False
    """Use reentrant checkpointing (`use_reentrant=True`: a node that runs backward inside backward)."""
    selective: bool = False
    """Recompute only the core of attention in backward, so that scores and probabilities are not saved."""
    recomputed_attentions: int = 0
    """How many attention cores are recomputed."""
    # what is collected
    hidden_states: list[tuple[Tensor, int]] | None = None
    """Collects (hidden states, copies) of every block under `output_hidden_states`; None where not asked for."""
    router_outputs: list[Routed] | None = None
    """Collects router outputs of the forward pass if the model computes an auxiliary loss of them."""
    traced_blocks: int = 0
    """How many blocks were traced; it does not grow with the depth of a model."""
    retained_bytes: int = 0
    """Bytes that modules keep as attributes after the step (recurrent states and their graphs)."""

    @property
    def past_length(self) -> int:
        """How many tokens the cache has seen."""
        return 0 if self.cache is None else self.cache.length

    @contextmanager
    def attention_backend(self, attention: str) -> Iterator[None]:
        """Use this attention implementation inside: not every part of a model supports the requested one."""
        before, self.attention = self.attention, attention
        try:
            yield
        finally:
            self.attention = before


def run_context(of: Tensor | Tape) -> RunContext:
    """The context of the run that a tape records, or the tape of a tensor; made at the first call."""
    tape = of.tape if isinstance(of, Tensor) else of
    run = tape.run
    if not isinstance(run, RunContext):
        tape.run = run = RunContext()
    return run


@contextmanager
def training_mode(tape: Tape, training: bool) -> Iterator[None]:
    """Modules are in training mode inside or not (`module.train(training)`), and so is dropout unless it is off."""
    run = run_context(tape)
    before = run.training, tape.dropout_enabled
    run.training, tape.dropout_enabled = training, training and tape.dropout_enabled
    try:
        yield
    finally:
        run.training, tape.dropout_enabled = before
