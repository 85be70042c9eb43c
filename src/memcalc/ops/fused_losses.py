"""Cross-entropy in fused kernels: with the head inside, so that no logits stand as one tensor, or over the logits.

Sources: liger-kernel 0.8.5 (ops/fused_linear_cross_entropy.py) and cut-cross-entropy 25.1 (cce.py, cce_backward.py).
"""

from __future__ import annotations

from memcalc.autograd.graph import Grads, Node, record
from memcalc.autograd.tensor import Tensor, contiguous_stride
from memcalc.ops.elementwise import empty_like, to
from memcalc.ops.matmul import cached_cast
from memcalc.ops.views import contiguous, view
from memcalc.tables.dtypes import BOOL, FP32, INT32, INT64


def fused_linear_cross_entropy(hidden: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    """Liger's: rows of hidden [n, h], weight [V, h] and target [n] to a loss, chunk after chunk of rows.

    Both gradients are made in forward and kept until backward hands them on; logits turn into their gradient in place.
    A chunk has as many rows as make its logits about as large as the hidden states.
    """
    tape = hidden.tape
    rows, width = hidden.shape
    vocab = weight.shape[0]
    chunk = min(_power_of_two(-(-rows // -(-vocab // width))), rows)
    grad_hidden = empty_like(hidden.detach())
    grad_weight = empty_like(weight.detach()) if weight.requires_grad else None
    losses = tape.empty((rows,), FP32)
    mask = tape.empty(target.shape, BOOL)
    if tape.autocast is None:
        logits = tape.empty((chunk, vocab), hidden.dtype)
        if grad_weight is not None and grad_weight.dtype is FP32:
            empty_like(grad_weight)  # only 16-bit products are added in place
        del logits
    else:
        for _ in range(min(2, -(-rows // chunk))):  # the second chunk meets the weight that the first left in the cache
            _chunk_under_autocast(hidden.detach(), weight, chunk)
    loss = tape.empty((), FP32)
    del losses, mask
    made: list[Tensor | None] = [grad_hidden, grad_weight]
    node = record(tape, loss, _precomputed_backward, (hidden, weight), made)
    if node is not None:
        for gradient in made:
            if gradient is not None:
                node.save(gradient)
    return loss


def _precomputed_backward(node: Node, grads: Grads) -> list[Tensor | None]:
    """The gradients that forward made (scaled in place, where the loss was)."""
    node.tape.empty((), FP32)  # a one, that the incoming gradient is compared with
    made: list[Tensor | None] = list(node.context)
    node.context.clear()
    return [None if grads[0] is None or edge is None else made[index] for index, edge in enumerate(node.edges)]


def _chunk_under_autocast(hidden: Tensor, weight: Tensor, rows: int) -> None:
    """Logits of some rows and what they bring, in 16 bits; the view of the weight for the logits is never cached."""
    tape = hidden.tape
    assert tape.autocast is not None
    piece = Tensor((rows, hidden.shape[1]), hidden.stride, hidden.dtype, hidden.storage)
    low, transposed = to(piece, tape.autocast), to(weight.detach(), tape.autocast)
    logits = tape.empty((rows, weight.shape[0]), tape.autocast)
    del low, transposed
    cast = cached_cast(weight)
    product = tape.empty(piece.shape, tape.autocast)
    del cast, product
    if weight.requires_grad:
        to(piece, tape.autocast)
    del logits


def _power_of_two(number: int) -> int:
    """The least power of two that is no less."""
    return 1 << (number - 1).bit_length()


def cut_cross_entropy(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    """Cut cross-entropy of hidden [b, s, h] in 16 bits, weight [V, h] and labels [b, s], shifted inside.

    Keeps hidden states, weight, labels, the log-sum-exp of each token and the mean logit of each word; backward makes
    the two gradients and nothing of the logits' size.
    """
    tape = hidden.tape
    hidden, weight = contiguous(cached_cast(hidden)), cached_cast(weight)
    labels = contiguous(labels)
    tokens = labels.shape[0] * (labels.shape[1] - 1)
    valid = _valid(labels, tokens)
    hidden, flat = view(hidden, -1, hidden.shape[-1]), view(labels, -1)
    lse = tape.empty((tokens,), FP32)
    locks = tape.empty((-(-tokens // 128),), INT32)
    mean_logits = tape.empty((weight.shape[0],), FP32)
    del locks
    negative = tape.empty((tokens,), FP32)
    loss = tape.empty((), FP32)
    del negative
    node = record(tape, loss, _cut_backward, (hidden, weight), (tokens, hidden.shape, weight.shape, hidden.dtype))
    if node is not None:
        for tensor in (hidden, weight, lse, flat, valid, mean_logits):
            node.save(tensor)
        tape.kept_by_graph.append(valid.storage)
    return loss


def _valid(labels: Tensor, tokens: int) -> Tensor:
    """The flat positions of the tokens that count."""
    tape = labels.tape
    mask = tape.empty((tokens,), BOOL)
    wide = tape.empty((tokens, len(labels.shape)), INT64)
    del mask
    indices = tape.empty(wide.shape, INT32)
    del wide
    flat = tape.empty((tokens,), INT64)
    del indices
    return flat


def _cut_backward(node: Node, grads: Grads) -> list[Tensor | None]:
    if grads[0] is None:
        return [None, None]
    tape = node.tape
    tokens, hidden, weight, dtype = node.context
    values, places = tape.empty(weight[:1], FP32), tape.empty(weight[:1], INT64)
    order = tape.empty(weight[:1], INT32)
    del values, places
    first = tape.empty(hidden, dtype)
    second = tape.empty(weight, dtype) if node.needs(1) else None
    columns = -(-hidden[1] // 64)
    locks = [tape.empty((-(-rows // columns), columns), INT32) for rows in (tokens, weight[0])]
    del order, locks
    return [first if node.needs(0) else None, second]


def in_place_cross_entropy(logits: Tensor, target: Tensor) -> Tensor:
    """Liger's cross-entropy of rows of logits [n, V] with target [n]: forward writes the gradient over the logits.

    Source: liger-kernel 0.8.5, ops/cross_entropy.py. flash-attn's with `inplace_backward` takes the same.
    """
    tape = logits.tape
    losses = tape.empty(target.shape, logits.dtype)
    mask = tape.empty(target.shape, BOOL)
    in_range = tape.empty(target.shape, INT64)
    del in_range
    rows = contiguous(logits.detach())
    loss = tape.empty((), logits.dtype)
    del losses, mask
    node = record(tape, loss, _overwritten_backward, (logits,), (rows.shape, rows.dtype))
    if node is not None:
        node.save(rows)
    return loss


def _overwritten_backward(node: Node, grads: Grads) -> list[Tensor | None]:
    """The gradient that lies where the logits lay."""
    if grads[0] is None:
        return [None]
    node.tape.empty((), FP32)  # a one, that the incoming gradient is compared with
    shape, dtype = node.context
    (storage,) = node.saved_storages()
    return [Tensor(shape, contiguous_stride(shape), dtype, storage)]
