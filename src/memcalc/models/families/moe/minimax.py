"""MiniMax Text 01: lightning attention, block by block with a state between them, in most layers; experts in all."""

from __future__ import annotations

from collections.abc import Callable

from memcalc import ops
from memcalc.autograd.tensor import Tensor
from memcalc.config.reader import Config
from memcalc.models.common.decoder import dense_decoder
from memcalc.models.families.moe.mixtral_qwen_olmoe import mixtral_mixture
from memcalc.models.family import Family, llama_sizes, table
from memcalc.nn.layers.linear import Linear
from memcalc.nn.layers.masks import RECURRENT
from memcalc.nn.layers.mlp import activation
from memcalc.nn.layers.norms import RMSNorm
from memcalc.nn.layers.recurrent.ssd_scan import masked
from memcalc.nn.layers.recurrent.token_loop import token_steps
from memcalc.nn.layers.rotary import Rotation
from memcalc.nn.model import Network
from memcalc.nn.module import Buffer, Module
from memcalc.nn.run_context import run_context

STATE = "linear attention states"


class LightningAttention(Module):
    """Linear attention with a decay per head: full inside blocks of `size` tokens, a state [h, d, d] between them.

    Decays by distance are buffers, the largest [h, size, size].
    """

    scope = "attention"
    window = RECURRENT

    def __init__(self, hidden: int, heads: int, head_dim: int, size: int, act: str) -> None:
        self.heads, self.head_dim, self.size, self.act = heads, head_dim, size, activation(act)
        self.norm = RMSNorm(heads * head_dim)
        self.qkv_proj = Linear(hidden, 3 * heads * head_dim, group="attention")
        self.out_proj = Linear(heads * head_dim, hidden, group="attention")
        self.output_gate = Linear(hidden, heads * head_dim, group="attention")
        self.slope_rate = Buffer(heads, 1, 1, dtype=None)
        self.query_decay = Buffer(heads, size, 1, dtype=None)
        self.key_decay = Buffer(heads, size, 1, dtype=None)
        self.diagonal_decay = Buffer(1, heads, size, size, dtype=None)

    def forward(self, hidden: Tensor, rotation: Rotation, mask: Tensor | None) -> tuple[Tensor, Tensor]:
        """[b, s, h] to [b, s, h], and the state, which the block holds."""
        batch, length, _ = hidden.shape
        cache = run_context(hidden).cache
        qkv = self.act(self.qkv_proj(hidden))
        qkv = masked(qkv, mask)
        qkv = ops.reshape(qkv, batch, length, self.heads, 3 * self.head_dim)
        query, key, value = ops.split(qkv, [self.head_dim] * 3, 3)
        query = ops.transpose(query, 1, 2)
        key = ops.transpose(key, 1, 2)
        value = ops.transpose(value, 1, 2)
        if cache is not None and cache.has_state(self, STATE):
            out, state, _held = self._token_by_token(query, key, value, cache.get_state(self, STATE))
        else:
            out, state, _held = self._block_by_block(query, key, value)
        out = ops.reshape(ops.transpose(out, 1, 2), batch, length, -1)
        out = self.norm(out)
        out = ops.mul(ops.sigmoid(self.output_gate(hidden)), out)
        out = self.out_proj(out)
        if cache is not None:
            cache.set_state(self, STATE, state)
        return out, state

    def _block_by_block(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, list[Tensor]]:
        """Output [b, h, s, d], the last state, and what the last block leaves bound."""
        batch, heads, length, width = query.shape
        state = value.tape.empty((batch, heads, width, width), value.dtype)
        outs: list[Tensor] = []
        blocks, done = -(-length // self.size), 0
        for stands_for in token_steps(value.tape, blocks):
            done += stands_for
            count = self.size if done < blocks else length - self.size * (blocks - 1)
            q, k, v = ops.narrow(query, 2, count), ops.narrow(key, 2, count), ops.narrow(value, 2, count)
            query_decay, key_decay = ops.narrow(self.query_decay, 1, count), ops.narrow(self.key_decay, 1, count)
            diagonal = ops.narrow(ops.narrow(self.diagonal_decay, 2, count), 3, count)
            block_decay = ops.exp(ops.mul_scalar(ops.neg(self.slope_rate)))
            scores = ops.matmul(q, ops.transpose(k, -1, -2))
            inside = ops.matmul(ops.mul(scores, diagonal), v)
            between = ops.matmul(ops.mul(q, query_decay), state)
            out = ops.add(between, inside)
            outs.append(ops.as_many(out, -2, stands_for))
            new = ops.matmul(ops.transpose(ops.mul(k, key_decay), -1, -2), v)
            state = ops.add(ops.mul(state, block_decay), new)
        joined = ops.cat(outs, -2)
        return joined, state, [block_decay, scores, inside, between, out, new]

    def _token_by_token(
        self, query: Tensor, key: Tensor, value: Tensor, state: Tensor
    ) -> tuple[Tensor, Tensor, list[Tensor]]:
        ratio = ops.exp(ops.neg(self.slope_rate))
        outs: list[Tensor] = []
        for stands_for in token_steps(query.tape, query.shape[2]):
            q, k, v = ops.narrow(query, 2, 1), ops.narrow(key, 2, 1), ops.narrow(value, 2, 1)
            new = ops.matmul(ops.transpose(k, -1, -2), v)
            state = ops.add(ops.mul(ratio, state), new)
            out = ops.matmul(q, state)
            outs.append(ops.as_many(out, -2, stands_for))
        joined = ops.cat(outs, -2)
        return joined, state, [ratio, new, out]


class ScaledPostNormBlock(Module):
    """What a sublayer gives and its normed input, each multiplied by a number, are added."""

    scope = "residual stream"

    def __init__(self, attention: Module, mlp: Module, norm: Callable[[], Module]) -> None:
        self.self_attn = attention
        self.input_layernorm = norm()
        self.post_attention_layernorm = norm()
        self.mlp = mlp

    def forward(self, hidden: Tensor, rotation: Rotation, mask: Tensor | None, position_ids: Tensor) -> Tensor:
        """[b, s, h] to [b, s, h]."""
        hidden = self.input_layernorm(hidden)
        residual = hidden
        hidden, _weights = self.self_attn(hidden, rotation, mask)
        hidden = ops.add(ops.mul_scalar(residual), ops.mul_scalar(hidden))
        hidden = self.post_attention_layernorm(hidden)
        residual = hidden
        hidden = self.mlp(hidden)
        return ops.add(ops.mul_scalar(residual), ops.mul_scalar(hidden))


def minimax(c: Config, architecture: str | None) -> Network:
    """MiniMax Text 01."""
    hidden, depth = c.integer("hidden_size"), c.integer("num_hidden_layers")
    heads, _kv_heads, head_dim = c.heads()
    types = c.layer_types(["linear_attention" if i % 2 else "full_attention" for i in range(depth)])
    recurrent = [kind == "linear_attention" for kind in types]
    size, window = c.integer("block_size"), c.optional("sliding_window")

    def attend(layer: int) -> Module | None:
        return LightningAttention(hidden, heads, head_dim, size, c.text("hidden_act")) if recurrent[layer] else None

    return dense_decoder(
        c,
        architecture,
        windows=[RECURRENT if kind else window for kind in recurrent],
        make_attention=attend,
        attention={"caches_full_length": True},  # the cache goes by `layer_types`, which know no window
        mlp=mixtral_mixture(c),
        block=ScaledPostNormBlock,
        counts_no_past=recurrent[0],
    )


FAMILIES = table(
    Family(
        "minimax",
        minimax,
        llama_sizes(
            (32000, 4096, 14336, 32, 32, 8, 0),
            attention_dropout=0.0,
            num_experts_per_tok=2,
            num_local_experts=8,
            block_size=256,
            router_aux_loss_coef=0.001,
        ),
        {"num_experts": "num_local_experts"},
        kinds="linear attention, attention, experts",
    )
)
