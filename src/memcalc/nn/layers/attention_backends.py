"""Attention over query, key and value [b, heads, s, d], by the implementation that the setup asks for."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from memcalc import ops
from memcalc.autograd.checkpointing import checkpointed
from memcalc.autograd.tensor import Tensor
from memcalc.nn.layers.ulysses import with_all_heads_of_a_rank
from memcalc.nn.run_context import run_context
from memcalc.tables.dtypes import FP32


def repeat_kv(x: Tensor, repeats: int) -> Tensor:
    """[b, kv, s, d] to [b, kv · repeats, s, d], a copy unless there is nothing to repeat."""
    batch, heads, length, dim = x.shape
    if repeats == 1:
        return x
    x = ops.expand(ops.unsqueeze(x, 2), batch, heads, repeats, length, dim)
    return ops.reshape(x, batch, heads * repeats, length, dim)


def eager(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    repeats: int,
    dropout: float = 0.0,
    *,
    attn_logit_softcapping: bool = False,
) -> tuple[Tensor, Tensor]:
    """Scores, fp32 softmax and probabilities as tensors: [b, s, h, d] and the probabilities [b, h, s, t]."""
    key = repeat_kv(key, repeats)
    value = repeat_kv(value, repeats)
    weights = ops.mul_scalar(ops.matmul(query, ops.transpose(key, 2, 3)))
    if attn_logit_softcapping:
        weights = ops.mul_scalar(weights)
        weights = ops.tanh(weights)
        weights = ops.mul_scalar(weights)
    if mask is not None:
        weights = ops.add(weights, mask)
    weights = ops.to(ops.softmax(weights, FP32), query.dtype)
    weights = ops.dropout(weights, dropout)
    out = ops.matmul(weights, value)
    return ops.contiguous(ops.transpose(out, 1, 2)), weights


def eager_with_sinks(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, sinks: Tensor, repeats: int, dropout: float
) -> tuple[Tensor, Tensor]:
    """Eager attention in which each head has one more score, that no value belongs to (gpt-oss); no fp32 softmax."""
    key = repeat_kv(key, repeats)
    value = repeat_kv(value, repeats)
    weights = ops.mul_scalar(ops.matmul(query, ops.transpose(key, 2, 3)))
    if mask is not None:
        weights = ops.add(weights, mask)
    sinks = ops.expand(ops.reshape(sinks, 1, -1, 1, 1), query.shape[0], -1, query.shape[-2], -1)
    scores = ops.cat([weights, sinks], -1)
    scores = ops.sub(scores, ops.max(scores, keepdim=True)[0])
    probs = ops.softmax(scores, scores.dtype)
    weights = ops.to(ops.dropout(ops.narrow(probs, -1, probs.shape[-1] - 1), dropout), value.dtype)
    out = ops.matmul(weights, value)
    return ops.contiguous(ops.transpose(out, 1, 2)), weights


def sdpa(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, repeats: int, dropout: float = 0.0) -> Tensor:
    """Fused attention: grouped heads are native without a mask, repeated with one.

    The queries of a single token are seen as several of fewer heads instead.
    """
    batch, _, length, dim = query.shape
    if repeats > 1 and not (mask is None and key.shape[-1] == value.shape[-1] <= 256):
        if length == 1:
            query = ops.reshape(query, batch, -1, repeats, dim)
        else:
            key = repeat_kv(key, repeats)
            value = repeat_kv(value, repeats)
    is_causal = run_context(query).causal and key.shape[-2] == query.shape[-2]  # cross-attention is not
    out = ops.scaled_dot_product_attention(query, key, value, mask, dropout, is_causal=is_causal)
    out = ops.reshape(out, batch, -1, length, value.shape[-1])
    return ops.contiguous(ops.transpose(out, 1, 2))


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    repeats: int = 1,
    dropout: float = 0.0,
    *,
    attn_logit_softcapping: bool = False,
    sinks: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Attention output [b, s, h, d], and the probabilities where the implementation makes them.

    Only eager attention knows how to cap scores softly; the fused kernels leave it out. `sinks` are a score per head.
    """
    core = partial(_core, repeats=repeats, dropout=dropout, attn_logit_softcapping=attn_logit_softcapping, sinks=sinks)
    return _kept_or_not(core, query, key, value, mask)


Core = Callable[[Tensor, Tensor, Tensor, Tensor | None], tuple[Tensor, Tensor | None]]


def _kept_or_not(
    core: Core, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """Run the core of attention, and again in backward where only it is checkpointed."""
    tape, run = query.tape, run_context(query)
    if tape.ring is not None and tape.ring.exchanges_heads:
        return with_all_heads_of_a_rank(core, query, key, value, tape.ring.ranks)
    if not run.selective or not tape.grad_enabled:
        return core(query, key, value, mask)
    run.recomputed_attentions += 1
    out: tuple[Tensor, Tensor | None] = checkpointed(tape, core, query, key, value, mask)
    return out


def _core(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    *,
    repeats: int,
    dropout: float,
    attn_logit_softcapping: bool,
    sinks: Tensor | None,
) -> tuple[Tensor, Tensor | None]:
    if run_context(query).attention == "eager" and sinks is not None:
        return eager_with_sinks(query, key, value, mask, sinks, repeats, dropout)
    if run_context(query).attention == "eager":
        return eager(query, key, value, mask, repeats, dropout, attn_logit_softcapping=attn_logit_softcapping)
    return sdpa(query, key, value, mask, repeats, dropout), None


def split_heads(x: Tensor, head_dim: int) -> Tensor:
    """[b, s, h] to [b, heads, s, d], a view: `x.view(*x.shape[:-1], -1, head_dim).transpose(1, 2)`."""
    return ops.transpose(ops.view(x, *x.shape[:-1], -1, head_dim), 1, 2)


def attend_same_dtype(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, dropout: float, *, cast_back: bool = True
) -> tuple[Tensor, Tensor | None]:
    """`attend` as GPT-2 and BERT write it: eager softmax in the scores' own dtype, heads never repeated.

    Under autocast softmax gives fp32; with `cast_back` dropout works on probabilities in the values' dtype (GPT-2).
    """
    return _kept_or_not(partial(_same_dtype, dropout=dropout, cast_back=cast_back), query, key, value, mask)


def _same_dtype(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, *, dropout: float, cast_back: bool
) -> tuple[Tensor, Tensor | None]:
    if run_context(query).attention != "eager":
        return sdpa(query, key, value, mask, 1, dropout), None
    weights = ops.mul_scalar(ops.matmul(query, ops.transpose(key, 2, 3)))
    if mask is not None:
        weights = ops.add(weights, mask)
    weights = ops.softmax(weights)
    if cast_back:
        weights = ops.to(weights, value.dtype)
    weights = ops.dropout(weights, dropout)
    out = ops.matmul(weights, value)
    return ops.transpose(out, 1, 2), weights
