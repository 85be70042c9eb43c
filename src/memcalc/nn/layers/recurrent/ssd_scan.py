"""The state-space scan of Mamba 2 in plain PyTorch, as Transformers runs it where no `mamba_ssm` kernels are installed.

Everything is in fp32 and chunk by chunk; most of what it makes stays bound until it returns.
"""

from __future__ import annotations

from memcalc import ops
from memcalc.autograd.tensor import Tensor
from memcalc.common.assumption import Assumption
from memcalc.tables.dtypes import FP32

SCAN_NOTE = Assumption(
    "state_space_kernels",
    "state-space layers run in plain PyTorch; where the package mamba-ssm is installed they take much less "
    "(--state-space-kernels mamba-ssm)",
)

NO_PACKED_KERNELS = (
    "mamba-ssm's kernels multiply with a mixer's weights themselves, which this quantization packs or an adapter "
    "wraps; leave out --state-space-kernels."
)


def masked(hidden: Tensor, mask: Tensor | None) -> Tensor:
    """Hidden states [b, s, h] with padded ones zeroed, where there is a padding mask [b, s]."""
    return hidden if mask is None else ops.to(ops.mul(hidden, ops.unsqueeze(mask, 2)), hidden.dtype)


def _padded(x: Tensor, extra: int) -> Tensor:
    return ops.pad(x, 1, extra)


def _chunks(x: Tensor, extra: int, size: int) -> Tensor:
    """[b, s, ...] to [b, chunks, size, ...]."""
    x = _padded(x, extra)
    return ops.reshape(x, x.shape[0], -1, size, *x.shape[2:])


def _segment_sum(x: Tensor) -> Tensor:
    """Sums of every stretch of the last dimension [..., n] as [..., n, n]."""
    size = x.shape[-1]
    x = ops.expand(ops.unsqueeze(x, -1), *x.shape, size)
    mask = ops.tril(x, size)
    x = ops.masked_fill(x, ops.empty_like(mask))
    sums = ops.cumsum(x, -2)
    mask = ops.tril(x, size)
    return ops.masked_fill(sums, ops.empty_like(mask))


def _shared_by_heads(x: Tensor, heads: int) -> Tensor:
    """[b, s, groups, n] in fp32, repeated to [b, s, heads, n]: a copy even where there is nothing to repeat."""
    x = ops.to(x, FP32)
    batch, length, groups, width = x.shape
    wide = ops.expand(ops.unsqueeze(x, 3), batch, length, groups, heads // groups, width)
    return ops.view(ops.clone(wide, contiguous=True), batch, length, heads, width)


def chunk_scan(
    x: Tensor,
    dt: Tensor,
    a: Tensor,
    b: Tensor,
    c: Tensor,
    d: Tensor,
    dt_bias: Tensor,
    size: int,
    initial: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """x [b, s, heads, p] and steps dt [b, s, heads], a and d [heads], b and c [b, s, groups, n] in chunks of `size`.

    Gives the output [b, s, heads, p] and the last state [b, heads, p, n], a view.
    """
    batch, length, heads, width = x.shape
    dt = ops.add(dt, ops.to(dt_bias, dt.dtype))
    dt = ops.softplus(dt)
    dt = ops.clamp(dt)
    x = ops.to(x, FP32)
    b = _shared_by_heads(b, heads)
    c = _shared_by_heads(c, heads)
    extra = -length % size
    d_residual = ops.mul(ops.unsqueeze(d, -1), _padded(x, extra))
    x = ops.mul(x, ops.to(ops.unsqueeze(dt, -1), FP32))
    a = ops.mul(ops.to(a, x.dtype), ops.to(dt, FP32))
    x, a, b, c = [_chunks(tensor, extra, size) for tensor in (x, a, b, c)]
    a = ops.permute(a, 0, 3, 1, 2)
    a_cumsum = ops.cumsum(a)
    decay = ops.exp(_segment_sum(a))
    scores = ops.einsum("bclhn,bcshn->bclsh", c, b)
    weights = ops.mul(scores, ops.permute(decay, 0, 2, 3, 4, 1))
    diagonal = ops.einsum("bclsh,bcshp->bclhp", weights, x)
    decay_states = ops.exp(ops.sub(ops.narrow(a_cumsum, -1, 1), a_cumsum))
    b_decay = ops.mul(b, ops.unsqueeze(ops.permute(decay_states, 0, 2, 3, 1), -1))
    states = ops.einsum("bclhn,bclhp->bchpn", b_decay, x)
    if initial is None:
        previous = ops.empty_like(ops.narrow(states, 1, 1))
    else:
        previous = ops.to(ops.unsqueeze(initial, 1), states.dtype)
    states = ops.cat([previous, states], 1)
    chunk_decay = ops.transpose(ops.exp(_segment_sum(ops.pad(ops.select(a_cumsum, -1), -1, 1))), 1, 3)
    new_states = ops.einsum("bzch,bzhpn->bchpn", chunk_decay, states)
    states, last = ops.narrow(new_states, 1, new_states.shape[1] - 1), ops.select(new_states, 1)
    state_decay = ops.exp(a_cumsum)
    from_states = ops.einsum("bclhn,bchpn->bclhp", c, states)
    off_diagonal = ops.mul(from_states, ops.unsqueeze(ops.permute(state_decay, 0, 2, 3, 1), -1))
    out = ops.contiguous(ops.add(diagonal, off_diagonal))
    out = ops.reshape(out, batch, -1, heads, width)
    out = ops.add(out, d_residual)
    if extra:
        out = ops.narrow(out, 1, length)
    return out, last


def state_update(
    state: Tensor,
    x: Tensor,
    dt: Tensor,
    a: Tensor,
    b: Tensor,
    c: Tensor,
    d: Tensor,
    dt_bias: Tensor,
    gate: Tensor | None = None,
) -> Tensor:
    """One token: `state` [b, heads, p, n] moves on in place; x and dt are [b, heads, p], b and c [b, groups, n]."""
    batch, heads, width = x.shape
    groups, size = b.shape[1:]
    dt = ops.add(dt, ops.to(dt_bias, dt.dtype))
    dt = ops.softplus(dt)
    dt = ops.unsqueeze(dt, -1)
    decay = ops.exp(ops.mul(ops.to(dt, FP32), ops.to(a, FP32)))
    b = ops.reshape(b, batch, groups, 1, size)
    b = ops.contiguous(ops.expand(b, batch, groups, heads // groups, size))
    b = ops.reshape(b, batch, heads, 1, size)
    step = ops.mul(dt, b)
    added = ops.mul(step, ops.unsqueeze(x, -1))
    states = ops.add(ops.mul(state, decay), added)
    written = ops.to(states, state.dtype)
    del written
    c = ops.reshape(c, batch, groups, 1, size)
    c = ops.contiguous(ops.expand(c, batch, groups, heads // groups, size))
    c = ops.reshape(c, batch, heads, size)
    states = ops.to(states, c.dtype)
    flat = ops.view(states, batch * heads, width, size)
    c_flat = ops.view(c, batch * heads, size, 1)
    out = ops.bmm(flat, c_flat)
    out = ops.view(out, batch, heads, width)
    out = ops.to(ops.add(out, ops.mul(x, d)), out.dtype)
    if gate is not None:
        out = ops.mul(out, ops.silu(gate))
    return ops.to(out, x.dtype)
