"""TRL's fused language-model head: log-probabilities of labels, tile after tile, so that logits never stand whole.

Source: trl/kernels/chunked_logprob.py of TRL 1.16 (ChunkedLogProbFunction). A tile has 4,096 tokens and 32,768 entries
of the vocabulary, however many there are.
"""

from __future__ import annotations

from collections.abc import Iterator

from memcalc.autograd.graph import Grads, Node, record
from memcalc.autograd.tensor import Tensor
from memcalc.common.sizes import Shape
from memcalc.ops.elementwise import to
from memcalc.tables.dtypes import BOOL, FP32, DType

TOKEN_CHUNK = 4096
"""Tokens of a tile (TOKEN_CHUNK_SIZE)."""

VOCAB_CHUNK = 32768
"""Entries of the vocabulary in a tile (_CHUNKED_LOGPROB_CHUNK_SIZE)."""

RUNNING_STATISTICS = 7
"""Vectors over tokens in fp32 that the kernel folds tiles into."""


def chunked_log_probs(
    hidden: Tensor, weight: Tensor, targets: Tensor, outputs: tuple[str, ...]
) -> tuple[Tensor, dict[str, Tensor]]:
    """Log-probabilities [n] in fp32 of `targets` [n] under the logits of `hidden` [n, h] and `weight` [V, h].

    `outputs` names what is computed beside them, each [n]: entropy, log_sum_sq_probs, mean_logits, is_top1. Keeps
    hidden, weight, targets, the log-normalisers and the entropies.
    """
    tape, n = hidden.tape, hidden.shape[0]
    compute = tape.autocast or hidden.dtype
    with tape.no_grad(), weight.storage.whole():
        statistics = [tape.empty((n,), FP32) for _ in range(RUNNING_STATISTICS)]
        tile = tape.empty((min(n, TOKEN_CHUNK), VOCAB_CHUNK), compute)
        token_chunk: Tensor | None = None
        for tokens in chunks(n, TOKEN_CHUNK):
            token_chunk = rows_of(hidden, tokens, compute)
            for entries in chunks(weight.shape[0], VOCAB_CHUNK):
                rows_of(weight, entries, compute)
        logarithm = tape.empty((n,), FP32)
        log_z = tape.empty((n,), FP32)
        del logarithm
        log_probs = tape.empty((n,), FP32)
        more = {name: _optional(name, hidden, n) for name in outputs}
        del statistics, tile, token_chunk
    context = (hidden.shape, hidden.dtype, weight.shape, weight.dtype, compute, weight.storage)
    node = record(tape, log_probs, _backward, (hidden, weight), context)
    if node is not None:
        for kept in (hidden, weight, targets, log_z, more.get("entropy", log_z)):
            node.save(kept)
    return log_probs, more


def _optional(name: str, hidden: Tensor, n: int) -> Tensor:
    """One of the outputs beside the log-probabilities, with the temporaries of its expression."""
    tape = hidden.tape
    if name == "is_top1":
        _above, _before = tape.empty((n,), BOOL), tape.empty((n,), BOOL)
        return tape.empty((n,), BOOL)
    if name == "mean_logits":
        return tape.empty((n,), FP32)
    _first = tape.empty((n,), FP32)
    _second = tape.empty((n,), FP32) if name == "log_sum_sq_probs" else None
    return tape.empty((n,), FP32)


def chunks(count: int, size: int) -> Iterator[int]:
    """Sizes of the chunks of `count`. Of many equal ones the first two stand for all: the second meets the first."""
    whole, rest = divmod(count, size)
    yield from [size] * min(whole, 2)
    if rest:
        yield rest


def rows_of(x: Tensor, rows: int, dtype: DType) -> Tensor:
    """The first `rows` of x, a view where the dtype is `dtype` already."""
    piece = Tensor((rows, x.shape[1]), x.stride, x.dtype, x.storage)
    return to(piece, dtype)


def _backward(node: Node, grads: Grads) -> list[Tensor | None]:
    """Both gradients are summed up in fp32, whatever the weights are; a chunk of the weight outlasts its tile."""
    if grads[0] is None:
        return [None, None]
    tape = node.tape
    hidden_shape, hidden_dtype, weight_shape, weight_dtype, compute, stored = node.context
    n, vocab = hidden_shape[0], weight_shape[0]
    tile: Tensor | None = None
    token_chunk = weight_chunk = None
    with stored.whole():
        grad_hidden = tape.empty(hidden_shape, FP32) if node.needs(0) else None
        grad_weight = tape.empty(weight_shape, FP32) if node.needs(1) else None
        tile = tape.empty((min(n, TOKEN_CHUNK), VOCAB_CHUNK), compute)
        for tokens in chunks(n, TOKEN_CHUNK):
            token_chunk = _cast((tokens, hidden_shape[1]), hidden_dtype, compute, node)
            for entries in chunks(vocab, VOCAB_CHUNK):
                weight_chunk = _cast((entries, weight_shape[1]), weight_dtype, compute, node)
    made_hidden = None if grad_hidden is None else to(grad_hidden, hidden_dtype)
    made_weight = None if grad_weight is None else to(grad_weight, weight_dtype)
    del tile, token_chunk, weight_chunk
    return [made_hidden, made_weight]


def _cast(shape: Shape, dtype: DType, compute: DType, node: Node) -> Tensor | None:
    """A chunk of a saved tensor in the dtype of the product; None where it is in that dtype already."""
    return None if dtype is compute else node.tape.empty(shape, compute)


def fused_log_probs(logits: Tensor, labels: Tensor) -> Tensor:
    """Log-probabilities [b, s] in fp32 of labels [b, s] under logits [b, s, V], by TRL's kernel: keeps the logits.

    Source: trl/kernels/logprob_entropy.py of TRL 1.16. Vectors over tokens are kept beside them; the gradient is one
    contiguous tensor of the logits' size.
    """
    tape = logits.tape
    log_probs, entropy, log_z, expected = (tape.empty(labels.shape, FP32) for _ in range(4))
    node = record(tape, log_probs, _log_probs_backward, (logits,), (logits.shape, logits.dtype))
    if node is not None:
        for kept in (logits, labels, log_z, expected):
            node.save(kept)
    del entropy
    return log_probs


def _log_probs_backward(node: Node, grads: Grads) -> list[Tensor | None]:
    shape, dtype = node.context
    return [None if grads[0] is None else node.tape.empty(shape, dtype)]
