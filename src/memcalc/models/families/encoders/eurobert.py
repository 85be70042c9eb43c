"""EuroBERT: Llama's blocks as an encoder, in which every token sees all others."""

from __future__ import annotations

from memcalc import ops
from memcalc.autograd.tensor import Tensor
from memcalc.config.reader import Config
from memcalc.errors import ConfigError
from memcalc.models.common.encoder import ClassificationHeadSpec, EncoderModel, EncoderRecipe, encoder
from memcalc.models.family import Family, llama_sizes, table
from memcalc.nn.layers.decoder_blocks import DecoderBlock
from memcalc.nn.layers.grouped_query_attention import GroupedQueryAttention
from memcalc.nn.layers.linear import Embedding, Linear
from memcalc.nn.layers.losses import class_loss
from memcalc.nn.layers.masks import padding_input
from memcalc.nn.layers.mlp import GatedMLP
from memcalc.nn.layers.norms import RMSNorm
from memcalc.nn.layers.rotary import RotaryEmbedding
from memcalc.nn.model import Batch, Network, Outputs
from memcalc.nn.module import Module
from memcalc.nn.stack import Stack
from memcalc.tables.dtypes import INT64


class EuroBertEncoder(Module):
    """The blocks, the rotary embedding, and a norm."""

    def __init__(self, c: Config, hidden: int) -> None:
        heads, kv_heads, head_dim = c.heads()

        def block(_: int) -> Module:
            attention = GroupedQueryAttention(
                hidden,
                heads,
                kv_heads,
                head_dim,
                bias=c.flag("attention_bias"),
                out_bias=c.flag("attention_bias"),
                dropout=c.probability("attention_dropout"),
            )
            width, act = c.integer("intermediate_size"), c.text("hidden_act")
            mlp = GatedMLP(hidden, width, act, bias=c.flag("mlp_bias"))
            return DecoderBlock(attention, mlp, lambda: RMSNorm(hidden))

        self.layers = Stack(["layer"] * c.integer("num_hidden_layers"), block)
        self.norm = RMSNorm(hidden)
        self.rotary_emb = RotaryEmbedding(head_dim)

    def forward(self, hidden: Tensor, mask: Tensor | None) -> Tensor:
        """[b, s, h] to [b, s, h]."""
        position_ids = ops.unsqueeze(hidden.tape.empty((hidden.shape[1],), INT64), 0)
        rotation = self.rotary_emb(hidden, position_ids)
        for layer in self.layers:
            hidden = layer(hidden, rotation=rotation, mask=mask, position_ids=position_ids)
        return self.norm(hidden)  # type: ignore[no-any-return]


class EuroBertClassifier(Network):
    """A class per sequence: from the first token, the mean of all, or as the mean of the scores of all ("late")."""

    def __init__(self, c: Config, model: Module, hidden: int) -> None:
        self.pooling = c.text("classifier_pooling")
        if self.pooling not in ("bos", "mean", "late"):
            raise ConfigError(f"{c.where} gives 'classifier_pooling' as {self.pooling!r}; it is bos, mean or late.")
        self.model = model
        self.dense = Linear(hidden, hidden, bias=True, group="head")
        self.classifier = Linear(hidden, c.num_labels(), bias=True, group="head")
        self.problem = c.problem_type()

    def forward(self, batch: Batch) -> Outputs:
        """Loss and logits [b, classes]."""
        outputs = self.model(batch.ids, batch.padding)
        hidden = outputs[0]
        mask = padding_input(batch.ids) if batch.padding else None
        with batch.ids.tape.scoped("head and loss"):
            if self.pooling == "late":
                x = self.dense(hidden)
                x = ops.gelu(x)
                logits = self.classifier(x)
                logits = _mean(logits, mask)
            else:
                pooled = ops.select(hidden, 1) if self.pooling == "bos" else _mean(hidden, mask)
                pooled = self.dense(pooled)
                pooled = ops.gelu(pooled)
                logits = self.classifier(pooled)
            loss = None if batch.labels is None else class_loss(logits, batch.class_labels(), self.problem)
        return Outputs(loss, (logits,))


def _mean(states: Tensor, mask: Tensor | None) -> Tensor:
    """The mean of states [b, s, h] over the tokens that are no padding."""
    if mask is None:
        return ops.mean(states, 1, keepdim=False)
    total = ops.sum(ops.mul(states, ops.unsqueeze(mask, -1)), 1)
    return ops.div_(total, ops.sum(mask, 1, keepdim=True))


def eurobert(c: Config, architecture: str | None) -> Network:
    """EuroBERT."""
    hidden, vocab = c.integer("hidden_size"), c.integer("vocab_size")

    def body(_pooler: bool) -> EncoderModel:
        return EncoderModel(Embedding(vocab, hidden), EuroBertEncoder(c, hidden))

    def vocabulary(model: Module) -> Module:
        head = Linear(hidden, vocab, bias=c.flag("mlp_bias"), group="LM head")
        if c.flag("tie_word_embeddings"):
            head.weight = vars(model)["embeddings"].weight
        return head

    def classes() -> Network:
        return EuroBertClassifier(c, body(False), hidden)

    return encoder(
        c,
        architecture,
        EncoderRecipe(
            body=body,
            vocabulary=vocabulary,
            classifier=lambda: ClassificationHeadSpec(Module()),
            fp32=True,
            extra={"ForSequenceClassification": classes},
        ),
    )


FAMILIES = table(
    Family(
        "eurobert",
        eurobert,
        llama_sizes((128256, 768, 3072, 12, 12, 0, 0), attention_dropout=0.0, classifier_pooling="late"),
        blocks="encoder",
        verified="measured rows",
    )
)
