"""Heads on a decoder: which one a config's `architectures` names, and what it keeps."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from memcalc import ops
from memcalc.autograd.tape import OVERHEAD
from memcalc.autograd.tensor import Tensor
from memcalc.common.escaping import quoted
from memcalc.config.reader import Config
from memcalc.errors import ConfigError
from memcalc.models.common.causal_lm import CausalLM
from memcalc.nn.layers.linear import Embedding, Linear
from memcalc.nn.layers.load_balancing_loss import part_first_routed
from memcalc.nn.layers.losses import class_loss, position_loss, token_loss
from memcalc.nn.model import Batch, Network, Outputs
from memcalc.nn.module import Module
from memcalc.tables.dtypes import FP32, INT32, INT64


class SequenceClassifier(Network):
    """A class per sequence: scores of every token [b, s, classes], of which the last one that is no padding counts.

    Without a padding token in the config the last one is taken, which only a batch of one allows.
    """

    def __init__(self, c: Config, model: Module, hidden: int) -> None:
        self.model = model
        self.score = Linear(hidden, c.num_labels(), group="head")
        self.has_padding = c.has("pad_token_id")
        self.problem = c.problem_type()

    def forward(self, batch: Batch) -> Outputs:
        """Loss and the pooled logits [b, classes]."""
        hidden = self.model(batch.ids, batch.padding)
        tape = hidden.tape
        with tape.scoped("head and loss"):
            logits = self.score(hidden)
            size, length = batch.ids.shape
            if self.has_padding:
                not_padding = ops.to(ops.compare(batch.ids), INT32)
                indices = tape.empty((length,), INT32)
                last = _argmax(ops.mul(indices, not_padding))
                pooled = ops.index(logits, tape.empty((size,), INT64), last)
                del not_padding, indices
            elif size > 1:
                raise ConfigError(
                    "config.json has no 'pad_token_id', so sequences cannot be told apart in a batch; add it."
                )
            else:
                pooled = ops.index(ops.select(logits, 1), tape.empty((size,), INT64))
            loss = None if batch.labels is None else class_loss(pooled, batch.class_labels(), self.problem)
        return Outputs(loss, (pooled,))


def _argmax(x: Tensor) -> Tensor:
    return x.tape.empty(x.shape[:-1], INT64)


def _hidden(outputs: Tensor | tuple[Tensor, ...]) -> Tensor:
    """The hidden states of a backbone that gives them alone, or first of several outputs."""
    return outputs[0] if isinstance(outputs, tuple) else outputs


class TokenClassifier(Network):
    """A class per token, after dropout.

    own_loss: the loss is in the logits' dtype; the shared head of Transformers casts them to fp32.
    front: a module before the dropout.
    dropout: its probability where the config's common keys do not decide it.
    """

    def __init__(
        self,
        c: Config,
        model: Module,
        hidden: int,
        *,
        own_loss: bool,
        front: Module | None = None,
        dropout: float | None = None,
    ) -> None:
        self.model = model
        self.front = front
        if dropout is None:
            dropout = c.probability("classifier_dropout", c.probability("hidden_dropout", 0.1))
        self.dropout = dropout
        self.score = Linear(hidden, c.num_labels(), bias=True, group="head")
        self.own_loss = own_loss

    def forward(self, batch: Batch) -> Outputs:
        """Loss and logits [b, s, classes]."""
        outputs = self.model(batch.ids, batch.padding)  # kept until the end, as the model's output object is
        hidden = _hidden(outputs)
        with hidden.tape.scoped("head and loss"):
            if self.front is not None:
                hidden = self.front(hidden)
            hidden = ops.dropout(hidden, self.dropout)
            logits = self.score(hidden)
            loss = None
            if batch.labels is not None:
                loss = token_loss(logits if self.own_loss else ops.to(logits, FP32), batch.token_labels())
        return Outputs(loss, (logits,))


class QuestionAnswerer(Network):
    """Start and end of an answer: two scores per token, after `front` and dropout where a family has them."""

    def __init__(self, model: Module, hidden: int, *, front: Module | None = None, dropout: float = 0.0) -> None:
        self.model = model
        self.front = front
        self.dropout = dropout
        self.qa_outputs = Linear(hidden, 2, bias=True, group="head")

    def forward(self, batch: Batch) -> Outputs:
        """Loss and both logits [b, s]."""
        outputs = self.model(batch.ids, batch.padding)
        hidden = _hidden(outputs)
        tape = hidden.tape
        with tape.scoped("head and loss"):
            if self.front is not None:
                hidden = self.front(hidden)
            hidden = ops.dropout(hidden, self.dropout)
            logits = self.qa_outputs(hidden)
            starts, ends = (ops.contiguous(ops.squeeze(piece, -1)) for piece in ops.split(logits, [1, 1], -1))
            if batch.labels is None:
                return Outputs(None, (starts, ends))
            where = [tape.external_tensor(batch.ids.shape[:1], INT64, OVERHEAD, "labels") for _ in range(2)]
            return Outputs(position_loss(starts, ends, *where), (starts, ends))


class TextEmbedder(Network):
    """The bare decoder: the last token's hidden state is the embedding of a sequence.

    Training tells every sequence of the batch from the others: cosines [b, b], cross-entropy over rows (the usual
    in-batch contrastive loss).
    """

    def __init__(self, model: Module) -> None:
        self.model = model

    def forward(self, batch: Batch) -> Outputs:
        """Loss and the hidden states [b, s, h]."""
        hidden = self.model(batch.ids, batch.padding)
        tape = hidden.tape
        if batch.labels is None:
            return Outputs(None, (hidden,))
        with tape.scoped("head and loss"):
            pooled = ops.index(hidden, *(tape.empty(batch.ids.shape[:1], INT64) for _ in range(2)))
            length = ops.sqrt(ops.sum(ops.pow(pooled), -1, keepdim=True))
            unit = ops.div(pooled, ops.expand(length, *pooled.shape))
            scores = ops.mul_scalar(ops.matmul(unit, ops.transpose(unit, 0, 1)))
            loss = ops.cross_entropy(scores, tape.empty(batch.ids.shape[:1], INT64))
        return Outputs(loss, (hidden,))


def decoder(
    c: Config,
    architecture: str | None,
    model: Module,
    hidden: int,
    embedding: Embedding,
    *,
    tied: bool,
    own_token_loss: bool = False,
    logit_transforms: Sequence[Callable[[Tensor], Tensor]] = (),
    cast_to_head_dtype: bool = False,
    bias: bool = False,
) -> Network:
    """The decoder `model` with the head that `architecture` names; a language-model head if it names none.

    tied: the head shares the table of `embedding`.
    own_token_loss: token classification has its own loss, not that of Transformers' GenericForTokenClassification.
    logit_transforms, cast_to_head_dtype, bias: as of CausalLM.
    Raises ConfigError for a head that is not described.
    """
    name = architecture or ""
    if name.endswith("ForSequenceClassification"):
        return SequenceClassifier(c, model, hidden)
    if name.endswith("ForTokenClassification"):
        return TokenClassifier(c, model, hidden, own_loss=own_token_loss)
    if name.endswith("ForQuestionAnswering"):
        return QuestionAnswerer(model, hidden)
    if name == "" or name.endswith(("ForCausalLM", "LMHeadModel")):
        table, vocab = embedding if tied else None, embedding.weight.shape[0]
        head = CausalLM(
            model,
            hidden,
            vocab,
            tied_to=table,
            logit_transforms=logit_transforms,
            cast_to_head_dtype=cast_to_head_dtype,
            bias=bias,
        )
        head.router_aux_loss = c.flag("output_router_logits") and "router_aux_loss_coef" in c.defaults
        if head.router_aux_loss:
            part_first_routed(vars(model)["layers"])
        return head
    if name.endswith("Model"):
        return TextEmbedder(model)
    known = ("ForCausalLM", "ForSequenceClassification", "ForTokenClassification", "ForQuestionAnswering", "Model")
    raise unknown_head(c, name, known)


def with_head(c: Config, architecture: str | None, known: Mapping[str, Callable[[], Network]]) -> Network:
    """The network whose head `architecture` ends in; the first of `known` if it names none. Raises ConfigError else."""
    name = architecture or next(iter(known))
    for suffix, make in known.items():
        if name.endswith(suffix):
            return make()
    raise unknown_head(c, name, tuple(known))


def unknown_head(c: Config, name: str, known: tuple[str, ...]) -> ConfigError:
    """The error for an architecture that a family does not describe."""
    return ConfigError(
        f"the head {quoted(name)} that {c.where} or --task names is not described here; known are {', '.join(known)}."
    )
