"""TRL's fused distillation loss: the divergence of two heads' distributions, tile after tile, without either's logits.

Source: trl/kernels/chunked_divergence.py of TRL 1.16 (ChunkedDivergenceFunction). Tiles are those of the fused
language-model head, in fp32, one for the student and one for the teacher.
"""

from __future__ import annotations

from memcalc.autograd.graph import Grads, Node, record
from memcalc.autograd.tensor import Tensor
from memcalc.ops.chunked_logprob import TOKEN_CHUNK, VOCAB_CHUNK, chunks, rows_of
from memcalc.ops.elementwise import to
from memcalc.tables.dtypes import FP32

RUNNING_STATISTICS = 9
"""Vectors over tokens in fp32 that the kernels fold tiles into."""


def chunked_divergence(student: Tensor, weight: Tensor, teacher: Tensor, teacher_weight: Tensor) -> Tensor:
    """Divergences [n] in fp32 of the student's hidden states [n, h] and weight [V, h] from the teacher's.

    Keeps both hidden states, both weights, both log-normalisers and a vector of the divergence. The same bytes for
    every `beta`.
    """
    tape, n = student.tape, student.shape[0]
    vocab = weight.shape[0]
    with tape.no_grad():
        statistics = [tape.empty((n,), FP32) for _ in range(RUNNING_STATISTICS)]
        tiles = [tape.empty((min(n, TOKEN_CHUNK), VOCAB_CHUNK), FP32) for _ in range(2)]
        with weight.storage.whole(), teacher_weight.storage.whole():
            for tokens in chunks(n, TOKEN_CHUNK):
                for entries in chunks(vocab, VOCAB_CHUNK):
                    for hidden, head in ((student, weight), (teacher, teacher_weight)):
                        _left = rows_of(hidden, tokens, hidden.dtype)
                        rows_of(head, entries, hidden.dtype)
                part = [tape.empty((tokens,), FP32) for _ in range(2)]
        log_z = [tape.empty((n,), FP32) for _ in range(2)]
        entropy = tape.empty((n,), FP32)
        divergence = tape.empty((n,), FP32)
        del statistics, tiles, part, entropy
    context = (student.shape, student.dtype, weight.shape, weight.dtype, (weight.storage, teacher_weight.storage))
    node = record(tape, divergence, _backward, (student, weight), context)
    if node is not None:
        for kept in (student, weight, teacher, teacher_weight, *log_z, divergence):
            node.save(kept)
    return divergence


def _backward(node: Node, grads: Grads) -> list[Tensor | None]:
    """Both gradients are summed up in fp32; a tile is cast to the student's dtype before it is multiplied."""
    if grads[0] is None:
        return [None, None]
    tape = node.tape
    hidden_shape, hidden_dtype, weight_shape, weight_dtype, (stored, stored_of_teacher) = node.context
    n = hidden_shape[0]
    with stored.whole(), stored_of_teacher.whole():
        grad_hidden = tape.empty(hidden_shape, FP32) if node.needs(0) else None
        grad_weight = tape.empty(weight_shape, FP32) if node.needs(1) else None
        tiles = [tape.empty((min(n, TOKEN_CHUNK), VOCAB_CHUNK), FP32) for _ in range(2)]
        grad_divergence = tape.empty((n,), FP32)  # that of the sum is expanded, so that contiguous() copies it
        grad_tile = None
        for tokens in chunks(n, TOKEN_CHUNK):
            for entries in chunks(weight_shape[0], VOCAB_CHUNK):
                grad_tile = None if hidden_dtype is FP32 else tape.empty((tokens, entries), hidden_dtype)
    made_hidden = None if grad_hidden is None else to(grad_hidden, hidden_dtype)
    made_weight = None if grad_weight is None else to(grad_weight, weight_dtype)
    del tiles, grad_tile, grad_divergence
    return [made_hidden, made_weight]
