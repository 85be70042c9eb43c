"""XLNet: attention with relative positions written as Einstein sums, over sequences whose first dimension is length."""

from __future__ import annotations

from memcalc import ops
from memcalc.autograd.tensor import Tensor
from memcalc.config.reader import Config
from memcalc.errors import ConfigError
from memcalc.models.common.heads import unknown_head
from memcalc.models.family import Family, table
from memcalc.nn.layers.linear import Embedding, Linear
from memcalc.nn.layers.losses import class_loss, token_loss
from memcalc.nn.layers.masks import padding_input
from memcalc.nn.layers.mlp import activation
from memcalc.nn.layers.norms import LayerNorm
from memcalc.nn.model import Batch, Network, Outputs
from memcalc.nn.module import Module, Parameter
from memcalc.nn.run_context import run_context
from memcalc.nn.stack import Stack
from memcalc.tables.dtypes import FP32, INT64


class XLNetAttention(Module):
    """Content and position scores, each from queries with a bias of its own; positions are shifted into place."""

    scope = "attention"

    def __init__(self, c: Config, hidden: int) -> None:
        heads = c.integer("n_head")
        dim = c.integer("d_head", hidden // heads)
        if heads * dim != hidden:
            raise ConfigError(
                f"{c.where} gives 'd_model' {hidden}, but 'n_head' {heads} times 'd_head' {dim}; correct it."
            )
        self.q, self.k, self.v, self.o, self.r = (Parameter(hidden, heads, dim, group="attention") for _ in range(5))
        self.r_r_bias, self.r_s_bias, self.r_w_bias = (Parameter(heads, dim, group="attention") for _ in range(3))
        self.seg_embed = Parameter(2, heads, dim, group="attention")
        self.layer_norm = LayerNorm(hidden)
        self.dropout = c.probability("dropout")

    def forward(self, hidden: Tensor, mask: Tensor | None, positions: Tensor) -> Tensor:
        """[s, b, h] and encoded distances [2s, b, h] to [s, b, h]."""
        query = ops.einsum("ibh,hnd->ibnd", hidden, self.q)
        key = ops.einsum("ibh,hnd->ibnd", hidden, self.k)
        value = ops.einsum("ibh,hnd->ibnd", hidden, self.v)
        distance = ops.einsum("ibh,hnd->ibnd", ops.to(positions, self.r.dtype), self.r)
        attended = self._attend(query, key, value, distance, mask)
        return self._finish(hidden, attended)

    def _attend(self, query: Tensor, key: Tensor, value: Tensor, distance: Tensor, mask: Tensor | None) -> Tensor:
        content = ops.einsum("ibnd,jbnd->bnij", ops.add(query, self.r_w_bias), key)
        position = ops.einsum("ibnd,jbnd->bnij", ops.add(query, self.r_r_bias), distance)
        position = _shifted(position, content.shape[3])
        score = ops.mul_scalar(ops.add_scalar(ops.add(content, position)))
        if mask is not None:
            score = ops.sub(score, ops.mul_scalar(ops.permute(mask, 2, 3, 0, 1)))
        prob = ops.softmax(score)
        prob = ops.dropout(prob, self.dropout)
        return ops.einsum("bnij,jbnd->ibnd", prob, value)

    def _finish(self, hidden: Tensor, attended: Tensor) -> Tensor:
        out = ops.einsum("ibnd,hnd->ibh", attended, self.o)
        out = ops.dropout(out, self.dropout)
        out = ops.add(out, hidden)
        return self.layer_norm(out)


def _shifted(x: Tensor, length: int) -> Tensor:
    """Scores by distance [b, n, i, 2s] to scores by place [b, n, i, length]."""
    shape = x.shape
    x = ops.reshape(x, shape[0], shape[1], shape[3], shape[2])
    x = ops.narrow(x, 2, shape[3] - 1)
    x = ops.reshape(x, shape[0], shape[1], shape[2], shape[3] - 1)
    return ops.index_select(x, x.tape.empty((length,), INT64), 3)


class XLNetFeedForward(Module):
    """Two linear layers, the residual, and a LayerNorm over the sum."""

    scope = "MLP"

    def __init__(self, c: Config, hidden: int) -> None:
        width = c.integer("d_inner")
        self.layer_norm = LayerNorm(hidden)
        self.layer_1 = Linear(hidden, width, bias=True, group="MLP")
        self.layer_2 = Linear(width, hidden, bias=True, group="MLP")
        self.act = activation(c.text("ff_activation"))
        self.dropout = c.probability("dropout")

    def forward(self, hidden: Tensor) -> Tensor:
        """[s, b, h] to [s, b, h]."""
        out = hidden
        out = self.layer_1(out)
        out = self.act(out)
        out = ops.dropout(out, self.dropout)
        out = self.layer_2(out)
        out = ops.dropout(out, self.dropout)
        return self.layer_norm(ops.add(out, hidden))


class XLNetBlock(Module):
    """Attention, then MLP."""

    scope = "residual stream"
    supports_checkpointing = False

    def __init__(self, c: Config, hidden: int) -> None:
        self.rel_attn = XLNetAttention(c, hidden)
        self.ff = XLNetFeedForward(c, hidden)

    def forward(self, hidden: Tensor, mask: Tensor | None, positions: Tensor) -> Tensor:
        """[s, b, h] to [s, b, h]."""
        hidden = self.rel_attn(hidden, mask, positions)
        return self.ff(hidden)


class XLNetModel(Module):
    """Token embeddings and blocks, attending both ways. Outside training it also returns what each block received."""

    def __init__(self, c: Config, hidden: int) -> None:
        if c.text("attn_type") != "bi" or c.flag("bi_data") or c.flag("use_mems_train"):
            raise ConfigError(
                f"{c.where} asks for 'attn_type' other than 'bi', for 'bi_data' or for 'use_mems_train', which memcalc "
                f"does not describe; take them out."
            )
        self.word_embedding = Embedding(c.integer("vocab_size"), hidden)
        self.mask_emb = Parameter(1, 1, hidden, group="embedding")
        self.layer = Stack(["block"] * c.integer("n_layer"), lambda _: XLNetBlock(c, hidden))
        self.dropout = c.probability("dropout")
        self.keeps = c.flag("use_mems_eval")

    def forward(self, ids: Tensor, padding: bool) -> tuple[Tensor, list[Tensor]]:
        """Ids [b, s] to hidden states [b, s, h], and what the blocks received."""
        tape = ids.tape
        batch, length = ids.shape
        given = padding_input(ids) if padding else None
        ids = ops.contiguous(ops.transpose(ids, 0, 1))
        mask = None
        if given is not None:
            given = ops.contiguous(ops.transpose(given, 0, 1))
            hidden_tokens = tape.empty(given.shape, FP32)
            _mask = ops.unsqueeze(ops.unsqueeze(hidden_tokens, 0), -1)
            _mask = ops.to(ops.compare(_mask), run_context(tape).weights_dtype)
            mask = tape.empty((length, length, batch, 1), run_context(tape).weights_dtype)
        embedded = self.word_embedding(ids)
        hidden = ops.dropout(embedded, self.dropout)
        positions = ops.expand(tape.empty((2 * length, 1, hidden.shape[-1]), FP32), -1, batch, -1)
        positions = ops.dropout(positions, self.dropout)
        received: list[Tensor] = []
        for layer in self.layer:
            if self.keeps and not run_context(tape).training:
                received.append(hidden)
            hidden = layer(hidden, mask=mask, positions=positions)
        out = ops.dropout(hidden, self.dropout)
        return ops.contiguous(ops.permute(out, 1, 0, 2)), received


class XLNetLMHeadModel(Network):
    """With a vocabulary head that shares the embedding table, and has a bias."""

    def __init__(self, c: Config) -> None:
        hidden = c.integer("d_model")
        self.transformer = XLNetModel(c, hidden)
        table = self.transformer.word_embedding
        self.lm_loss = Linear(hidden, table.weight.shape[0], bias=True, group="LM head")
        if c.flag("tie_word_embeddings"):
            self.lm_loss.weight = table.weight

    def forward(self, batch: Batch) -> Outputs:
        """Loss and logits: every token predicts its own label."""
        hidden, received = self.transformer(batch.ids, batch.padding)
        with hidden.tape.scoped("head and loss"):
            logits = self.lm_loss(hidden)
            loss = None if batch.labels is None else token_loss(logits, batch.labels)
        return Outputs(loss, (logits, received))


class XLNetForSequenceClassification(Network):
    """A class per sequence, from the last token."""

    def __init__(self, c: Config) -> None:
        hidden = c.integer("d_model")
        if c.text("summary_type") not in ("last", "first"):
            raise ConfigError(f"{c.where} has a 'summary_type' other than last and first, which memcalc lacks.")
        self.transformer = XLNetModel(c, hidden)
        self.summary = Linear(hidden, hidden, bias=True, group="head") if c.flag("summary_use_proj") else None
        self.logits_proj = Linear(hidden, c.num_labels(), bias=True, group="head")
        self.act = activation(c.text("summary_activation"))
        self.dropout = c.probability("summary_last_dropout")
        self.problem = c.problem_type()

    def forward(self, batch: Batch) -> Outputs:
        """Loss and logits [b, classes]."""
        hidden, received = self.transformer(batch.ids, batch.padding)
        with hidden.tape.scoped("head and loss"):
            out = ops.select(hidden, 1)
            if self.summary is not None:
                out = self.summary(out)
            out = self.act(out)
            out = ops.dropout(out, self.dropout)
            logits = self.logits_proj(out)
            loss = None if batch.labels is None else class_loss(logits, batch.class_labels(), self.problem)
        return Outputs(loss, (logits, received))


def xlnet(c: Config, architecture: str | None) -> Network:
    """XLNet as a bidirectional language model or a sequence classifier."""
    name = architecture or ""
    if name == "" or name.endswith(("LMHeadModel", "XLNetModel")):
        return XLNetLMHeadModel(c)
    if name.endswith("ForSequenceClassification"):
        return XLNetForSequenceClassification(c)
    raise unknown_head(c, name, ("LMHeadModel", "ForSequenceClassification"))


FAMILIES = table(
    Family(
        "xlnet",
        xlnet,
        {
            "vocab_size": 32000,
            "d_model": 1024,
            "n_layer": 24,
            "n_head": 16,
            "d_inner": 4096,
            "ff_activation": "gelu",
            "attn_type": "bi",
            "dropout": 0.1,
            "use_mems_eval": True,
            "summary_type": "last",
            "summary_use_proj": True,
            "summary_activation": "tanh",
            "summary_last_dropout": 0.1,
            "tie_word_embeddings": True,
        },
        {
            "n_token": "vocab_size",
            "hidden_size": "d_model",
            "num_attention_heads": "n_head",
            "num_hidden_layers": "n_layer",
        },
        blocks="encoder",
        attention="eager",
    )
)
