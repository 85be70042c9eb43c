"""Sequence parallel beside tensor parallel: the residual stream is sharded along the sequence (torchtitan's plan).

Source: the plan of torchtitan's Llama 3 (`parallelize_module` with SequenceParallel, PrepareModuleInput,
ColwiseParallel and RowwiseParallel) on torch 2.14's DTensor. The gathered inputs of attention and MLP are saved whole.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from memcalc.autograd.tensor import Tensor
from memcalc.errors import UsageError
from memcalc.nn.layers.linear import Linear
from memcalc.nn.layers.mixture_of_experts import ExpertWeights
from memcalc.nn.layers.mlp import GatedMLP
from memcalc.nn.model import Network
from memcalc.nn.module import Module
from memcalc.nn.module_paths import output_head, sites, token_embeddings
from memcalc.parallel.collectives import gather_last, gather_sequence, scatter_sequence
from memcalc.parallel.tensor_training import divided_attention, partial_look_up


def gathered(ranks: int, module: Module, x: Tensor, *args: Any, **kwargs: Any) -> Any:
    """Attention or MLP: the whole sequence is gathered for it."""
    return module.run(gather_sequence(x, ranks), *args, **kwargs)


def scattered(ranks: int, module: Module, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """A layer divided by its inputs: each rank keeps its part of the sequence of the sum."""
    return scatter_sequence(module.run(x, *args, **kwargs), ranks)


def vocabulary(ranks: int, words: int, module: Module, ids: Tensor) -> Tensor:
    """An embedding divided by words, of which each rank keeps its part of the sequence."""
    looked_up, mask = partial_look_up(words, module, ids)
    out = scatter_sequence(looked_up, ranks)
    del mask
    return out


def head(ranks: int, words: int, loss_parallel: bool, module: Module, x: Tensor) -> Tensor:
    """A head divided by words; its logits are gathered unless the loss takes them sharded."""
    logits: Tensor = module.run(gather_sequence(x, ranks))
    return logits if loss_parallel else gather_last(logits, words, ranks)


def put_sequence_collectives(network: Network, ranks: int, words: int, *, loss_parallel: bool) -> None:
    """Put the plan's collectives around the modules of one rank's share of a decoder of `words` words.

    Raises UsageError where the family is no plain decoder.
    """
    found = sites(network)
    attention = divided_attention(found, ranks)
    tables, lm_head = token_embeddings(found), output_head(found)
    if any(isinstance(site.module, ExpertWeights) for site in found) or not isinstance(lm_head, Linear):
        raise UsageError(
            "--sequence-parallel is described for dense decoders with a language-model head, which this model is not; "
            "leave it out."
        )
    for module in attention:
        module.collective = partial(gathered, ranks)
        vars(module)[module.out].collective = partial(scattered, ranks)
    for site in found:
        if isinstance(site.module, GatedMLP):
            site.module.collective = partial(gathered, ranks)
            site.module.down_proj.collective = partial(scattered, ranks)
    for table in tables:
        table.collective = partial(vocabulary, ranks, words)
    lm_head.collective = partial(head, ranks, words, loss_parallel)
