"""Tensor parallel in training, as Transformers' plans have it: which modules are divided, and what they send.

Source: transformers/distributed/tensor_parallel.py and the `base_model_tp_plan` of the families, Transformers 5.24.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from memcalc import ops
from memcalc.autograd.tensor import Tensor
from memcalc.errors import UsageError
from memcalc.nn.layers.grouped_query_attention import GroupedQueryAttention
from memcalc.nn.layers.linear import Linear
from memcalc.nn.layers.mixture_of_experts import Experts
from memcalc.nn.layers.mlp import GatedMLP
from memcalc.nn.model import Network
from memcalc.nn.module import Module
from memcalc.nn.module_paths import Site, output_head, sites, token_embeddings
from memcalc.parallel.collectives import all_reduce, copy_to_ranks, gather_last
from memcalc.tables.dtypes import BOOL, INT64


def column(ranks: int, module: Module, x: Tensor, *args: Any, **kwargs: Any) -> Any:
    """A layer divided by its outputs: every rank reads the whole input, whose gradient is summed."""
    return module.run(copy_to_ranks(x, ranks), *args, **kwargs)


def row(ranks: int, module: Module, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """A layer divided by its inputs: the outputs of all ranks are summed."""
    return all_reduce(module.run(x, *args, **kwargs), ranks)


def partial_look_up(words: int, module: Module, ids: Tensor) -> tuple[Tensor, Tensor]:
    """An embedding divided by words: those of other ranks are masked out of the look-up. Also gives the mask.

    Its gradient is as large as the whole table.
    """
    weight = vars(module)["weight"]
    tape = weight.tape
    ids.storage.allocation.aliased = True  # a DTensor is made of them
    mask = tape.empty(ids.shape, BOOL)
    masked = tape.empty(ids.shape, INT64)
    whole = Tensor((words, weight.shape[1]), weight.stride, weight.dtype, weight.storage, weight.node, weight.slot)
    with tape.scoped("embedding"):
        out = ops.embedding(ids, whole)
    del masked
    return out, mask


def vocabulary(ranks: int, words: int, module: Module, ids: Tensor) -> Tensor:
    """An embedding divided by words, summed over the ranks."""
    looked_up, mask = partial_look_up(words, module, ids)
    with ids.tape.scoped("embedding"):
        out = all_reduce(looked_up, ranks)
    del mask
    return out


def head(ranks: int, words: int, module: Module, x: Tensor) -> Tensor:
    """A head divided by words, whose logits every rank gathers."""
    return gather_last(module.run(copy_to_ranks(x, ranks)), words, ranks)


def experts(ranks: int, module: Module, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """Experts of a part of their width on all tokens; the sum over the ranks is made in place."""
    out: Tensor = module.run(copy_to_ranks(x, ranks), *args, **kwargs)
    return out


def divided_attention(found: list[Site], ranks: int) -> list[GroupedQueryAttention]:
    """The attention modules of a model. Raises UsageError where the family has no plan that memcalc knows."""
    attention = [site.module for site in found if isinstance(site.module, GroupedQueryAttention)]
    whole_norms = any(module.qk_norm and module.qk_norm.at in ("projection", "later") for module in attention)
    if not attention or whole_norms or any(module.fused for module in attention):
        raise UsageError(
            f"memcalc does not know Transformers' plan for this family over {ranks} GPUs in training; leave out "
            "--tensor-parallel-size."
        )
    return attention


def put_collectives(network: Network, ranks: int, words: int) -> None:
    """Put Transformers' collectives around the modules of one rank's share of a model of `words` words.

    Raises UsageError where the family has no plan that memcalc knows.
    """
    found = sites(network)
    attention = divided_attention(found, ranks)
    tables, lm_head = token_embeddings(found), output_head(found)
    if lm_head is not None and any(table.weight is vars(lm_head).get("weight") for table in tables):
        raise UsageError(
            "Transformers cannot divide a head that shares its weight with the embedding (tie_word_embeddings) over "
            "--tensor-parallel-size GPUs; leave it out, or untie them in the config."
        )
    for module in attention:
        for name in ("q_proj", "k_proj", "v_proj"):
            vars(module)[name].collective = partial(column, ranks)
        vars(module)[module.out].collective = partial(row, ranks)
    for site in found:
        if isinstance(site.module, GatedMLP):
            site.module.gate_proj.collective = site.module.up_proj.collective = partial(column, ranks)
            site.module.down_proj.collective = partial(row, ranks)
        elif isinstance(site.module, Experts) and site.module.collective is None:
            site.module.collective = partial(experts, ranks)
    for table in tables:
        table.collective = partial(vocabulary, ranks, words)
    if isinstance(lm_head, Linear):
        lm_head.collective = partial(head, ranks, words)
