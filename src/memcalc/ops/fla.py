"""flash-linear-attention's gated delta rule and Kimi's: one function that keeps little and computes it again.

Source: fla-core 0.6.0, ops/{gated_delta_rule,kda}/*.py and ops/common/chunk_{delta_h,o}.py. What its Python
allocates was recorded with PyTorch's real allocator; its kernels allocate nothing.
"""

from __future__ import annotations

from memcalc.autograd.graph import Grads, Node, record
from memcalc.autograd.tensor import Tensor
from memcalc.common.sizes import Shape
from memcalc.ops.elementwise import empty_like, to
from memcalc.ops.views import contiguous
from memcalc.tables.dtypes import FP32

CHUNK = 64
"""Tokens of a chunk."""

_TILE = 128
"""Channels of a key that one program takes, where shared memory is a Hopper's or an Ampere's with 16-bit tensors."""

_BLOCK, _KDA_TILE = 16, 32
"""Tokens of a block of a chunk, and channels that a program takes, of Kimi's rule."""


def fla_gated_delta_rule(
    query: Tensor, key: Tensor, value: Tensor, beta: Tensor, decay: Tensor, initial: Tensor | None, *, keep: bool
) -> tuple[Tensor, Tensor | None]:
    """Query and key [b, s, k_heads, k], value [b, s, heads, v], beta and decay [b, s, heads], the last in fp32.

    Gives the output [b, s, heads, v], and if asked to `keep` it the last state [b, heads, k, v] in fp32. Keeps the
    normalised query and key with their norms, value, rates, summed decay, and [s, 64] coefficients of every head.
    """
    inputs = query, key, value, beta, decay
    tape, (batch, length, heads, width) = query.tape, value.shape
    copies = [contiguous(x.detach()) for x in inputs]
    kept = [copies[2], copies[3]]
    for x in copies[:2]:
        kept += [empty_like(x), tape.empty(x.shape[:-1], FP32)]
    kept.append(empty_like(copies[4]))
    kept.append(tape.empty((batch, length, heads, CHUNK), key.dtype))
    held = _states(kept, (batch, length, heads, key.shape[-1], width))
    last = tape.empty((batch, heads, key.shape[-1], width), FP32) if keep else None
    changed, out = empty_like(copies[2]), empty_like(copies[2])
    del held, changed
    node = record(tape, out, _backward, (*inputs, initial), (query.shape, value.shape, beta.dtype))
    if node is not None:
        for tensor in (*kept, *(() if initial is None else (initial,))):
            node.save(tensor)
        if last is not None:
            last.node, last.slot = node, 1
    return out, last


def fla_recurrent(
    query: Tensor, key: Tensor, value: Tensor, beta: Tensor, decay: Tensor, initial: Tensor
) -> tuple[Tensor, Tensor]:
    """One token of either rule, as `fla_gated_delta_rule` and `fla_kda`: the output, and the state in fp32."""
    copies = [contiguous(x.detach()) for x in (query, key, value, beta, decay)]
    out = empty_like(copies[2])
    return out, value.tape.empty(initial.shape, FP32)


def _states(like: list[Tensor], sizes: tuple[int, int, int, int, int]) -> list[Tensor]:
    """Keys and values that the rule reads, and the states at the chunks' beginnings: made in forward and again."""
    batch, length, heads, k_dim, v_dim = sizes
    tape, dtype = like[0].tape, like[0].dtype
    return [
        tape.empty((batch, length, heads, k_dim), dtype),
        tape.empty((batch, length, heads, v_dim), dtype),
        tape.empty((batch, -(-length // CHUNK), heads, k_dim, v_dim), dtype),
    ]


def _backward(node: Node, grads: Grads) -> list[Tensor | None]:
    grad = grads[0]
    if grad is None:
        return [None] * 6
    q_shape, v_shape, beta_dtype = node.context
    tape, dtype = node.tape, grad.dtype
    (batch, length, heads, v_dim), k_dim = v_shape, q_shape[-1]
    grad = contiguous(grad)
    wide, lone = (batch, length, heads, k_dim), (batch, length, heads)
    again = _states([grad], (batch, length, heads, k_dim, v_dim))
    changed, local = tape.empty(v_shape, dtype), tape.empty(v_shape, dtype)
    d_states, d_value = tape.empty(again[2].shape, dtype), tape.empty(v_shape, dtype)
    del local
    d_query, d_key = tape.empty(wide, dtype), tape.empty(wide, dtype)
    parts = tape.empty((-(-k_dim // _TILE), *lone), FP32)
    d_written = tape.empty(wide, dtype)
    if wide != q_shape:
        d_query = tape.empty(q_shape, dtype)
        d_key = tape.empty(q_shape, dtype)
    summed = tape.empty(lone, FP32)
    del parts
    more, result = tape.empty(wide, dtype), tape.empty(v_shape, dtype)
    d_decay, d_beta = tape.empty(lone, FP32), tape.empty(lone, beta_dtype)
    if wide != q_shape:
        more = tape.empty(q_shape, dtype)
    del d_value
    found = tape.empty(lone, FP32)
    del summed, again, changed, d_states, d_written, more, d_decay
    d_query = tape.empty(q_shape, dtype)
    d_key = tape.empty(q_shape, dtype)
    return [d_query, d_key, result, d_beta, found, None]


def fla_kda(
    query: Tensor, key: Tensor, value: Tensor, beta: Tensor, decay: Tensor, initial: Tensor | None, *, keep: bool
) -> tuple[Tensor, Tensor | None]:
    """Kimi's delta rule: query, key, value and each channel's decay [b, s, heads, d], beta [b, s, heads].

    Gives the output [b, s, heads, d], and if asked to `keep` it the last state [b, heads, d, d] in fp32.
    """
    inputs = query, key, value, beta, decay
    tape, shape = query.tape, query.shape
    copies = [contiguous(x.detach()) for x in inputs]
    kept = copies[2:]
    for x in copies[:2]:
        kept += [empty_like(x), tape.empty(x.shape[:-1], FP32)]
    kept.append(tape.empty(shape, FP32))
    kept += [tape.empty((*shape[:-1], CHUNK), key.dtype) for _ in range(2)]
    diagonal = tape.empty((*shape[:-1], _BLOCK), FP32)
    held = [empty_like(copies[1]) for _ in range(3)]
    del diagonal
    states = tape.empty(_states_shape(shape), key.dtype)
    last = tape.empty((shape[0], *shape[2:], shape[3]), FP32) if keep else None
    changed, out = empty_like(copies[2]), empty_like(copies[2])
    del held, changed, states
    node = record(tape, out, _kda_backward, (*inputs, initial), (shape, beta.dtype, decay.dtype))
    if node is not None:
        for tensor in (*kept, *(() if initial is None else (initial,))):
            node.save(tensor)
        if last is not None:
            last.node, last.slot = node, 1
    return out, last


def _kda_backward(node: Node, grads: Grads) -> list[Tensor | None]:
    grad = grads[0]
    if grad is None:
        return [None] * 6
    shape, beta_dtype, decay_dtype = node.context
    tape, dtype, rows = node.tape, grad.dtype, shape[:-1]
    grad = contiguous(grad)
    again = [tape.empty(shape, dtype) for _ in range(4)]
    again += [tape.empty(_states_shape(shape), dtype), tape.empty(shape, dtype)]
    coefficients, local = tape.empty((*rows, CHUNK), FP32), tape.empty(shape, dtype)
    d_states, d_value = tape.empty(_states_shape(shape), dtype), tape.empty(shape, dtype)
    del local
    d_query, d_key = tape.empty(shape, FP32), tape.empty(shape, FP32)
    result, d_decay = tape.empty(shape, dtype), tape.empty(shape, FP32)
    d_beta, inside = tape.empty(rows, FP32), tape.empty((*rows, CHUNK), FP32)
    del d_value
    whole = [tape.empty(shape, FP32) for _ in range(2)]
    parts = tape.empty((-(-shape[-1] // _KDA_TILE), *rows), FP32)
    of_channels = tape.empty(shape, FP32)
    found_beta = tape.empty(rows, FP32)
    del parts, d_query, d_key, d_beta, d_decay
    found_decay = tape.empty(shape, FP32)
    del of_channels, again, coefficients, d_states, inside
    made: list[Tensor | None] = []
    for _ in range(2):
        made.append(tape.empty(shape, dtype))
        del whole[0]
    return [*made, result, to(found_beta, beta_dtype), to(found_decay, decay_dtype), None]


def _states_shape(shape: Shape) -> Shape:
    batch, length, heads, width = shape
    return (batch, -(-length // CHUNK), heads, width, width)
