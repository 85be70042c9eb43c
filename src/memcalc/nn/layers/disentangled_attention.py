"""Disentangled attention (DeBERTa): scores from contents and from relative positions, written out in eager PyTorch."""

from __future__ import annotations

from memcalc import ops
from memcalc.autograd.tape import Tape
from memcalc.autograd.tensor import Tensor
from memcalc.config.reader import Config
from memcalc.errors import ConfigError
from memcalc.nn.layers.linear import Linear
from memcalc.nn.module import Module
from memcalc.tables.dtypes import BOOL, FP32, INT64


class Positions:
    """How tokens attend to relative positions: which terms there are, and how far they reach."""

    def __init__(self, c: Config) -> None:
        self.relative = c.flag("relative_attention")
        given = c.get("pos_att_type")
        terms = given.lower().split("|") if isinstance(given, str) else c.items("pos_att_type") or []
        self.terms = [term for term in ("c2p", "p2c") if term in [str(item).strip() for item in terms]]
        self.shared = c.flag("share_att_key")
        reach = c.integer("max_relative_positions", -1, minimum=-1)
        self.reach = reach if reach > 0 else c.integer("max_position_embeddings")
        self.buckets = c.integer("position_buckets", -1, minimum=-1)
        self.span = self.buckets if self.buckets > 0 else self.reach
        self.normed = "layer_norm" in c.text("norm_rel_ebd", "none").lower()


def _root(tape: Tape) -> Tensor:
    """The square root of the head dimension times the number of terms, computed on the device."""
    return ops.sqrt(ops.mul_scalar(tape.empty((), FP32)))


class DisentangledAttention(Module):
    """Scores from contents, from content to position and from position to content."""

    scope = "attention"

    def __init__(self, c: Config, hidden: int, at: Positions) -> None:
        self.heads = c.integer("num_attention_heads")
        if hidden % self.heads:
            raise ConfigError(
                f"{c.where} has 'hidden_size' {hidden}, which 'num_attention_heads' {self.heads} does not divide."
            )
        self.query_proj = Linear(hidden, hidden, bias=True, group="attention")
        self.key_proj = Linear(hidden, hidden, bias=True, group="attention")
        self.value_proj = Linear(hidden, hidden, bias=True, group="attention")
        apart = at.relative and not at.shared
        self.pos_key_proj = (
            Linear(hidden, hidden, bias=True, group="attention") if apart and "c2p" in at.terms else None
        )
        self.pos_query_proj = (
            Linear(hidden, hidden, bias=True, group="attention") if apart and "p2c" in at.terms else None
        )
        self.at = at
        self.position_dropout = c.probability("hidden_dropout_prob")
        self.dropout = c.probability("attention_probs_dropout_prob")

    def _split(self, x: Tensor) -> Tensor:
        """[b, s, h] to [b · heads, s, d], a copy."""
        x = ops.view(x, *x.shape[:-1], self.heads, -1)
        return ops.view(ops.contiguous(ops.permute(x, 0, 2, 1, 3)), -1, x.shape[1], x.shape[-1])

    def forward(
        self, hidden: Tensor, mask: Tensor, relative: Tensor | None = None, table: Tensor | None = None
    ) -> tuple[Tensor, None]:
        """[b, s, h] to [b, s, h]; `relative` are distances [1, s, s], `table` the embeddings of distances."""
        query = self._split(self.query_proj(hidden))
        key = self._split(self.key_proj(hidden))
        value = self._split(self.value_proj(hidden))
        scale = _root(hidden.tape)
        scores = ops.bmm(query, ops.div(ops.transpose(key, -1, -2), ops.to(scale, query.dtype)))
        bias: Tensor | None = None
        if table is not None and relative is not None:
            table = ops.dropout(table, self.position_dropout)
            bias = self._bias(query, key, relative, table)
        if bias is not None:
            scores = ops.add(scores, bias)
        scores = ops.view(scores, -1, self.heads, *scores.shape[-2:])
        mask = ops.to(mask, BOOL)
        scores = ops.masked_fill(scores, ops.empty_like(mask))
        probs = ops.softmax(scores)
        probs = ops.dropout(probs, self.dropout)
        context = ops.bmm(ops.view(probs, -1, *probs.shape[-2:]), value)
        context = ops.contiguous(ops.permute(ops.view(context, -1, self.heads, *context.shape[-2:]), 0, 2, 1, 3))
        context = ops.view(context, *context.shape[:-2], -1)
        return context, None

    def _positions(self, projection: Module, table: Tensor, batch: int) -> Tensor:
        return ops.repeat(self._split(projection(table)), batch)

    def _bias(self, query: Tensor, key: Tensor, relative: Tensor, table: Tensor) -> Tensor | None:
        """What the terms of relative position add to the scores [b · heads, s, s]."""
        relative = ops.unsqueeze(relative, 1)
        table = ops.unsqueeze(ops.narrow(table, 0, 2 * self.at.span), 0)
        batch = query.shape[0] // self.heads
        if self.at.shared:
            of_query: Tensor | None = self._positions(self.query_proj, table, batch)
            of_key: Tensor | None = self._positions(self.key_proj, table, batch)
        else:
            of_key = None if self.pos_key_proj is None else self._positions(self.pos_key_proj, table, batch)
            of_query = None if self.pos_query_proj is None else self._positions(self.pos_query_proj, table, batch)
        square = (query.shape[0], query.shape[1], relative.shape[-1])
        score: Tensor | None = None
        if "c2p" in self.at.terms and of_key is not None:
            scale = _root(query.tape)
            found = ops.bmm(query, ops.transpose(of_key, -1, -2))
            where = ops.empty_like(ops.add_scalar(relative))
            found = ops.gather(found, ops.expand(ops.squeeze(where, 0), *square))
            score = ops.add_scalar(ops.div(found, ops.to(scale, found.dtype)))
        if "p2c" in self.at.terms and of_query is not None:
            scale = _root(query.tape)
            back = ops.empty_like(ops.add_scalar(ops.neg(relative)))
            seen = ops.bmm(key, ops.transpose(of_query, -1, -2))
            seen = ops.transpose(ops.gather(seen, ops.expand(ops.squeeze(back, 0), *square)), -1, -2)
            term = ops.div(seen, ops.to(scale, seen.dtype))
            score = ops.add_scalar(term) if score is None else ops.add_(score, term)
            del term
        return score


def distances(hidden: Tensor, at: Positions) -> Tensor:
    """Distances of tokens [1, s, s], far ones in buckets by logarithm."""
    tape, length = hidden.tape, hidden.shape[1]
    first, second = (tape.empty((length,), INT64) for _ in range(2))
    distance = ops.sub(ops.unsqueeze(first, 1), ops.unsqueeze(second, 0))
    if at.buckets > 0:
        distance = _bucketed(distance)
    distance = ops.to(distance, INT64)
    return ops.unsqueeze(distance, 0)


def _bucketed(distance: Tensor) -> Tensor:
    tape = distance.tape
    sign = ops.empty_like(distance)
    near = ops.mul(ops.compare(distance), ops.compare(distance))
    size = ops.where(near, ops.empty_like(_with(distance, tape.empty((), INT64))))
    del near
    logarithm = ops.log(ops.mul_scalar(ops.to(size, FP32)))
    far = ops.add_scalar(ops.empty_like(ops.mul_scalar(ops.div(logarithm, ops.log(tape.empty((), FP32))))))
    del logarithm
    return ops.where(ops.compare(size), _with(ops.to(distance, FP32), ops.mul(far, sign)))


def _with(x: Tensor, _alive: Tensor) -> Tensor:
    """x, while another tensor of the same expression is alive."""
    return x
