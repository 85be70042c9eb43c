"""GPT-NeoX, Phi and Persimmon: rotary embedding over a part of each head, LayerNorm, an MLP without gate, biases."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Literal

from memcalc import ops
from memcalc.autograd.tensor import Tensor
from memcalc.config.reader import Config
from memcalc.models.common.decoder import dense_decoder
from memcalc.models.family import Family, llama_sizes, table
from memcalc.nn.layers.attention_backends import attend
from memcalc.nn.layers.grouped_query_attention import QKNorm
from memcalc.nn.layers.linear import Linear
from memcalc.nn.layers.mlp import PlainMLP
from memcalc.nn.layers.norms import LayerNorm
from memcalc.nn.layers.rotary import RotaryEmbedding, Rotation, rotary_held, rotary_of_part
from memcalc.nn.model import Network
from memcalc.nn.module import Module
from memcalc.nn.run_context import run_context

_NORMS = ("q_layernorm", "k_layernorm")


class FusedHeads(Module):
    """Attention with one projection whose output lies head by head: query, key, value of the first, of the second ...

    The three are cut out of each head as chunks of its width (GPT-NeoX), or as elements of a dimension of their own
    (Persimmon), which may get a LayerNorm each.
    """

    scope = "attention"
    window = None

    def __init__(
        self, c: Config, *, cut: Literal["chunks", "elements"], bias: bool = True, qk_norm: bool = False
    ) -> None:
        hidden = c.integer("hidden_size")
        self.heads, _, self.head_dim = c.heads()
        self.cut = cut
        self.query_key_value = Linear(hidden, 3 * hidden, bias=bias, group="attention")
        self.dense = Linear(hidden, hidden, bias=bias, group="attention")
        self.q_layernorm = LayerNorm(self.head_dim) if qk_norm else None
        self.k_layernorm = LayerNorm(self.head_dim) if qk_norm else None
        self.dropout = c.probability("attention_dropout")

    def _chunks(self, fused: Tensor) -> list[Tensor]:
        fused = ops.transpose(ops.view(fused, *fused.shape[:-1], -1, 3 * self.head_dim), 1, 2)
        return ops.chunk(fused, 3, -1)

    def _elements(self, fused: Tensor) -> list[Tensor]:
        apart = ops.view(fused, *fused.shape[:-1], self.heads, 3, self.head_dim)
        query, key, value = (ops.select(apart, -2) for _ in range(3))
        del apart
        if self.q_layernorm is not None and self.k_layernorm is not None:
            query = self.q_layernorm(query)
            key = self.k_layernorm(key)
        query = ops.transpose(query, 1, 2)
        value = ops.transpose(value, 1, 2)
        return [query, ops.transpose(key, 1, 2), value]

    def forward(self, hidden: Tensor, rotation: Rotation, mask: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """[b, s, h] to [b, s, h], and the probabilities where they exist."""
        fused = self.query_key_value(hidden)
        query, key, value = self._chunks(fused) if self.cut == "chunks" else self._elements(fused)
        rotate = rotary_of_part if self.cut == "chunks" else rotary_held
        query, key, *_held = rotate(query, key, *rotation)
        if (cache := run_context(query).cache) is not None:
            key, value = cache.update(self, key, value)
        out, weights = attend(query, key, value, mask, 1, self.dropout)
        out = ops.contiguous(ops.reshape(out, *hidden.shape[:-1], -1))
        return self.dense(out), weights


class NeoXBlock(Module):
    """Attention and MLP side by side or one after the other, each after a LayerNorm of its own."""

    scope = "residual stream"

    def __init__(
        self, attention: Module, mlp: Module, norm: Callable[[], Module], *, parallel: bool, dropout: float
    ) -> None:
        self.input_layernorm = norm()
        self.post_attention_layernorm = norm()
        self.self_attn = attention
        self.mlp = mlp
        self.parallel, self.dropout = parallel, dropout

    def forward(self, hidden: Tensor, rotation: Rotation, mask: Tensor | None, position_ids: Tensor) -> Tensor:
        """[b, s, h] to [b, s, h]."""
        attended, _weights = self.self_attn(self.input_layernorm(hidden), rotation=rotation, mask=mask)
        attended = ops.dropout(attended, self.dropout)
        if self.parallel:
            fed = self.mlp(self.post_attention_layernorm(hidden))
            fed = ops.dropout(fed, self.dropout)
            return ops.add(ops.add(fed, attended), hidden)
        attended = ops.add(attended, hidden)
        fed = self.mlp(self.post_attention_layernorm(attended))
        fed = ops.dropout(fed, self.dropout)
        return ops.add(fed, attended)


class PhiBlock(Module):
    """One LayerNorm, attention and MLP both from it, their sum added to the residual stream."""

    scope = "residual stream"

    def __init__(self, attention: Module, mlp: Module, norm: Callable[[], Module], *, dropout: float) -> None:
        self.self_attn = attention
        self.mlp = mlp
        self.input_layernorm = norm()
        self.dropout = dropout

    def forward(self, hidden: Tensor, rotation: Rotation, mask: Tensor | None, position_ids: Tensor) -> Tensor:
        """[b, s, h] to [b, s, h]."""
        residual = hidden
        hidden = self.input_layernorm(hidden)
        attended, _weights = self.self_attn(hidden, rotation=rotation, mask=mask)
        attended = ops.dropout(attended, self.dropout)
        fed = ops.dropout(self.mlp(hidden), self.dropout)
        return ops.add(ops.add(attended, fed), residual)


def _mlp(c: Config, up: str, down: str, dropout: float = 0.0) -> Module:
    hidden, width = c.integer("hidden_size"), c.integer("intermediate_size")
    return PlainMLP(hidden, width, c.text("hidden_act"), names=(up, down), bias=True, dropout=dropout)


def gpt_neox(c: Config, architecture: str | None) -> Network:
    """GPT-NeoX and Pythia."""
    dropout = c.probability("hidden_dropout")
    return dense_decoder(
        c,
        architecture,
        make_attention=lambda _: FusedHeads(c, cut="chunks", bias=c.flag("attention_bias", True)),
        mlp=lambda: _mlp(c, "dense_h_to_4h", "dense_4h_to_h"),
        norm=LayerNorm,
        block=partial(NeoXBlock, parallel=c.flag("use_parallel_residual", True), dropout=dropout),
        rotary=RotaryEmbedding(c.rotary_dim(c.head_dim(), 0.25)),
        dropout=dropout,
    )


def phi(c: Config, architecture: str | None) -> Network:
    """Phi 1, 1.5 and 2."""
    norm = QKNorm(lambda _heads, dim: LayerNorm(dim), "after_transpose", _NORMS) if c.flag("qk_layernorm") else None
    return dense_decoder(
        c,
        architecture,
        attention={"bias": True, "out_bias": True, "out": "dense", "qk_norm": norm, "rotate": rotary_held},
        mlp=lambda: _mlp(c, "fc1", "fc2"),
        norm=LayerNorm,
        block=partial(PhiBlock, dropout=c.probability("resid_pdrop")),
        rotary=RotaryEmbedding(c.rotary_dim(c.head_dim(), 0.5)),
        dropout=c.probability("embd_pdrop"),
        frees_inputs_embeds=True,
        head_bias=True,
    )


def phi_msft(c: Config, architecture: str | None) -> Network:
    """Phi in the words of Microsoft's own code, before Transformers took it up."""
    hidden, heads = c.integer("hidden_size"), c.integer("num_attention_heads")
    changes = {
        "intermediate_size": c.integer("n_inner", 4 * hidden),
        "num_key_value_heads": c.integer("n_head_kv", heads),
        "partial_rotary_factor": c.integer("rotary_dim") * heads / hidden,
    }
    return phi(c.replaced(**changes), architecture)


def persimmon(c: Config, architecture: str | None) -> Network:
    """Persimmon: GPT-NeoX's projection, squared ReLU, a LayerNorm over each head's query and key."""
    return dense_decoder(
        c,
        architecture,
        make_attention=lambda _: FusedHeads(c, cut="elements", qk_norm=c.flag("qk_layernorm", True)),
        mlp=lambda: _mlp(c, "dense_h_to_4h", "dense_4h_to_h", dropout=c.probability("hidden_dropout")),
        norm=LayerNorm,
        rotary=RotaryEmbedding(c.rotary_dim(c.head_dim(), 0.5)),
    )


_PHI = llama_sizes(
    (51200, 2048, 8192, 24, 32, 0, 2048), resid_pdrop=0.0, embd_pdrop=0.0, attention_dropout=0.0, hidden_act="gelu_new"
)
FAMILIES = table(
    Family(
        "gpt_neox",
        gpt_neox,
        llama_sizes(
            (50432, 6144, 24576, 44, 64, 0, 2048),
            hidden_act="gelu",
            attention_dropout=0.0,
            hidden_dropout=0.0,
            classifier_dropout=0.1,
        ),
        {"rotary_pct": "partial_rotary_factor"},
    ),
    Family("phi", phi, _PHI),
    Family(
        "phi-msft",
        phi_msft,
        {**_PHI, "rotary_dim": 32},
        {
            "n_embd": "hidden_size",
            "n_head": "num_attention_heads",
            "n_layer": "num_hidden_layers",
            "n_positions": "max_position_embeddings",
            "activation_function": "hidden_act",
            "attn_pdrop": "attention_dropout",
        },
        verified="exact counts; tensors as Transformers' phi keeps them",
    ),
    Family(
        "persimmon",
        persimmon,
        llama_sizes(
            (262144, 4096, 16384, 36, 64, 0, 16384), hidden_act="relu2", hidden_dropout=0.0, attention_dropout=0.0
        ),
    ),
)
