"""RecurrentGemma (Griffin): recurrent blocks, and local attention in every few of them."""

from __future__ import annotations

from typing import Any

from memcalc import ops
from memcalc.autograd.tensor import Tensor
from memcalc.common.escaping import quoted
from memcalc.config.reader import Config
from memcalc.errors import ConfigError
from memcalc.models.common.heads import decoder
from memcalc.models.family import Family, sizes, table
from memcalc.nn.layers.grouped_query_attention import GroupedQueryAttention
from memcalc.nn.layers.linear import Embedding, Linear
from memcalc.nn.layers.masks import causal_mask
from memcalc.nn.layers.mlp import activation
from memcalc.nn.layers.norms import GemmaRMSNorm
from memcalc.nn.layers.recurrent.rg_lru import RecurrentBlock
from memcalc.nn.layers.rotary import RotaryEmbedding, rotary_of_part
from memcalc.nn.model import Network, positions
from memcalc.nn.module import Buffer, Module
from memcalc.nn.run_context import run_context
from memcalc.nn.stack import Stack
from memcalc.tables.dtypes import BF16


class LocalAttention(GroupedQueryAttention):
    """Grouped-query attention with a sliding window, with its own rotary table of `rotary_dim` elements a head."""

    def __init__(self, rotary_dim: int, hidden: int, *heads: int, **options: Any) -> None:
        super().__init__(hidden, *heads, **options)
        self.rotary_emb = RotaryEmbedding(rotary_dim)
        self.rotate = self._turn  # type: ignore[assignment]  # of positions

    def _turn(self, query: Tensor, key: Tensor, position_ids: Tensor) -> tuple[Tensor, ...]:
        cos, sin = self.rotary_emb(key, position_ids)
        return (*rotary_of_part(query, key, cos, sin), cos, sin)

    def forward(  # type: ignore[override]
        self, hidden: Tensor, position_ids: Tensor, mask: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """[b, s, h] to [b, s, h], and the probabilities where they exist."""
        return super().forward(hidden, (position_ids,), mask)  # type: ignore[arg-type]


class PlainGatedMLP(Module):
    """down(act(gate(x)) * up(x)) with biases, the activated gate bound to a name."""

    scope = "MLP"

    def __init__(self, hidden: int, width: int, act: str) -> None:
        self.gate_proj = Linear(hidden, width, bias=True, group="MLP")
        self.up_proj = Linear(hidden, width, bias=True, group="MLP")
        self.down_proj = Linear(width, hidden, bias=True, group="MLP")
        self.act = activation(act)

    def forward(self, x: Tensor) -> Tensor:
        """[b, s, h] to [b, s, h]."""
        gate = self.act(self.gate_proj(x))
        return self.down_proj(ops.mul(gate, self.up_proj(x)))


class GriffinBlock(Module):
    """A norm and a block that mixes tokens, a norm and an MLP, each added to the residual stream."""

    scope = "residual stream"

    def __init__(self, mixer: Module, mlp: Module, hidden: int) -> None:
        self.temporal_pre_norm = GemmaRMSNorm(hidden)
        self.temporal_block = mixer
        self.channel_pre_norm = GemmaRMSNorm(hidden)
        self.mlp_block = mlp

    def forward(self, raw: Tensor, position_ids: Tensor, mask: Tensor | None) -> Tensor:
        """[b, s, h] to [b, s, h]."""
        normalised = self.temporal_pre_norm(raw)
        hidden, _weights = self.temporal_block(normalised, position_ids, mask)
        residual = ops.add(hidden, raw)
        hidden = self.channel_pre_norm(residual)
        hidden = self.mlp_block(hidden)
        return ops.add(hidden, residual)


class RecurrentGemmaModel(Module):
    """Embedding times a number kept as a buffer, blocks, and a final norm."""

    def __init__(self, embed_tokens: Module, layers: Stack, norm: Module, window: int) -> None:
        self.embed_tokens = embed_tokens
        self.layers = layers
        self.final_norm = norm
        self.normalizer = Buffer(dtype=BF16)
        self.window = window

    def forward(self, ids: Tensor, padding: bool) -> Tensor:
        """Ids [b, s] to hidden states [b, s, h]."""
        embeds = self.embed_tokens(ids)
        hidden = embeds
        if (cache := run_context(ids).cache) is not None:
            for block in self.layers.blocks:
                mixer = vars(block)["temporal_block"]
                if mixer.window == self.window:
                    cache.register_layer(mixer, self.window, block.copies, embeds)
        position_ids = positions(ids.tape, ids.shape[1])
        mask = causal_mask(embeds, padding, self.window)
        hidden = ops.mul(hidden, ops.to(self.normalizer, hidden.dtype))
        for layer in self.layers:
            hidden = layer(hidden, position_ids, mask)
        return self.final_norm(hidden)  # type: ignore[no-any-return]


def _soft_cap(logits: Tensor) -> Tensor:
    """Logits divided by a number, through tanh, and multiplied by it, while the logits themselves stay."""
    return ops.mul_scalar(ops.tanh(ops.mul_scalar(logits)))


_KINDS = ("recurrent", "attention")


def _kinds(c: Config) -> list[str]:
    """What the layers are: `block_types`, again and again."""
    cycle = [str(kind) for kind in c.items("block_types") or []]
    for kind in cycle or ["nothing"]:
        if kind not in _KINDS:
            raise ConfigError(
                f"{c.where} has {quoted(kind)} among its 'block_types'; this family has {' and '.join(_KINDS)}."
            )
    depth = c.integer("num_hidden_layers")
    return [cycle[layer % len(cycle)] for layer in range(depth)]


def recurrent_gemma(c: Config, architecture: str | None) -> Network:
    """RecurrentGemma in every size."""
    hidden, heads, kinds = c.integer("hidden_size"), c.integer("num_attention_heads"), _kinds(c)
    act, window = c.text("hidden_activation"), c.integer("attention_window_size")
    width = c.integer("lru_width", hidden)
    if width % heads:
        raise ConfigError(
            f"{c.where} has 'lru_width' {width}, which 'num_attention_heads' {heads} does not divide; correct one."
        )
    _heads, kv_heads, _ = c.heads()
    head_dim = hidden // heads

    def build(layer: int) -> Module:
        if kinds[layer] == "recurrent":
            mixer: Module = RecurrentBlock(hidden, width, heads, c.integer("conv1d_width"), act)
        else:
            mixer = LocalAttention(
                c.rotary_dim(head_dim, 0.5),
                hidden,
                heads,
                kv_heads,
                head_dim,
                bias=c.flag("attention_bias"),
                out_bias=True,
                window=window,
                dropout=c.probability("attention_dropout"),
            )
        return GriffinBlock(mixer, PlainGatedMLP(hidden, c.integer("intermediate_size", minimum=2) // 2, act), hidden)

    embedding = Embedding(c.integer("vocab_size"), hidden)
    model = RecurrentGemmaModel(embedding, Stack(kinds, build), GemmaRMSNorm(hidden), window)
    tied = c.flag("tie_word_embeddings")
    return decoder(c, architecture, model, hidden, embedding, tied=tied, logit_transforms=[_soft_cap])


FAMILIES = table(
    Family(
        "recurrent_gemma",
        recurrent_gemma,
        sizes(
            (256000, 2560, 7680, 26, 10, 0, 0),
            attention_window_size=2048,
            conv1d_width=4,
            hidden_activation="gelu_pytorch_tanh",
            block_types=["recurrent", "recurrent", "attention"],
            attention_dropout=0.0,
            pad_token_id=0,
            tie_word_embeddings=True,
        ),
        {"sliding_window": "attention_window_size"},
        kinds="recurrent, attention",
    )
)
