"""Kimi's delta rule, whose decay is a channel's own, in plain PyTorch, as Transformers runs it without `fla`.

Everything is in fp32, chunk by chunk for a sequence; most of what it makes stays bound until it returns.
"""

from __future__ import annotations

from memcalc import ops
from memcalc.autograd.tensor import Tensor
from memcalc.nn.layers.recurrent.gated_delta_rule import CHUNK
from memcalc.nn.layers.recurrent.token_loop import token_steps
from memcalc.tables.dtypes import FP32


def _l2_norm(x: Tensor) -> Tensor:
    inverse = ops.sqrt(ops.add_scalar(ops.sum(ops.mul(x, x), keepdim=True)))
    return ops.div(x, inverse)


def _wide(x: Tensor) -> Tensor:
    return ops.unsqueeze(x, -1)


def _solved(attn: Tensor) -> Tensor:
    """Rows of [..., 64, 64] replaced one after another by what the rows above make of them, in place."""
    for i in range(1, CHUNK):
        row = ops.clone(ops.narrow(ops.select(attn, -2), -1, i), contiguous=True)
        sub = ops.clone(ops.narrow(ops.narrow(attn, -2, i), -1, i), contiguous=True)
        attn = ops.copy_slice_(attn, ops.add(row, ops.sum(ops.mul(_wide(row), sub), -2)))
    eye = attn.tape.empty((CHUNK, CHUNK), attn.dtype)
    attn = ops.add(attn, eye)
    del eye
    return attn


def _chunked(query: Tensor, key: Tensor, value: Tensor, beta: Tensor, decay: Tensor) -> tuple[Tensor, ...]:
    """Query, key, value, decay, key and value times beta [b, heads, chunks, 64, d] in fp32, and beta itself."""
    query, key, value, beta, g = [
        ops.to(ops.contiguous(ops.transpose(x, 1, 2)), FP32) for x in (query, key, value, beta, decay)
    ]
    query = _l2_norm(query)
    key = _l2_norm(key)
    extra = -query.shape[2] % CHUNK
    query = ops.mul_scalar(ops.pad(query, 2, extra))
    key = ops.pad(key, 2, extra)
    value = ops.pad(value, 2, extra)
    g = ops.pad(g, 2, extra)
    beta = ops.pad(beta, 2, extra)
    v_beta = ops.mul(value, _wide(beta))
    k_beta = ops.mul(key, _wide(beta))
    chunked = [ops.reshape(x, *x.shape[:2], -1, CHUNK, x.shape[-1]) for x in (query, key, value, g, k_beta, v_beta)]
    return *chunked, ops.reshape(beta, *beta.shape[:2], -1, CHUNK)


def chunk_rule(
    query: Tensor, key: Tensor, value: Tensor, beta: Tensor, decay: Tensor, initial: Tensor | None, *, keep: bool
) -> tuple[Tensor, Tensor | None]:
    """Query, key, value and decay [b, s, heads, d], beta [b, s, heads].

    Gives the output [b, s, heads, d], and if asked to `keep` it the last state [b, heads, d, d].
    """
    dtype, length = query.dtype, query.shape[1]
    query, key, value, g, k_beta, v_beta, _beta = _chunked(query, key, value, beta, decay)
    batch, heads, _, _, width = value.shape
    g = ops.cumsum(g, -2)
    mask = ops.tril(query, CHUNK)
    strict = ops.tril(query, CHUNK)
    decay_mask = ops.exp(ops.masked_fill(ops.sub(ops.unsqueeze(g, -2), ops.unsqueeze(g, -3)), _wide(strict)))
    product = ops.mul(ops.mul(ops.unsqueeze(k_beta, -2), ops.unsqueeze(key, -3)), decay_mask)
    attn = ops.sum(product)
    del product
    attn = ops.neg(ops.masked_fill(attn, mask))
    attn = _solved(attn)
    value = ops.matmul(attn, v_beta)
    k_cumdecay = ops.matmul(attn, ops.mul(k_beta, ops.exp(g)))
    if initial is None:
        state = value.tape.empty((batch, heads, width, width), value.dtype)
    else:
        state = ops.to(initial, value.dtype)
    out = ops.empty_like(value)
    mask = ops.tril(query, CHUNK)
    for _ in token_steps(out.tape, value.shape[2]):
        q_i, k_i, v_i, g_i = ops.select(query, 2), ops.select(key, 2), ops.select(value, 2), ops.select(g, 2)
        inter = ops.matmul(ops.mul(q_i, ops.exp(g_i)), state)
        pairs = ops.mul(ops.mul(ops.unsqueeze(q_i, -2), ops.unsqueeze(k_i, -3)), ops.select(decay_mask, 2))
        summed = ops.sum(pairs)
        del pairs
        intra = ops.masked_fill(summed, mask)
        del summed
        v_prime = ops.matmul(ops.select(k_cumdecay, 2), state)
        v_new = ops.sub(v_i, v_prime)
        out = ops.copy_slice_(out, ops.add(inter, ops.matmul(intra, v_new)))
        moved = ops.mul(state, _wide(ops.exp(ops.select(g_i, 2))))
        faded = ops.mul(k_i, ops.exp(ops.sub(ops.narrow(g_i, 2, 1), g_i)))
        added = ops.matmul(ops.transpose(faded, -1, -2), v_new)
        del faded
        state = ops.add(moved, added)
        del moved, added
    last = state if keep else None
    del state
    out = ops.reshape(out, batch, heads, -1, width)
    out = ops.narrow(out, 2, length)
    return ops.to(ops.contiguous(ops.transpose(out, 1, 2)), dtype), last


def token_rule(
    query: Tensor, key: Tensor, value: Tensor, beta: Tensor, decay: Tensor, initial: Tensor
) -> tuple[Tensor, Tensor]:
    """One token, as `chunk_rule`: the output [b, 1, heads, d] and the state [b, heads, d, d]."""
    dtype = query.dtype
    query, key, value, g, beta = [ops.to(x, FP32) for x in (query, key, value, decay, beta)]
    query = _l2_norm(query)
    key = _l2_norm(key)
    query = ops.mul_scalar(query)
    out = ops.empty_like(value)
    state = ops.to(initial, value.dtype)
    q_i, k_i, v_i = ops.select(query, 1), ops.select(key, 1), ops.select(value, 1)
    g_i = ops.exp(_wide(ops.select(g, 1)))
    b_i = _wide(ops.select(beta, 1))
    state = ops.mul(state, g_i)
    kv_mem = ops.sum(ops.mul(state, _wide(k_i)), -2)
    delta = ops.mul(ops.sub(v_i, kv_mem), b_i)
    state = ops.add(state, ops.mul(_wide(k_i), ops.unsqueeze(delta, -2)))
    out = ops.copy_slice_(out, ops.sum(ops.mul(state, _wide(q_i)), -2))
    return ops.to(out, dtype), state
