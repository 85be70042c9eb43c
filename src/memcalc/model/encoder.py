"""Encoders: embeddings, a stack of bidirectional blocks, and the heads that a config's `architectures` names."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

from memcalc.model import ops
from memcalc.model.config import Config
from memcalc.model.heads import QuestionAnswerer, TokenClassifier, unknown_head
from memcalc.model.module import Module, Parameter, Stack
from memcalc.model.network import Batch, Network, Outputs
from memcalc.model.sublayers.linear import Embedding, Linear
from memcalc.model.sublayers.losses import causal_lm_loss, class_loss, token_loss
from memcalc.model.sublayers.masks import bidirectional_mask, causal_mask
from memcalc.model.sublayers.mlp import activation
from memcalc.model.sublayers.norms import LayerNorm
from memcalc.model.tensor import Tensor

Encoded = tuple[Tensor, Tensor | None]
"""Hidden states [b, s, h], and the pooled first token [b, h] where there is a pooler."""


class Encoder(Module):
    """The stack of layers, behind a projection `enter` where there is one (ALBERT)."""

    def __init__(self, layer: Stack, enter: Module | None = None) -> None:
        self.enter = enter
        self.layer = layer

    def forward(self, hidden: Tensor, mask: Tensor | None) -> Tensor:
        """[b, s, h] to [b, s, h]."""
        if self.enter is not None:
            hidden = self.enter(hidden)
        for layer in self.layer:
            hidden = layer(hidden, mask)
        return hidden


class EncoderModel(Module):
    """Embeddings, encoder and pooler. `project` widens the embeddings (ELECTRA); `causal` hides later tokens.

    `attention` is the only implementation that the family has, if there is but one.
    """

    def __init__(
        self, embeddings: Module, encoder: Module, *,
        pooler: Module | None = None, project: Module | None = None, causal: bool = False,
        attention: str | None = None,
    ) -> None:  # fmt: skip
        self.embeddings = embeddings
        self.embeddings_project = project
        self.encoder = encoder
        self.pooler = pooler
        self.causal = causal
        self.attention = attention

    def forward(self, ids: Tensor, padding: bool) -> Encoded:
        """Ids [b, s] to hidden states and pooled first token."""
        if self.attention is not None:
            ids.tape.attention = self.attention
        embedded = self.embeddings(ids)
        if self.embeddings_project is not None:
            embedded = self.embeddings_project(embedded)
        mask = causal_mask(embedded, padding) if self.causal else bidirectional_mask(embedded, padding)
        hidden = self.encoder(embedded, mask)
        return hidden, self.pooler(hidden) if self.pooler is not None else None


class VocabularyHead(Module):
    """LayerNorm(act(dense(x))) and the projection to the vocabulary, whose table may be that of the embedding.

    With `own_bias` the bias is the head's; a projection of its own has another one, and leaves the head's unused.
    """

    scope = "LM head and loss"

    def __init__(
        self, hidden: int, act: str, embedding: Embedding, *, tied: bool, own_bias: bool = True,
    ) -> None:  # fmt: skip
        vocab, width = embedding.weight.shape
        self.bias = Parameter(vocab, group="LM head") if own_bias else None
        self.dense = Linear(hidden, width, bias=True, group="LM head")
        self.act = activation(act)
        self.layer_norm = LayerNorm(width)
        self.decoder = Linear(width, vocab, bias=True, group="LM head")
        if tied:
            self.decoder.weight = embedding.weight
            if self.bias is not None:
                self.decoder.bias = self.bias

    def forward(self, hidden: Tensor) -> Tensor:
        """[b, s, h] to logits [b, s, V]."""
        hidden = self.dense(hidden)
        hidden = self.act(hidden)
        hidden = self.layer_norm(hidden)
        return self.decoder(hidden)  # type: ignore[no-any-return]


class FirstToken(Module):
    """out_proj(dropout(norm(act(dense(dropout(first token))))))."""

    scope = "head and loss"

    def __init__(
        self, hidden: int, classes: int, act: str, *,
        before: float = 0.0, after: float = 0.0, bias: bool = True, norm: Module | None = None,
    ) -> None:  # fmt: skip
        self.dense = Linear(hidden, hidden, bias=bias, group="head")
        self.act = activation(act)
        self.norm = norm
        self.out_proj = Linear(hidden, classes, bias=True, group="head")
        self.before, self.after = before, after

    def forward(self, hidden: Tensor) -> Tensor:
        """[b, s, h] to logits [b, classes]."""
        x = ops.select(hidden, 1)
        x = ops.dropout(x, self.before)
        x = self.dense(x)
        x = self.act(x)
        if self.norm is not None:
            x = self.norm(x)
        x = ops.dropout(x, self.after)
        return self.out_proj(x)  # type: ignore[no-any-return]


class DroppedLinear(Module):
    """dense(dropout(x))."""

    scope = "head and loss"

    def __init__(self, hidden: int, classes: int, dropout: float) -> None:
        self.dense = Linear(hidden, classes, bias=True, group="head")
        self.dropout = dropout

    def children(self) -> Iterator[tuple[str, Module]]:
        """The linear layer goes by this module's own name, as it does in a checkpoint."""
        yield "", self.dense

    def forward(self, hidden: Tensor) -> Tensor:
        """[..., h] to logits [..., classes]."""
        hidden = ops.dropout(hidden, self.dropout)
        return self.dense(hidden)  # type: ignore[no-any-return]


class EncoderLM(Network):
    """An encoder with a vocabulary head: masked, or causal with shifted labels.

    With `pair` a second head says from the pooled first token how two sentences are related (pre-training).
    """

    def __init__(self, model: Module, head: Module, *, causal: bool = False, pair: Module | None = None) -> None:
        self.model = model
        self.head = head
        self.pair = pair
        self.causal = causal

    def forward(self, batch: Batch) -> Outputs:
        """Loss and logits."""
        hidden, pooled = self.model(batch.ids, batch.padding)
        tape = batch.ids.tape
        last = hidden if tape.cache is None or tape.all_logits else ops.narrow(hidden, 1, 1)
        logits = self.head(last)
        related = self.pair(pooled) if self.pair is not None else None
        with tape.scoped("LM head and loss"):
            if batch.labels is None:
                return Outputs(None, (logits, related))
            if related is not None:
                loss = token_loss(logits, batch.token_labels())
                loss = ops.add(loss, class_loss(related, batch.class_labels()))
            else:
                loss = (causal_lm_loss if self.causal else token_loss)(logits, batch.labels)
        return Outputs(loss, (logits, related))


class EncoderClassifier(Network):
    """An encoder with a class per sequence, from its hidden states or, if it is `pooled`, the pooled first token."""

    def __init__(self, model: Module, classifier: Module, *, pooled: bool, problem: str) -> None:
        self.model = model
        self.classifier = classifier
        self.pooled = pooled
        self.problem = problem

    def forward(self, batch: Batch) -> Outputs:
        """Loss and logits [b, classes]."""
        hidden, pooled = self.model(batch.ids, batch.padding)
        logits = self.classifier(pooled if self.pooled else hidden)
        with batch.ids.tape.scoped("head and loss"):
            loss = None if batch.labels is None else class_loss(logits, batch.class_labels(), self.problem)
        return Outputs(loss, (logits,))


class SentenceEmbedder(Network):
    """The bare encoder: mean-pooled, normalised embeddings of sequences, trained to tell each from the others.

    Training compares every sequence of the batch with every other one: cosines [b, b], cross-entropy over rows
    (the usual in-batch contrastive loss). A pooler, if there is one, stays unused.
    """

    def __init__(self, model: Module) -> None:
        self.model = model

    def forward(self, batch: Batch) -> Outputs:
        """Loss and the embeddings [b, h]."""
        hidden, _pooled = self.model(batch.ids, batch.padding)
        tape = batch.ids.tape
        with tape.scoped("head and loss"):
            mask = tape.new(hidden.shape, hidden.dtype)  # which tokens count, as wide as the hidden states
            pooled = ops.divide(ops.sum_over(ops.multiply(hidden, mask), 1), ops.shift(ops.sum_over(mask, 1)))
            del mask
            if batch.labels is None:
                return Outputs(None, (hidden, pooled))
            unit = _normalised(pooled)
            scores = ops.scale(ops.matmul(unit, ops.transpose(unit, 0, 1)))
            loss = ops.cross_entropy(scores, tape.new(batch.ids.shape[:1], batch.ids.dtype))
        return Outputs(loss, (hidden, pooled))


def _normalised(x: Tensor) -> Tensor:
    """x over its length."""
    length = ops.sqrt(ops.sum_over(ops.power(x), -1, keepdim=True))
    return ops.divide(x, ops.expand(length, *x.shape))


@dataclass(frozen=True, slots=True)
class EncoderParts:
    """What a family's heads are made of: each makes a module. `body` is told whether a pooler is wanted.

    `classifier` reads the pooled first token if `pooled`, else the hidden states. `front` stands before the scores of
    tokens, `token_dropout` and `answer_dropout` behind it. `extra` has heads that only this family knows.
    """

    body: Callable[[bool], Module]
    vocabulary: Callable[[Module], Module]
    classifier: Callable[[], Module]
    pooled: bool = False
    token_dropout: float = 0.0
    answer_dropout: float = 0.0
    front: Callable[[], Module] | None = None
    extra: Mapping[str, Callable[[], Network]] = field(default_factory=dict)


_KNOWN = (
    "ForMaskedLM",
    "ForSequenceClassification",
    "ForTokenClassification",
    "ForQuestionAnswering",
    "ForCausalLM",
    "Model",
)


def encoder(c: Config, architecture: str | None, parts: EncoderParts) -> Network:
    """The encoder of `parts` with the head that `architecture` names; a masked-LM head where it names none."""
    name = architecture or "ForMaskedLM"
    for suffix, make in parts.extra.items():
        if name.endswith(suffix):
            return make()
    if name.endswith("ForMaskedLM"):
        body = parts.body(False)
        return EncoderLM(body, parts.vocabulary(body))
    if name.endswith(("ForCausalLM", "LMHeadModel")):
        body = parts.body(False)
        return EncoderLM(body, parts.vocabulary(body), causal=True)
    if name.endswith("ForSequenceClassification"):
        return EncoderClassifier(
            parts.body(parts.pooled), parts.classifier(), pooled=parts.pooled, problem=c.problem_type()
        )
    hidden, front = c.integer("hidden_size"), None if parts.front is None else parts.front()
    if name.endswith("ForTokenClassification"):
        return TokenClassifier(c, parts.body(False), hidden, own_loss=True, front=front, dropout=parts.token_dropout)
    if name.endswith("ForQuestionAnswering"):
        return QuestionAnswerer(parts.body(False), hidden, front=front, dropout=parts.answer_dropout)
    if name.endswith("Model"):
        return SentenceEmbedder(parts.body(True))
    raise unknown_head(c, name, (*_KNOWN, *parts.extra))
