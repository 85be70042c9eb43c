"""Encoders: embeddings, a stack of bidirectional blocks, and the heads that a config's `architectures` names."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from memcalc import ops
from memcalc.autograd.tensor import Tensor
from memcalc.config.reader import Config
from memcalc.models.common.heads import QuestionAnswerer, TokenClassifier, unknown_head
from memcalc.nn.layers.encoder_heads import ClsTokenHead
from memcalc.nn.layers.linear import Embedding
from memcalc.nn.layers.losses import causal_lm_loss, class_loss, in_batch_loss, token_loss
from memcalc.nn.layers.masks import bidirectional_mask, causal_mask
from memcalc.nn.model import Batch, Network, Outputs
from memcalc.nn.module import Module
from memcalc.nn.run_context import run_context
from memcalc.nn.stack import Stack
from memcalc.tables.dtypes import FP32

Encoded = tuple[Tensor, Tensor | None]
"""Hidden states [b, s, h], and the pooled first token [b, h] where there is a pooler."""


class Encoder(Module):
    """The stack of layers, after a projection `enter` where there is one (ALBERT)."""

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
    """Embeddings, encoder and pooler.

    project: widens the embeddings (ELECTRA).
    causal: later tokens are hidden.
    blanked: the embeddings take whether sequences are padded (ESM).
    """

    def __init__(
        self,
        embeddings: Module,
        encoder: Module,
        *,
        pooler: Module | None = None,
        project: Module | None = None,
        causal: bool = False,
        blanked: bool = False,
    ) -> None:
        self.embeddings = embeddings
        self.embeddings_project = project
        self.encoder = encoder
        self.pooler = pooler
        self.causal, self.blanked = causal, blanked

    def forward(self, ids: Tensor, padding: bool) -> Encoded:
        """Ids [b, s] to hidden states and pooled first token."""
        embedded = self.embeddings(ids, padding) if self.blanked else self.embeddings(ids)
        if self.embeddings_project is not None:
            embedded = self.embeddings_project(embedded)
        mask = causal_mask(embedded, padding) if self.causal else bidirectional_mask(embedded, padding)
        hidden = self.encoder(embedded, mask)
        return hidden, self.pooler(hidden) if self.pooler is not None else None


class EncoderLM(Network):
    """An encoder with a vocabulary head: masked, or causal with shifted labels.

    With `pair` a second head says from the pooled first token how two sentences are related (pre-training); with
    `fp32` the loss is computed from an fp32 copy of the logits.
    """

    def __init__(
        self, model: Module, head: Module, *, causal: bool = False, pair: Module | None = None, fp32: bool = False
    ) -> None:
        self.model = model
        self.head = head
        self.pair = pair
        self.causal = causal
        self.fp32 = fp32

    def forward(self, batch: Batch) -> Outputs:
        """Loss and logits."""
        hidden, pooled = self.model(batch.ids, batch.padding)
        tape = batch.ids.tape
        last = hidden if run_context(tape).cache is None or run_context(tape).all_logits else ops.narrow(hidden, 1, 1)
        logits = self.head(last)
        related = self.pair(pooled) if self.pair is not None else None
        with tape.scoped("head and loss"):
            if batch.labels is None:
                return Outputs(None, (logits, related))
            if related is not None:
                loss = token_loss(logits, batch.token_labels())
                loss = ops.add(loss, class_loss(related, batch.class_labels()))
            elif self.causal:
                loss = causal_lm_loss(logits, batch.labels)
            else:
                loss = token_loss(ops.to(logits, FP32) if self.fp32 else logits, batch.labels)
        return Outputs(loss, (logits, related))


@dataclass(frozen=True)
class ClassificationHeadSpec:
    """How an encoder comes to a class per sequence.

    scores: the last module, to the classes.
    steps: applied one after another before it.
    pooled: they start from the pooled first token.
    pool: they start from what this makes of the hidden states, which stays alive with all it was made from.
    """

    scores: Module
    steps: tuple[Callable[[Tensor], Tensor], ...] = ()
    pooled: bool = False
    pool: Callable[[Tensor], tuple[Tensor, ...]] | None = None


class EncoderClassifier(Network):
    """An encoder with a class per sequence."""

    def __init__(self, model: Module, how: ClassificationHeadSpec, problem: str) -> None:
        self.model = model
        self.steps = list(how.steps)
        self.classifier = how.scores
        self.pooled, self.pool = how.pooled, how.pool
        self.problem = problem

    def forward(self, batch: Batch) -> Outputs:
        """Loss and logits [b, classes]."""
        hidden, pooled = self.model(batch.ids, batch.padding)
        with batch.ids.tape.scoped("head and loss"):
            reduced = (pooled if self.pooled else hidden,) if self.pool is None else self.pool(hidden)
            x = reduced[0]
            for step in self.steps:
                x = step(x)
            logits = self.classifier(x)
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
            mask = tape.empty(hidden.shape, hidden.dtype)  # which tokens count, as wide as the hidden states
            pooled = ops.div(ops.sum(ops.mul(hidden, mask), 1), ops.add_scalar(ops.sum(mask, 1)))
            del mask
            if batch.labels is None:
                return Outputs(None, (hidden, pooled))
            loss = in_batch_loss(pooled)
        return Outputs(loss, (hidden, pooled))


@dataclass(frozen=True)
class EncoderRecipe:
    """The parts of a family's encoder and of its heads.

    body: makes the encoder, with its pooler or without.
    vocabulary: makes the masked-LM head of an encoder.
    classifier: how a sequence is classified.
    token_dropout, answer_dropout: dropout before the scores of tokens and of answers.
    front: makes a module before them.
    fp32: the masked-LM loss casts the logits to fp32.
    extra: heads that only this family has.
    """

    body: Callable[[bool], Module]
    vocabulary: Callable[[Module], Module]
    classifier: Callable[[], ClassificationHeadSpec]
    token_dropout: float = 0.0
    answer_dropout: float = 0.0
    front: Callable[[], Module] | None = None
    fp32: bool = False
    extra: Mapping[str, Callable[[], Network]] = field(default_factory=dict)


def roberta_like_encoder(
    c: Config,
    architecture: str | None,
    dropout: float,
    body: Callable[[bool], Module],
    vocabulary: Callable[[Embedding], Module],
) -> Network:
    """An encoder with RoBERTa's heads: classes come from the first token, through a dense layer and tanh.

    `vocabulary` makes the masked-LM head around the table of word embeddings.
    """
    hidden = c.integer("hidden_size")
    return encoder(
        c,
        architecture,
        EncoderRecipe(
            body=body,
            vocabulary=lambda model: vocabulary(vars(model)["embeddings"].word_embeddings),
            classifier=lambda: ClassificationHeadSpec(ClsTokenHead(hidden, c.num_labels(), "tanh", dropout)),
            token_dropout=dropout,
        ),
    )


_KNOWN = (
    "ForMaskedLM",
    "ForSequenceClassification",
    "ForTokenClassification",
    "ForQuestionAnswering",
    "ForCausalLM",
    "Model",
)


def encoder(c: Config, architecture: str | None, parts: EncoderRecipe) -> Network:
    """The encoder of `parts` with the head that `architecture` names; a masked-LM head where it names none."""
    name = architecture or "ForMaskedLM"
    for suffix, make in parts.extra.items():
        if name.endswith(suffix):
            return make()
    if name.endswith("ForMaskedLM"):
        body = parts.body(False)
        return EncoderLM(body, parts.vocabulary(body), fp32=parts.fp32)
    if name.endswith(("ForCausalLM", "LMHeadModel")):
        body = parts.body(False)
        return EncoderLM(body, parts.vocabulary(body), causal=True)
    if name.endswith("ForSequenceClassification"):
        how = parts.classifier()
        return EncoderClassifier(parts.body(how.pooled), how, c.problem_type())
    hidden, front = c.integer("hidden_size"), None if parts.front is None else parts.front()
    if name.endswith("ForTokenClassification"):
        return TokenClassifier(c, parts.body(False), hidden, own_loss=True, front=front, dropout=parts.token_dropout)
    if name.endswith("ForQuestionAnswering"):
        return QuestionAnswerer(parts.body(False), hidden, front=front, dropout=parts.answer_dropout)
    if name.endswith("Model"):
        return SentenceEmbedder(parts.body(True))
    raise unknown_head(c, name, (*_KNOWN, *parts.extra))
