"""The gated delta rule in plain PyTorch, as Transformers runs it where no `fla` kernels are installed.

Everything is in fp32, chunk by chunk for a sequence; most of what it makes stays bound until it returns.
"""

from __future__ import annotations

from memcalc import ops
from memcalc.autograd.tensor import Tensor
from memcalc.nn.layers.recurrent.token_loop import token_steps
from memcalc.tables.dtypes import FP32

CHUNK = 64
"""Tokens of a chunk."""


def _l2_norm(x: Tensor) -> Tensor:
    factor = ops.rsqrt(ops.add_scalar(ops.sum(ops.mul(x, x), keepdim=True)))
    return ops.mul(x, factor)


def _repeated(x: Tensor, count: int) -> Tensor:
    """[b, s, h, d] to [b, s, count * h, d]: a copy."""
    batch, length, heads, width = x.shape
    wide = ops.expand(ops.unsqueeze(x, 3), batch, length, heads, count, width)
    return ops.view(ops.clone(wide, contiguous=True), batch, length, heads * count, width)


def _prepared(
    query: Tensor, key: Tensor, value: Tensor, beta: Tensor, decay: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """All as [b, heads, s, ...] in fp32, with as many query and key heads as value heads, and these two normalised."""
    repeats = value.shape[2] // key.shape[2]
    if repeats > 1:
        query = _repeated(query, repeats)
        key = _repeated(key, repeats)
    query, key, value, beta, decay = [
        ops.to(ops.transpose(x, 1, 2), FP32, contiguous=True) for x in (query, key, value, beta, decay)
    ]
    query = _l2_norm(query)
    key = _l2_norm(key)
    query = ops.mul_scalar(query)
    return query, key, value, beta, decay


def _wide(x: Tensor) -> Tensor:
    return ops.unsqueeze(x, -1)


def chunk_rule(
    query: Tensor, key: Tensor, value: Tensor, beta: Tensor, decay: Tensor, initial: Tensor | None, *, keep: bool
) -> tuple[Tensor, Tensor | None]:
    """Query and key [b, s, k_heads, k], value [b, s, heads, v], beta and decay [b, s, heads].

    Gives the output [b, s, heads, v], and if asked to `keep` it the last state [b, heads, k, v].
    """
    dtype, length = query.dtype, query.shape[1]
    query, key, value, beta, decay = _prepared(query, key, value, beta, decay)
    batch, heads, _, width = value.shape
    extra = -length % CHUNK
    query, key, value = [ops.pad(x, 2, extra) for x in (query, key, value)]
    beta, decay = [ops.pad(x, 2, extra) for x in (beta, decay)]
    v_beta = ops.mul(value, _wide(beta))
    k_beta = ops.mul(key, _wide(beta))
    query, key, k_beta, v_beta = [
        ops.reshape(x, *x.shape[:2], -1, CHUNK, x.shape[-1]) for x in (query, key, k_beta, v_beta)
    ]
    decay = ops.reshape(decay, *decay.shape[:2], -1, CHUNK)
    above = ops.tril(query, CHUNK)
    summed = ops.cumsum(decay)
    pairwise = ops.sub(ops.unsqueeze(summed, 4), ops.unsqueeze(summed, 3))
    pairwise = ops.masked_fill(pairwise, above)
    pairwise = ops.exp(pairwise)
    system = ops.mul(ops.matmul(k_beta, ops.transpose(key, -1, -2)), pairwise)
    inside = ops.mul(ops.matmul(query, ops.transpose(key, -1, -2)), pairwise)
    k_decayed = ops.mul(k_beta, _wide(ops.exp(summed)))
    values = ops.solve_triangular(system, v_beta)
    k_summed = ops.solve_triangular(system, k_decayed)
    if initial is None:
        state = value.tape.empty((batch, heads, key.shape[-1], width), values.dtype)
    else:
        state = ops.to(initial, values.dtype)
    out = ops.empty_like(values)
    query = ops.mul(query, _wide(ops.exp(summed)))
    key = ops.mul(key, _wide(ops.exp(ops.sub(ops.narrow(summed, -1, 1), summed))))
    chunk_decay = _wide(_wide(ops.exp(ops.select(summed, -1))))
    for _ in token_steps(out.tape, values.shape[2]):
        new = ops.sub(ops.select(values, 2), ops.matmul(ops.select(k_summed, 2), state))
        read = ops.matmul(ops.select(query, 2), state)
        out = ops.copy_slice_(out, ops.add(read, ops.matmul(ops.select(inside, 2), new)))
        moved = ops.mul(state, ops.select(chunk_decay, 2))
        state = ops.add(moved, ops.matmul(ops.transpose(ops.select(key, 2), -1, -2), new))
        del moved
    last = state if keep else None
    del state
    out = ops.reshape(out, batch, heads, -1, width)
    out = ops.narrow(out, 2, length)
    return ops.to(ops.transpose(out, 1, 2), dtype, contiguous=True), last


def token_rule(
    query: Tensor, key: Tensor, value: Tensor, beta: Tensor, decay: Tensor, initial: Tensor
) -> tuple[Tensor, Tensor]:
    """One token, as `chunk_rule`: the output [b, 1, heads, v] and the state [b, heads, k, v]."""
    dtype = query.dtype
    query, key, value, beta, decay = _prepared(query, key, value, beta, decay)
    state = ops.to(initial, value.dtype)
    out = ops.empty_like(value)
    q, k, v = ops.select(query, 2), ops.select(key, 2), ops.select(value, 2)
    faded = _wide(_wide(ops.exp(ops.select(decay, 2))))
    state = ops.mul(state, faded)
    rate = _wide(ops.select(beta, 2))
    read = ops.sum(ops.mul(state, _wide(k)), -2)
    delta = ops.mul(ops.sub(v, read), rate)
    state = ops.add(state, ops.mul(_wide(k), ops.unsqueeze(delta, -2)))
    out = ops.copy_slice_(out, ops.sum(ops.mul(state, _wide(q)), -2))
    return ops.to(ops.contiguous(ops.transpose(out, 1, 2)), dtype), state
