"""OPT: learned positions, LayerNorm before or after each sublayer, a ReLU MLP over flattened rows."""

from __future__ import annotations

from memcalc import ops
from memcalc.autograd.tensor import Tensor
from memcalc.config.reader import Config
from memcalc.models.common import heads
from memcalc.models.family import Family, sizes, table
from memcalc.nn.layers.attention_backends import attend, split_heads
from memcalc.nn.layers.linear import Embedding, Linear, PositionTable
from memcalc.nn.layers.masks import causal_mask, padding_input
from memcalc.nn.layers.mlp import activation
from memcalc.nn.layers.norms import LayerNorm
from memcalc.nn.model import Network
from memcalc.nn.module import Module
from memcalc.nn.run_context import run_context
from memcalc.nn.stack import Stack
from memcalc.tables.dtypes import FP32, INT64


class OPTAttention(Module):
    """Attention whose queries are scaled as they are projected."""

    scope = "attention"

    def __init__(self, c: Config, hidden: int) -> None:
        _, _, self.head_dim = c.heads()
        bias = c.flag("enable_bias")
        self.k_proj = Linear(hidden, hidden, bias=bias, group="attention")
        self.v_proj = Linear(hidden, hidden, bias=bias, group="attention")
        self.q_proj = Linear(hidden, hidden, bias=bias, group="attention")
        self.out_proj = Linear(hidden, hidden, bias=bias, group="attention")
        self.dropout = c.probability("attention_dropout")

    def forward(self, hidden: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """[b, s, h] to [b, s, h], and the probabilities where they exist."""
        query = ops.mul_scalar(self.q_proj(hidden))
        query = split_heads(query, self.head_dim)
        key = self.k_proj(hidden)
        value = self.v_proj(hidden)
        key = split_heads(key, self.head_dim)
        value = split_heads(value, self.head_dim)
        if (cache := run_context(query).cache) is not None:
            key, value = cache.update(self, key, value)
        out, weights = attend(query, key, value, mask, 1, self.dropout)
        out = ops.contiguous(ops.reshape(out, *hidden.shape[:-1], -1))
        return self.out_proj(out), weights


class OPTBlock(Module):
    """Attention and MLP, each with a residual, and with a LayerNorm before it (or after it: OPT 350m)."""

    scope = "residual stream"

    def __init__(self, c: Config, hidden: int) -> None:
        width, bias, affine = c.integer("ffn_dim"), c.flag("enable_bias"), c.flag("layer_norm_elementwise_affine")
        self.self_attn = OPTAttention(c, hidden)
        self.norm_first = c.flag("do_layer_norm_before")
        self.act = activation(c.text("activation_function"))
        self.self_attn_layer_norm = LayerNorm(hidden, affine=affine)
        self.fc1 = Linear(hidden, width, bias=bias, group="MLP")
        self.fc2 = Linear(width, hidden, bias=bias, group="MLP")
        self.final_layer_norm = LayerNorm(hidden, affine=affine)
        self.dropout = c.probability("dropout")

    def forward(self, hidden: Tensor, mask: Tensor | None, position_ids: Tensor) -> Tensor:
        """[b, s, h] to [b, s, h]."""
        residual = hidden
        if self.norm_first:
            hidden = self.self_attn_layer_norm(hidden)
        hidden, _weights = self.self_attn(hidden, mask=mask)
        hidden = ops.dropout(hidden, self.dropout)
        hidden = ops.add(residual, hidden)
        if not self.norm_first:
            hidden = self.self_attn_layer_norm(hidden)
        shape = hidden.shape
        hidden = ops.reshape(hidden, -1, shape[-1])
        residual = hidden
        if self.norm_first:
            hidden = self.final_layer_norm(hidden)
        with hidden.tape.scoped("MLP"):
            hidden = self.fc1(hidden)
            hidden = self.act(hidden)
            hidden = self.fc2(hidden)
            hidden = ops.dropout(hidden, self.dropout)
        hidden = ops.view(ops.add(residual, hidden), *shape)
        if not self.norm_first:
            hidden = self.final_layer_norm(hidden)
        return hidden


class OPTModel(Module):
    """Token embeddings, which may be narrower than the blocks, positions that leave out padding, blocks, LayerNorm."""

    def __init__(self, c: Config) -> None:
        hidden = c.integer("hidden_size")
        self.width = c.integer("word_embed_proj_dim", hidden)
        narrow = self.width != hidden
        self.embed_tokens = Embedding(c.integer("vocab_size"), self.width)
        self.embed_positions = PositionTable(c.integer("max_position_embeddings") + 2, hidden, offset=2)
        self.project_out = Linear(hidden, self.width, group="embedding") if narrow else None
        self.project_in = Linear(self.width, hidden, group="embedding") if narrow else None
        normed = c.flag("do_layer_norm_before") and not c.flag("_remove_final_layer_norm")
        self.final_layer_norm = LayerNorm(hidden, affine=c.flag("layer_norm_elementwise_affine")) if normed else None
        self.layers = Stack(["block"] * c.integer("num_hidden_layers"), lambda _: OPTBlock(c, hidden))

    def forward(self, ids: Tensor, padding: bool, embeds: Tensor | None = None) -> Tensor:
        """Ids [b, s] to hidden states [b, s, width of the embeddings]; `embeds` [b, s, h] are used instead of `ids`."""
        tape = ids.tape
        if embeds is None:
            ids = ops.view(ids, -1, ids.shape[-1])
        inputs_embeds = self.embed_tokens(ids) if embeds is None else embeds
        past = run_context(tape).past_length
        seen = padding_input(ids) if padding else tape.empty((ids.shape[0], past + ids.shape[1]), FP32)
        position_ids = ops.cumsum(seen)
        position_ids = ops.to(ops.add_scalar(ops.mul(position_ids, seen)), INT64)
        position_ids = ops.narrow(position_ids, 1, ids.shape[1])
        mask = causal_mask(inputs_embeds, padding)
        positions = self.embed_positions(ops.add_scalar(position_ids))
        if self.project_in is not None:
            inputs_embeds = self.project_in(inputs_embeds)
        hidden = ops.add(inputs_embeds, positions)
        for layer in self.layers:
            hidden = layer(hidden, mask=mask, position_ids=position_ids)
        if self.final_layer_norm is not None:
            hidden = self.final_layer_norm(hidden)
        return hidden if self.project_out is None else self.project_out(hidden)


def opt(c: Config, architecture: str | None) -> Network:
    """OPT of every size, and Galactica."""
    model = OPTModel(c)
    return heads.decoder(c, architecture, model, model.width, model.embed_tokens, tied=c.flag("tie_word_embeddings"))


FAMILIES = table(
    Family(
        "opt",
        opt,
        sizes(
            (50272, 768, 0, 12, 12, 0, 2048),
            ffn_dim=3072,
            do_layer_norm_before=True,
            dropout=0.1,
            attention_dropout=0.0,
            activation_function="relu",
            pad_token_id=1,
            enable_bias=True,
            layer_norm_elementwise_affine=True,
            tie_word_embeddings=True,
        ),
    )
)
