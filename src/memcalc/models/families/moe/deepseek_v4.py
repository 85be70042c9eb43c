"""DeepSeek-V4: hyper-connections, compressed attention, and experts of which the first layers' are chosen by token."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from memcalc import ops
from memcalc.autograd.tensor import Tensor
from memcalc.common.escaping import quoted
from memcalc.config.reader import Config
from memcalc.errors import ConfigError
from memcalc.models.common import heads
from memcalc.models.family import Family, llama_sizes, table
from memcalc.nn.layers.compressed_attention import CompressedAttention
from memcalc.nn.layers.compressors import HeavyCompressor, Indexer, SparseCompressor, TwoRotaryEmbeddings
from memcalc.nn.layers.hyper_connections import Fp32RMSNorm, HyperConnection, HyperHead, mixed_back
from memcalc.nn.layers.linear import Embedding, Linear
from memcalc.nn.layers.masks import causal_mask
from memcalc.nn.layers.mixture_of_experts import Experts
from memcalc.nn.layers.mlp import activation
from memcalc.nn.layers.rotary import Rotation
from memcalc.nn.layers.routers import Router, Routing
from memcalc.nn.model import Network, positions
from memcalc.nn.module import Buffer, Module, Parameter
from memcalc.nn.run_context import run_context
from memcalc.nn.stack import Stack
from memcalc.tables.dtypes import INT64

SPARSE, HEAVY, SLIDING = "compressed_sparse_attention", "heavily_compressed_attention", "sliding_attention"


def limited_swiglu(act: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """SwiGLU of halves that are kept within bounds."""

    def gate(gate_up: Tensor) -> Tensor:
        gate, up = ops.chunk(gate_up, 2, -1)
        gate = ops.clamp(gate, 1)
        up = ops.clamp(up)
        return ops.mul(act(gate), up)

    return gate


class LimitedMLP(Module):
    """SwiGLU of projections that are kept within bounds (`swiglu_limit`)."""

    scope = "MLP"

    def __init__(self, hidden: int, width: int, act: str) -> None:
        self.gate_proj = Linear(hidden, width, group="MLP")
        self.up_proj = Linear(hidden, width, group="MLP")
        self.down_proj = Linear(width, hidden, group="MLP")
        self.act = activation(act)

    def forward(self, x: Tensor) -> Tensor:
        """[b, s, h] to [b, s, h]."""
        gate = ops.clamp(self.gate_proj(x), 1)
        up = ops.clamp(self.up_proj(x))
        return self.down_proj(ops.mul(self.act(gate), up))


class ScoreRouter(Router):
    """Scores of all experts; the best are chosen with a correction, or by the token itself (`by_token`)."""

    def __init__(self, c: Config, *, by_token: bool) -> None:
        count = c.integer("n_routed_experts")
        self.per_token = c.within("num_experts_per_tok", "n_routed_experts")
        self.score, self.by_token = activation(c.text("scoring_func")), by_token
        self.weight = Parameter(count, c.integer("hidden_size"), group="experts")
        if by_token:
            self.tid2eid = Buffer(c.integer("vocab_size"), self.per_token, dtype=INT64, group="experts")
        else:
            self.e_score_correction_bias = Buffer(count, group="experts")

    def forward(self, hidden: Tensor, ids: Tensor) -> Routing:
        """States [b, s, h] and ids [b, s] to the routing of tokens."""
        flat = ops.view(hidden, -1, hidden.shape[-1])
        logits = ops.linear(flat, self.weight)
        scores = self.score(logits)
        if self.by_token:
            tokens = ops.view(ids, -1)
            indices = hidden.tape.empty((tokens.shape[0], self.per_token), INT64)
        else:
            indices = ops.topk(ops.add(scores, self.e_score_correction_bias), self.per_token)[1]
        weights = ops.gather(scores, indices)
        weights = ops.div(weights, ops.add_scalar(ops.sum(weights, keepdim=True)))
        return logits, ops.mul_scalar(weights), indices


class Mixture(Module):
    """A router, experts, and a shared MLP."""

    scope = "experts"

    def __init__(self, c: Config, *, by_token: bool) -> None:
        hidden, width, act = c.integer("hidden_size"), c.integer("moe_intermediate_size"), c.text("hidden_act")
        self.gate = ScoreRouter(c, by_token=by_token)
        count, per_token = c.integer("n_routed_experts"), self.gate.per_token
        self.experts = Experts(hidden, width, count, per_token, limited_swiglu(activation(act)))
        self.shared_experts = LimitedMLP(hidden, width, act)

    def forward(self, hidden: Tensor, ids: Tensor) -> Tensor:
        """[b, s, h] to [b, s, h]."""
        flat = ops.view(hidden, -1, hidden.shape[-1])
        _logits, weights, indices = self.gate(hidden, ids)
        routed = ops.view(self.experts(flat, weights, indices), *hidden.shape)
        return ops.add(routed, self.shared_experts(hidden))


class V4Block(Module):
    """Attention and experts, each between the mixing of the residual streams."""

    scope = "residual stream"

    def __init__(self, c: Config, attention: CompressedAttention, *, by_token: bool) -> None:
        hidden = c.integer("hidden_size")
        connection = partial(HyperConnection, hidden, c.integer("hc_mult"), c.integer("hc_sinkhorn_iters"))
        self.self_attn = attention
        self.mlp = Mixture(c, by_token=by_token)
        self.input_layernorm = Fp32RMSNorm(hidden)
        self.post_attention_layernorm = Fp32RMSNorm(hidden)
        self.attn_hc, self.ffn_hc = connection(), connection()

    def forward(
        self,
        states: Tensor,
        rotation: tuple[Rotation, Rotation],
        mask: Tensor | None,
        position_ids: Tensor,
        ids: Tensor,
    ) -> Tensor:
        """Streams [b, s, n, h] to [b, s, n, h]."""
        post, comb, collapsed = self.attn_hc(states)
        attended, _weights = self.self_attn(self.input_layernorm(collapsed), rotation, mask, position_ids)
        states = mixed_back(post, comb, attended, states)
        post, comb, collapsed = self.ffn_hc(states)
        fed = self.mlp(self.post_attention_layernorm(collapsed), ids)
        return mixed_back(post, comb, fed, states)


class V4Model(Module):
    """Embedding, streams, blocks, and the streams together again."""

    def __init__(self, c: Config, embedding: Embedding, layers: Stack) -> None:
        hidden = c.integer("hidden_size")
        self.embed_tokens = embedding
        self.layers = layers
        self.norm = Fp32RMSNorm(hidden)
        self.rotary_emb = TwoRotaryEmbeddings(_rope_dim(c))
        self.hc_head = HyperHead(hidden, c.integer("hc_mult"))
        self.streams, self.window = c.integer("hc_mult"), c.integer("sliding_window")

    def forward(self, ids: Tensor, padding: bool) -> Tensor:
        """Ids [b, s] to hidden states [b, s, h]."""
        embeds = self.embed_tokens(ids)
        if (cache := run_context(ids).cache) is not None:
            for block in self.layers.blocks:
                cache.register_layer(vars(block)["self_attn"], self.window, block.copies, embeds)
        position_ids = positions(ids.tape, ids.shape[1])
        mask = causal_mask(embeds, padding, self.window)
        wide = ops.expand(ops.unsqueeze(embeds, 2), *embeds.shape[:2], self.streams, embeds.shape[-1])
        states = ops.contiguous(wide)
        rotation = self.rotary_emb(embeds, position_ids), self.rotary_emb(embeds, position_ids)
        for layer in self.layers:
            states = layer(states, rotation=rotation, mask=mask, position_ids=position_ids, ids=ids)
        return self.norm(self.hc_head(states))


def _rope_dim(c: Config) -> int:
    """How many elements of a head are rotated."""
    if (given := c.optional("qk_rope_head_dim")) is not None:
        return given
    return int(c.head_dim() * c.number("partial_rotary_factor"))


def _layer_types(c: Config) -> list[str]:
    """`layer_types`, or what the older `compress_ratios` mean, or the usual interleaving."""
    depth, ratios = c.integer("num_hidden_layers"), c.items("compress_ratios")
    usual = [HEAVY] * min(depth, 2) + [SPARSE if i % 2 else HEAVY for i in range(max(depth - 2, 0))]
    if c.items("layer_types") is None and ratios is not None:
        usual = [{0: SLIDING, 4: SPARSE, 128: HEAVY}.get(int(str(ratio)), str(ratio)) for ratio in ratios][:depth]
    types = c.layer_types(usual)
    if len(types) != depth or not set(types) <= {SPARSE, HEAVY, SLIDING}:
        wrong = sorted(set(types) - {SPARSE, HEAVY, SLIDING})
        named = f", among them {quoted(wrong[0])}" if wrong else ""
        raise ConfigError(
            f"{c.where} has {len(types)} layers' types for {depth} layers{named}; one of {SPARSE!r}, {HEAVY!r} and "
            f"{SLIDING!r} is wanted for each."
        )
    return types


def _by_token(c: Config) -> list[bool]:
    """Which layers' experts are chosen by the token."""
    depth, given = c.integer("num_hidden_layers"), c.items("mlp_layer_types")
    if given is None:
        return [layer < c.integer("num_hash_layers", 3, minimum=0) for layer in range(depth)]
    if len(given) != depth:
        raise ConfigError(f"{c.where} has {len(given)} 'mlp_layer_types' for {depth} layers; they must agree.")
    return [kind == "hash_moe" for kind in given]


def _attention(c: Config, kind: str) -> CompressedAttention:
    hidden, head_dim, rope_dim, rank = c.integer("hidden_size"), c.head_dim(), _rope_dim(c), c.integer("q_lora_rank")
    rates = c.section("compress_rates")
    sparse_rate, heavy_rate = int(str(rates.get(SPARSE, 4))), int(str(rates.get(HEAVY, 128)))
    compressor: Module | None = None
    if kind == SPARSE:
        indexed = c.integer("index_n_heads"), c.integer("index_head_dim")
        indexer = Indexer(hidden, rank, *indexed, rope_dim, sparse_rate, c.integer("index_topk"))
        compressor = SparseCompressor(hidden, head_dim, rope_dim, sparse_rate, indexer)
    elif kind == HEAVY:
        compressor = HeavyCompressor(hidden, head_dim, rope_dim, heavy_rate, overlaps=False)
    return CompressedAttention(
        hidden,
        c.integer("num_attention_heads"),
        head_dim,
        q_rank=rank,
        groups=c.divides("o_groups", "num_attention_heads"),
        rank=c.integer("o_lora_rank"),
        window=c.integer("sliding_window"),
        dropout=c.probability("attention_dropout"),
        compressor=compressor,
    )


def deepseek_v4(c: Config, architecture: str | None) -> Network:
    """DeepSeek-V4 Flash and Pro."""
    hidden = c.integer("hidden_size")
    types, by_token = _layer_types(c), _by_token(c)
    embedding = Embedding(c.integer("vocab_size"), hidden)
    layers = Stack(
        list(zip(types, by_token, strict=True)),
        lambda layer: V4Block(c, _attention(c, types[layer]), by_token=by_token[layer]),
    )
    model = V4Model(c, embedding, layers)
    return heads.decoder(c, architecture, model, hidden, embedding, tied=c.flag("tie_word_embeddings"))


FAMILIES = table(
    Family(
        "deepseek_v4",
        deepseek_v4,
        llama_sizes(
            (129280, 4096, 0, 43, 64, 1, 1048576),
            head_dim=512,
            moe_intermediate_size=2048,
            q_lora_rank=1024,
            partial_rotary_factor=0.125,
            num_experts_per_tok=6,
            n_routed_experts=256,
            scoring_func="sqrtsoftplus",
            hc_mult=4,
            hc_sinkhorn_iters=20,
            sliding_window=128,
            o_groups=8,
            o_lora_rank=1024,
            index_n_heads=64,
            index_head_dim=128,
            index_topk=512,
            attention_dropout=0.0,
        ),
        {"num_local_experts": "n_routed_experts", "intermediate_size": "moe_intermediate_size"},
        attention="eager",
        kinds="decoder with compressed attention, experts",
    )
)
