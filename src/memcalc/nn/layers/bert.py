"""Parts of encoders in BERT's manner: summed embeddings, attention with biases, add and LayerNorm, pooler."""

from __future__ import annotations

from collections.abc import Sequence

from memcalc import ops
from memcalc.autograd.tensor import Tensor
from memcalc.config.reader import Config
from memcalc.errors import ConfigError
from memcalc.nn.layers.attention_backends import attend_same_dtype, split_heads
from memcalc.nn.layers.linear import Embedding, Linear, PositionTable
from memcalc.nn.layers.mlp import activation
from memcalc.nn.layers.norms import LayerNorm
from memcalc.nn.module import Buffer, Module
from memcalc.nn.run_context import run_context
from memcalc.tables.dtypes import INT32, INT64


class EncoderEmbeddings(Module):
    """Token, position and token-type embeddings, summed, normalised, dropped out; tasks with `use_task_id` (ERNIE).

    typed: there are token types.
    counted: positions count the tokens that are no padding (RoBERTa), and their table is registered last; else they are
        a slice of a buffer.
    normed: there is a LayerNorm (XLM-RoBERTa-XL has none).
    """

    scope = "embedding"

    def __init__(
        self, c: Config, width: int, *, typed: bool = True, counted: bool = False, normed: bool = True
    ) -> None:
        longest = c.integer("max_position_embeddings")
        offset = c.integer("pad_token_id", 1, minimum=0) + 1 if counted else 0
        self.word_embeddings = Embedding(c.integer("vocab_size"), width)
        if not (counted and typed):
            self.position_embeddings = PositionTable(longest, width, offset=offset)
        self.token_type_embeddings = Embedding(c.integer("type_vocab_size"), width) if typed else None
        self.LayerNorm = LayerNorm(width) if normed else None
        self.position_ids = Buffer(1, longest, dtype=INT64)
        if typed:
            self.token_type_ids = Buffer(1, longest, dtype=INT64)
        if counted and typed:
            self.position_embeddings = PositionTable(longest, width, offset=offset)
        tasks = c.integer("task_type_vocab_size") if c.flag("use_task_id") else 0
        self.task_type_embeddings = Embedding(tasks, width) if tasks else None
        self.counted = counted
        self.dropout = c.probability("hidden_dropout_prob")

    def forward(self, ids: Tensor) -> Tensor:
        """Ids [b, s] to [b, s, width]."""
        position_ids = count_tokens(ids) if self.counted else ops.narrow(self.position_ids, 1, ids.shape[1])
        if self.token_type_embeddings is not None:
            gathered = ids.tape.empty((position_ids.shape[0], ids.shape[1]), INT64)
            token_types = ops.expand(gathered, *ids.shape)
        inputs_embeds = self.word_embeddings(ids)
        embeddings = inputs_embeds
        if self.token_type_embeddings is not None:
            token_type_embeddings = self.token_type_embeddings(token_types)
            embeddings = ops.add(inputs_embeds, token_type_embeddings)
        position_embeddings = self.position_embeddings(position_ids)
        embeddings = ops.add(embeddings, position_embeddings)
        if self.task_type_embeddings is not None:
            task_type_embeddings = self.task_type_embeddings(ids.tape.empty(ids.shape, INT64))
            embeddings = ops.add_(embeddings, task_type_embeddings)
        if self.LayerNorm is not None:
            embeddings = self.LayerNorm(embeddings)
        return ops.dropout(embeddings, self.dropout)


def count_tokens(ids: Tensor) -> Tensor:
    """Position ids [b, s] that count the tokens of each sequence and skip padding."""
    mask = ops.to(ops.compare(ids), INT32)
    running = ids.tape.empty(mask.shape, INT64)  # the running sum of a 32-bit mask has 64 bits
    narrow = ops.to(running, INT32)
    del running
    counted = ops.mul(ops.add_scalar(narrow), mask)
    del narrow
    return ops.add_scalar(ops.to(counted, INT64))


class SelfAttention(Module):
    """BERT's attention: query, key and value projections with biases, and dropout on the probabilities.

    names: attribute names of the projections.
    out: name of an output projection that follows at once (DistilBERT).
    norm: dropout, the residual and a LayerNorm follow too (ALBERT).
    Raises ConfigError where the heads do not divide the width.
    """

    scope = "attention"

    def __init__(
        self, c: Config, names: Sequence[str] = ("query", "key", "value"), out: str | None = None, *, norm: bool = False
    ) -> None:
        hidden, heads = c.integer("hidden_size"), c.integer("num_attention_heads")
        if hidden % heads:
            raise ConfigError(
                f"{c.where} has 'hidden_size' {hidden}, which 'num_attention_heads' {heads} does not divide; "
                f"correct one."
            )
        self.head_dim = hidden // heads
        self.names = tuple(names)
        for name in names:
            setattr(self, name, Linear(hidden, hidden, bias=True, group="attention"))
        self.out = out
        if out is not None:
            setattr(self, out, Linear(hidden, hidden, bias=True, group="attention"))
        self.LayerNorm = LayerNorm(hidden) if norm else None
        self.out_dropout = c.probability("hidden_dropout_prob") if norm else 0.0
        self.dropout = c.probability("attention_probs_dropout_prob")

    def forward(self, hidden: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """[b, s, h] to [b, s, h], and the probabilities where they exist."""
        of_query, of_key, of_value = (vars(self)[name] for name in self.names)
        query = split_heads(of_query(hidden), self.head_dim)
        key = split_heads(of_key(hidden), self.head_dim)
        value = split_heads(of_value(hidden), self.head_dim)
        if (cache := run_context(query).cache) is not None:
            key, value = cache.update(self, key, value)
        out, weights = attend_same_dtype(query, key, value, mask, self.dropout, cast_back=False)
        out = ops.contiguous(ops.reshape(out, *hidden.shape[:-1], -1))
        if self.out is not None:
            out = vars(self)[self.out](out)
        if self.LayerNorm is not None:
            out = ops.dropout(out, self.out_dropout)
            out = self.LayerNorm(ops.add(hidden, out))
        return out, weights


class DenseAddNorm(Module):
    """LayerNorm(dropout(dense(x)) + residual)."""

    def __init__(self, inputs: int, hidden: int, dropout: float, group: str) -> None:
        self.dense = Linear(inputs, hidden, bias=True, group=group)
        self.LayerNorm = LayerNorm(hidden)
        self.dropout = dropout

    def forward(self, hidden: Tensor, residual: Tensor) -> Tensor:
        """[b, s, inputs] and [b, s, h] to [b, s, h]."""
        hidden = self.dense(hidden)
        hidden = ops.dropout(hidden, self.dropout)
        return self.LayerNorm(ops.add(hidden, residual))


class DenseAdd(Module):
    """dropout(dense(x)) + residual."""

    def __init__(self, inputs: int, hidden: int, dropout: float, group: str) -> None:
        self.dense = Linear(inputs, hidden, bias=True, group=group)
        self.dropout = dropout

    def forward(self, hidden: Tensor, residual: Tensor) -> Tensor:
        """[b, s, inputs] and [b, s, h] to [b, s, h]."""
        hidden = self.dense(hidden)
        hidden = ops.dropout(hidden, self.dropout)
        return ops.add(hidden, residual)


class DenseActivation(Module):
    """act(dense(x))."""

    def __init__(self, inputs: int, outputs: int, act: str, group: str) -> None:
        self.dense = Linear(inputs, outputs, bias=True, group=group)
        self.act = activation(act)

    def forward(self, hidden: Tensor) -> Tensor:
        """[..., inputs] to [..., outputs]."""
        hidden = self.dense(hidden)
        return self.act(hidden)


class Pooler(Module):
    """act(dense(first token))."""

    scope = "head and loss"

    def __init__(self, hidden: int, act: str = "tanh", width: int | None = None) -> None:
        self.dense = Linear(hidden, width or hidden, bias=True, group="head")
        self.act = activation(act)

    def forward(self, hidden: Tensor) -> Tensor:
        """[b, s, h] to [b, h]."""
        first = ops.select(hidden, 1)
        pooled = self.dense(first)
        return self.act(pooled)
