"""Modules on top of an encoder: to the vocabulary, to classes."""

from __future__ import annotations

from memcalc import ops
from memcalc.autograd.tensor import Tensor
from memcalc.nn.layers.linear import Embedding, Linear
from memcalc.nn.layers.mlp import activation
from memcalc.nn.layers.norms import LayerNorm
from memcalc.nn.module import Module, Parameter


class VocabularyHead(Module):
    """The head of a masked language model: LayerNorm(act(dense(x))), then the projection to the vocabulary.

    hidden, act, embedding: width, activation and the word embedding, whose table gives the vocabulary [V, width].
    tied: the projection shares that table.
    own_bias: the bias of the logits is the head's; an untied projection has another one and leaves it unused.
    bias, norm_bias, out_bias: biases of the dense layer, the norm and the projection.
    """

    scope = "head and loss"

    def __init__(
        self,
        hidden: int,
        act: str,
        embedding: Embedding,
        *,
        tied: bool,
        own_bias: bool = True,
        bias: bool = True,
        norm_bias: bool = True,
        out_bias: bool = True,
    ) -> None:
        vocab, width = embedding.weight.shape
        self.bias = Parameter(vocab, group="LM head") if own_bias else None
        self.dense = Linear(hidden, width, bias=bias, group="LM head")
        self.act = activation(act)
        self.layer_norm = LayerNorm(width, bias=norm_bias)
        self.decoder = Linear(width, vocab, bias=out_bias, group="LM head")
        if tied:
            self.decoder.weight = embedding.weight
            if self.bias is not None:
                self.decoder.bias = self.bias

    def forward(self, hidden: Tensor) -> Tensor:
        """[b, s, h] to logits [b, s, V]."""
        hidden = self.dense(hidden)
        hidden = self.act(hidden)
        hidden = self.layer_norm(hidden)
        return self.decoder(hidden)


class ClsTokenHead(Module):
    """out_proj(dropout(act(dense(dropout(first token)))))."""

    scope = "head and loss"

    def __init__(self, hidden: int, classes: int, act: str, dropout: float) -> None:
        self.dense = Linear(hidden, hidden, bias=True, group="head")
        self.act = activation(act)
        self.out_proj = Linear(hidden, classes, bias=True, group="head")
        self.dropout = dropout

    def forward(self, hidden: Tensor) -> Tensor:
        """[b, s, h] to logits [b, classes]."""
        x = ops.select(hidden, 1)
        x = ops.dropout(x, self.dropout)
        x = self.dense(x)
        x = self.act(x)
        x = ops.dropout(x, self.dropout)
        return self.out_proj(x)


class Dropout(Module):
    """Dropout by itself."""

    def __init__(self, p: float) -> None:
        self.p = p

    def forward(self, x: Tensor) -> Tensor:
        """Of any shape."""
        return ops.dropout(x, self.p)


class DropoutLinear(Module):
    """dense(dropout(x))."""

    scope = "head and loss"

    def __init__(self, hidden: int, classes: int, dropout: float) -> None:
        self.dense = Linear(hidden, classes, bias=True, group="head")
        self.dropout = dropout

    def forward(self, hidden: Tensor) -> Tensor:
        """[..., h] to logits [..., classes]."""
        hidden = ops.dropout(hidden, self.dropout)
        return self.dense(hidden)
