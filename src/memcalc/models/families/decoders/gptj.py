"""GPT-J and CodeGen: attention and MLP side by side from one LayerNorm, neighbours of each head rotated together."""

from __future__ import annotations

from functools import partial

from memcalc import ops
from memcalc.autograd.tensor import Tensor
from memcalc.config.reader import Config
from memcalc.errors import ConfigError
from memcalc.models.common.decoder import dense_decoder
from memcalc.models.families.decoders.gpt_neox_phi import PhiBlock
from memcalc.models.family import Family, sizes, table
from memcalc.nn.layers.attention_backends import sdpa
from memcalc.nn.layers.linear import Linear, check_length
from memcalc.nn.layers.mlp import PlainMLP
from memcalc.nn.layers.norms import LayerNorm
from memcalc.nn.layers.rotary import Rotation, sliced, spread
from memcalc.nn.model import Network
from memcalc.nn.module import Buffer, Module
from memcalc.nn.run_context import run_context
from memcalc.tables.dtypes import FP32


class SinusoidTable(Module):
    """sin and cos [1, s, dim / 2] out of a table that is a buffer, in fp32 or cast to the hidden states' dtype."""

    scope = "rotary embedding"

    def __init__(self, count: int, dim: int, *, fp32: bool) -> None:
        self.embed_positions = Buffer(count, dim)
        self.fp32 = fp32

    def forward(self, x: Tensor, position_ids: Tensor) -> Rotation:
        """The pair for `position_ids`; `x` only gives its dtype."""
        check_length(position_ids, self.embed_positions.shape[0])
        pair = ops.index_select(self.embed_positions, position_ids)
        if not self.fp32:
            pair = ops.to(pair, x.dtype)
        sin, cos = ops.chunk(pair, 2, -1)
        return sin, cos


def _rotated(x: Tensor, sin: Tensor, cos: Tensor) -> Tensor:
    """x [b, s, heads, dim] rotated; each call spreads sin and cos anew."""
    sin = spread(ops.unsqueeze(sin, 2))
    cos = spread(ops.unsqueeze(cos, 2))
    return ops.add(ops.mul(x, cos), ops.mul(_every_two(x), sin))


def _every_two(x: Tensor) -> Tensor:
    first, second = ops.slice(x, -1, 2), ops.slice(x, -1, 2)
    x = ops.stack((ops.neg(second), first), -1)
    return ops.view(x, *x.shape[:-2], -1)


class PairwiseAttention(Module):
    """Attention with rotated pairs. CodeGen has one projection, interleaved over the four shards of its training."""

    scope = "attention"
    window = None

    def __init__(self, c: Config, *, fused: bool) -> None:
        hidden = c.integer("hidden_size")
        self.heads, _, self.head_dim = c.heads()
        self.rotary_dim, self.fused = c.integer("rotary_dim"), fused
        if fused:
            if hidden % 4:
                raise ConfigError(f"{c.where} has 'n_embd' {hidden}, which four must divide; correct it.")
            self.out_proj = Linear(hidden, hidden, group="attention")
            self.qkv_proj = Linear(hidden, 3 * hidden, group="attention")
        else:
            self.k_proj = Linear(hidden, hidden, group="attention")
            self.v_proj = Linear(hidden, hidden, group="attention")
            self.q_proj = Linear(hidden, hidden, group="attention")
            self.out_proj = Linear(hidden, hidden, group="attention")
        self.attn_dropout, self.resid_dropout = c.probability("attn_pdrop"), c.probability("resid_pdrop")

    def _split(self, x: Tensor, lead: tuple[int, ...]) -> Tensor:
        return ops.reshape(x, *lead, -1, self.head_dim)

    def forward(self, hidden: Tensor, rotation: Rotation, mask: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """[b, s, h] to [b, s, h], and the probabilities where they exist."""
        lead = hidden.shape[:-1]
        if self.fused:
            shard = hidden.shape[-1] // 4
            qkv = ops.view(self.qkv_proj(hidden), *lead, -1, 3 * shard)
            query, value, key = ops.split(qkv, [shard] * 3, -1)
            query = self._split(query, lead)
            key = self._split(key, lead)
            value = ops.transpose(self._split(value, lead), 1, 2)
        else:
            query = self._split(self.q_proj(hidden), lead)
            key = self._split(self.k_proj(hidden), lead)
            value = ops.transpose(self._split(self.v_proj(hidden), lead), 1, 2)
        key_rot, key_pass = sliced(key, self.rotary_dim)
        query_rot, query_pass = sliced(query, self.rotary_dim)
        key_rot = _rotated(key_rot, *rotation)
        query_rot = _rotated(query_rot, *rotation)
        key = ops.cat((key_rot, key_pass), -1)
        query = ops.cat((query_rot, query_pass), -1)
        query = ops.transpose(query, 1, 2)
        if self.fused:
            query = ops.to(query, value.dtype)
        key = ops.transpose(key, 1, 2)
        if self.fused:
            key = ops.to(key, value.dtype)
        if (cache := run_context(query).cache) is not None:
            key, value = cache.update(self, key, value)
        out, weights = _attend(query, key, value, mask, self.attn_dropout)
        out = ops.contiguous(ops.reshape(out, *lead, -1))
        out = self.out_proj(out)
        return ops.dropout(out, self.resid_dropout), weights


def _attend(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, dropout: float
) -> tuple[Tensor, Tensor | None]:
    """Eager scores come from fp32 copies of query and key."""
    if run_context(query).attention != "eager":
        return sdpa(query, key, value, mask, 1, dropout), None
    weights = ops.mul_scalar(ops.matmul(ops.to(query, FP32), ops.transpose(ops.to(key, FP32), 2, 3)))
    if mask is not None:
        weights = ops.add(weights, mask)
    weights = ops.to(ops.softmax(weights), value.dtype)
    weights = ops.dropout(weights, dropout)
    out = ops.matmul(weights, value)
    return ops.contiguous(ops.transpose(out, 1, 2)), weights


def _family(name: str, *, fused: bool) -> Family:
    def build(c: Config, architecture: str | None) -> Network:
        hidden = c.integer("hidden_size")

        def mlp() -> Module:
            return PlainMLP(
                hidden,
                c.integer("n_inner", 4 * hidden),
                c.text("activation_function"),
                names=("fc_in", "fc_out"),
                bias=True,
                dropout=c.probability("resid_pdrop"),
            )

        return dense_decoder(
            c,
            architecture,
            make_attention=lambda _: PairwiseAttention(c, fused=fused),
            mlp=mlp,
            norm=LayerNorm,
            block=partial(PhiBlock, dropout=0.0),
            rotary=SinusoidTable(c.integer("max_position_embeddings"), c.integer("rotary_dim"), fp32=fused),
            dropout=c.probability("embd_pdrop"),
            head_bias=True,
        )

    return Family(
        name,
        build,
        sizes(
            (50400, 4096, 0, 28, 16, 0, 2048),
            rotary_dim=64,
            activation_function="gelu_new",
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
            tie_word_embeddings=False,
        ),
        {
            "n_embd": "hidden_size",
            "n_positions": "max_position_embeddings",
            "n_head": "num_attention_heads",
            "n_layer": "num_hidden_layers",
        },
        verified="measured rows",
    )


FAMILIES = table(_family("gptj", fused=False), _family("codegen", fused=True))
