"""DeepSpeed-Ulysses: ranks share every sequence, and in attention they share heads instead.

Source: UlyssesSPAttentionHF in deepspeed/runtime/sequence_parallel/ulysses_sp.py of DeepSpeed 0.19.6, the attention
that Accelerate 1.15 installs for `parallelism_config` with `sp_backend` deepspeed. Its dimensions are sequence first.
"""

from __future__ import annotations

from collections.abc import Callable

from memcalc import ops
from memcalc.autograd.tensor import Tensor
from memcalc.errors import UsageError
from memcalc.tables.dtypes import INT64

Core = Callable[[Tensor, Tensor, Tensor, Tensor | None], tuple[Tensor, Tensor | None]]


def with_all_heads_of_a_rank(
    core: Core, query: Tensor, key: Tensor, value: Tensor, ranks: int
) -> tuple[Tensor, Tensor | None]:
    """Attention of a rank's queries [b, h, s, d] over whole sequences of `ranks` times s tokens: [b, s, h, d].

    Raises:
        UsageError: heads do not divide.
    """
    heads = query.shape[1]
    out, weights = _exchanged(core, query, key, value, ranks)
    out = ops.contiguous(out)
    return ops.view(out, *out.shape[:2], heads, -1), weights


def _exchanged(core: Core, query: Tensor, key: Tensor, value: Tensor, ranks: int) -> tuple[Tensor, Tensor | None]:
    batch, heads, length, _ = query.shape
    if heads % ranks or (key.shape[1] % ranks and ranks % key.shape[1]):
        raise UsageError(
            f"--sequence-parallel-size {ranks} gives each GPU some of the heads, and does not divide the {heads} heads "
            f"and {key.shape[1]} key-value heads; change it."
        )
    query, key, value = (ops.permute(x, 2, 0, 1, 3) for x in (query, key, value))
    tape = query.tape
    _ids = [tape.empty((batch, length), INT64) for _ in range(ranks)]
    _position_ids = tape.empty((batch, ranks * length), INT64)
    queries, keys, values = (_combined(x, ranks) for x in (query, key, value))
    queries = ops.contiguous(ops.permute(queries, 1, 2, 0, 3))
    keys = ops.contiguous(ops.permute(keys, 1, 2, 0, 3))
    values = ops.contiguous(ops.permute(values, 1, 2, 0, 3))
    context, weights = core(queries, keys, values, None)
    context = ops.transpose(context, 0, 1)
    context = ops.reshape(context, *context.shape[:2], -1)
    return ops.transpose(_partitioned(context, ranks), 0, 1), weights


def _combined(x: Tensor, ranks: int) -> Tensor:
    """[s, b, h, d] of a rank's tokens to [ranks · s, b, h / ranks, d], all tokens of some heads."""
    length, batch, heads, dim = x.shape
    if heads < ranks:  # key-value heads that several ranks have
        x = ops.expand(ops.unsqueeze(x, 3), length, batch, heads, ranks // heads, dim)
        x = ops.reshape(x, length, batch, ranks, dim)
    x = ops.reshape(x, length, batch, ranks, -1, dim)
    x = ops.contiguous(ops.permute(x, 2, 0, 1, 3, 4))
    out = ops.all_to_all(x)
    return ops.reshape(out, ranks * length, batch, -1, dim)


def _partitioned(x: Tensor, ranks: int) -> Tensor:
    """[ranks · s, b, n] of some heads to [s, b, ranks · n], all heads of a rank's tokens."""
    length, batch, width = x.shape
    x = ops.contiguous(ops.reshape(x, ranks, length // ranks, batch, width))
    out = ops.permute(ops.all_to_all(x), 1, 2, 0, 3)
    return ops.reshape(out, length // ranks, batch, -1)
