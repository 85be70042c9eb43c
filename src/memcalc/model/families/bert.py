"""BERT: an encoder with learned positions, LayerNorm after each sublayer, and dropout."""

from __future__ import annotations

from memcalc.errors import ConfigError
from memcalc.model import ops
from memcalc.model.config import Config
from memcalc.model.families import Family
from memcalc.model.module import Buffer, Module, Parameter, Stack
from memcalc.model.network import Batch, Network, Outputs
from memcalc.model.sublayers.attention import attend_same_dtype
from memcalc.model.sublayers.linear import Embedding, Linear
from memcalc.model.sublayers.losses import causal_lm_loss, class_loss, token_loss
from memcalc.model.sublayers.masks import bidirectional_mask, causal_mask
from memcalc.model.sublayers.mlp import activation
from memcalc.model.sublayers.norms import LayerNorm
from memcalc.model.tensor import Tensor
from memcalc.tables.dtypes import INT64


class BertEmbeddings(Module):
    """Token, position and token-type embeddings, summed, normalised, dropped out."""

    scope = "embedding"

    def __init__(self, c: Config, width: int) -> None:
        self.word_embeddings = Embedding(c.integer("vocab_size"), width)
        self.position_embeddings = Embedding(c.integer("max_position_embeddings"), width)
        self.token_type_embeddings = Embedding(c.integer("type_vocab_size"), width)
        self.LayerNorm = LayerNorm(width)
        self.position_ids = Buffer(1, c.integer("max_position_embeddings"), dtype=INT64)
        self.token_type_ids = Buffer(1, c.integer("max_position_embeddings"), dtype=INT64)
        self.dropout = c.probability("hidden_dropout_prob")

    def forward(self, ids: Tensor) -> Tensor:
        """Ids [b, s] to [b, s, width]."""
        position_ids = ops.narrow(self.position_ids, 1, ids.shape[1])
        gathered = ids.tape.new((1, ids.shape[1]), INT64)
        token_types = ops.expand(gathered, *ids.shape)
        inputs_embeds = self.word_embeddings(ids)
        token_type_embeddings = self.token_type_embeddings(token_types)
        embeddings = ops.add(inputs_embeds, token_type_embeddings)
        position_embeddings = self.position_embeddings(position_ids)
        embeddings = ops.add(embeddings, position_embeddings)
        embeddings = self.LayerNorm(embeddings)
        return ops.dropout(embeddings, self.dropout)


class BertSelfAttention(Module):
    """Query, key and value projections with biases; dropout on the probabilities."""

    def __init__(self, c: Config, hidden: int) -> None:
        heads = c.integer("num_attention_heads")
        if hidden % heads:
            raise ConfigError(f"{c.where} has 'hidden_size' {hidden}, which 'num_attention_heads' {heads} does not divide.")
        self.head_dim = hidden // heads
        self.query = Linear(hidden, hidden, bias=True, group="attention")
        self.key = Linear(hidden, hidden, bias=True, group="attention")
        self.value = Linear(hidden, hidden, bias=True, group="attention")
        self.dropout = c.probability("attention_probs_dropout_prob")

    def _heads(self, x: Tensor) -> Tensor:
        return ops.transpose(ops.view(x, *x.shape[:-1], -1, self.head_dim), 1, 2)

    def forward(self, hidden: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """[b, s, h] to [b, s, h], and the probabilities where they exist."""
        query = self._heads(self.query(hidden))
        key = self._heads(self.key(hidden))
        value = self._heads(self.value(hidden))
        if query.tape.cache is not None:
            key, value = query.tape.cache.update(self, key, value)
        out, weights = attend_same_dtype(query, key, value, mask, self.dropout)
        return ops.contiguous(ops.reshape(out, *hidden.shape[:-1], -1)), weights


class AddNorm(Module):
    """LayerNorm(dropout(dense(x)) + residual)."""

    def __init__(self, inputs: int, hidden: int, dropout: float, group: str) -> None:
        self.dense = Linear(inputs, hidden, bias=True, group=group)
        self.LayerNorm = LayerNorm(hidden)
        self.dropout = dropout

    def forward(self, hidden: Tensor, residual: Tensor) -> Tensor:
        """[b, s, inputs] and [b, s, h] to [b, s, h]."""
        hidden = self.dense(hidden)
        hidden = ops.dropout(hidden, self.dropout)
        return self.LayerNorm(ops.add(hidden, residual))  # type: ignore[no-any-return]


class BertAttention(Module):
    """Self-attention and its output."""

    scope = "attention"

    def __init__(self, c: Config, hidden: int) -> None:
        self.self = BertSelfAttention(c, hidden)
        self.output = AddNorm(hidden, hidden, c.probability("hidden_dropout_prob"), "attention")

    def forward(self, hidden: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """[b, s, h] to [b, s, h]."""
        out, weights = self.self(hidden, mask=mask)
        out = self.output(out, hidden)
        return out, weights


class Intermediate(Module):
    """act(dense(x))."""

    def __init__(self, c: Config, hidden: int) -> None:
        self.dense = Linear(hidden, c.integer("intermediate_size"), bias=True, group="MLP")
        self.act = activation(c.text("hidden_act"))

    def forward(self, hidden: Tensor) -> Tensor:
        """[b, s, h] to [b, s, i]."""
        hidden = self.dense(hidden)
        return self.act(hidden)


class BertLayer(Module):
    """Attention, then MLP, each followed by add and LayerNorm."""

    scope = "MLP"

    def __init__(self, c: Config, hidden: int) -> None:
        self.attention = BertAttention(c, hidden)
        self.intermediate = Intermediate(c, hidden)
        self.output = AddNorm(c.integer("intermediate_size"), hidden, c.probability("hidden_dropout_prob"), "MLP")

    def forward(self, hidden: Tensor, mask: Tensor | None) -> Tensor:
        """[b, s, h] to [b, s, h]."""
        attended, _weights = self.attention(hidden, mask)
        return self._feed_forward(attended)

    def _feed_forward(self, attended: Tensor) -> Tensor:
        intermediate = self.intermediate(attended)
        return self.output(intermediate, attended)  # type: ignore[no-any-return]


class BertEncoder(Module):
    """The stack of layers."""

    def __init__(self, c: Config, hidden: int) -> None:
        self.layer = Stack(["layer"] * c.integer("num_hidden_layers"), lambda _: BertLayer(c, hidden))

    def forward(self, hidden: Tensor, mask: Tensor | None) -> Tensor:
        """[b, s, h] to [b, s, h]."""
        for layer in self.layer:
            hidden = layer(hidden, mask)
        return hidden


class Pooler(Module):
    """tanh(dense(first token))."""

    scope = "head and loss"

    def __init__(self, hidden: int) -> None:
        self.dense = Linear(hidden, hidden, bias=True, group="head")

    def forward(self, hidden: Tensor) -> Tensor:
        """[b, s, h] to [b, h]."""
        first = ops.select(hidden, 1)
        pooled = self.dense(first)
        return ops.tanh(pooled)


class BertModel(Module):
    """Embeddings, encoder and, for classification, pooler."""

    def __init__(self, c: Config, *, pooler: bool) -> None:
        hidden = c.integer("hidden_size")
        self.is_decoder = c.flag("is_decoder")
        self.embeddings = BertEmbeddings(c, hidden)
        self.encoder = BertEncoder(c, hidden)
        self.pooler = Pooler(hidden) if pooler else None

    def forward(self, ids: Tensor, padding: bool) -> tuple[Tensor, Tensor | None]:
        """Ids [b, s] to hidden states [b, s, h] and the pooled first token [b, h]."""
        embedded = self.embeddings(ids)
        mask = causal_mask(embedded, padding) if self.is_decoder else bidirectional_mask(embedded, padding)
        hidden = self.encoder(embedded, mask)
        return hidden, self.pooler(hidden) if self.pooler is not None else None


class Transform(Module):
    """LayerNorm(act(dense(x))) in front of the vocabulary projection."""

    def __init__(self, c: Config, hidden: int) -> None:
        self.dense = Linear(hidden, hidden, bias=True, group="LM head")
        self.act = activation(c.text("hidden_act"))
        self.LayerNorm = LayerNorm(hidden)

    def forward(self, hidden: Tensor) -> Tensor:
        """[b, s, h] to [b, s, h]."""
        hidden = self.dense(hidden)
        hidden = self.act(hidden)
        return self.LayerNorm(hidden)  # type: ignore[no-any-return]


class PredictionHead(Module):
    """Transform and decoder to the vocabulary; the decoder's bias is the head's own."""

    def __init__(self, c: Config, hidden: int, table: Embedding | None) -> None:
        vocab = c.integer("vocab_size")
        self.bias = Parameter(vocab, group="LM head")
        self.transform = Transform(c, hidden)
        self.decoder = Linear(hidden, vocab, bias=True, group="LM head")
        if table is not None:
            self.decoder.weight = table.weight
            self.decoder.bias = self.bias

    def forward(self, hidden: Tensor) -> Tensor:
        """[b, s, h] to logits [b, s, V]."""
        hidden = self.transform(hidden)
        return self.decoder(hidden)  # type: ignore[no-any-return]


class OnlyHead(Module):
    """Holder that gives the head's weights their names in a checkpoint."""

    scope = "LM head and loss"

    def __init__(self, predictions: Module) -> None:
        self.predictions = predictions

    def forward(self, hidden: Tensor) -> Tensor:
        """[b, s, h] to logits [b, s, V]."""
        return self.predictions(hidden)  # type: ignore[no-any-return]


class BertForLM(Network):
    """BERT with a vocabulary head: masked, or causal with shifted labels."""

    def __init__(self, c: Config, *, causal: bool) -> None:
        self.bert = BertModel(c, pooler=False)
        table = self.bert.embeddings.word_embeddings if c.flag("tie_word_embeddings", True) else None
        self.cls = OnlyHead(PredictionHead(c, c.integer("hidden_size"), table))
        self.causal = causal

    def forward(self, batch: Batch) -> Outputs:
        """Loss and logits."""
        hidden, _ = self.bert(batch.ids, batch.padding)
        logits = self.cls(hidden)
        with hidden.tape.scoped("LM head and loss"):
            loss = None
            if batch.labels is not None:
                loss = (causal_lm_loss if self.causal else token_loss)(logits, batch.labels)
        return Outputs(loss, (logits,))


class BertForSequenceClassification(Network):
    """BERT with a class per sequence, from the pooled first token."""

    def __init__(self, c: Config) -> None:
        self.bert = BertModel(c, pooler=True)
        self.classifier = Linear(c.integer("hidden_size"), c.num_labels(), bias=True, group="head")
        self.dropout = c.probability("classifier_dropout", c.probability("hidden_dropout_prob"))

    def forward(self, batch: Batch) -> Outputs:
        """Loss and logits."""
        outputs = self.bert(batch.ids, batch.padding)
        pooled = outputs[1]
        with pooled.tape.scoped("head and loss"):
            pooled = ops.dropout(pooled, self.dropout)
            logits = self.classifier(pooled)
            loss = class_loss(logits, batch.class_labels()) if batch.labels is not None else None
        return Outputs(loss, (logits,))


def bert(c: Config, architecture: str | None) -> Network:
    """BERT with the head that the config's architecture names; a masked-LM head where it names none."""
    name = architecture or "BertForMaskedLM"
    if name.endswith("ForSequenceClassification"):
        return BertForSequenceClassification(c)
    if name in ("BertForMaskedLM", "BertForPreTraining", "BertModel"):
        return BertForLM(c, causal=False)
    if name == "BertLMHeadModel":
        return BertForLM(c, causal=True)
    raise ConfigError(
        f"{c.where} names the head {name[:60]!r}, which memcalc does not describe for bert; known are BertForMaskedLM, "
        f"BertLMHeadModel and BertForSequenceClassification."
    )


FAMILIES = {
    "bert": Family("bert", bert, {
        "vocab_size": 30522, "hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12,
        "intermediate_size": 3072, "hidden_act": "gelu", "hidden_dropout_prob": 0.1,
        "attention_probs_dropout_prob": 0.1, "max_position_embeddings": 512, "type_vocab_size": 2,
        "tie_word_embeddings": True, "is_decoder": False,
    }, blocks="encoder", verified="measured rows, exact counts"),
}  # fmt: skip
