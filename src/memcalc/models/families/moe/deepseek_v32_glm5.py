"""DeepSeek V3.2 and GLM 5: experts and latent attention, with an indexer that chooses what each token attends to."""

from __future__ import annotations

from collections.abc import Callable

from memcalc import ops
from memcalc.autograd.tensor import Tensor
from memcalc.config.reader import Config
from memcalc.errors import ConfigError
from memcalc.models.common.decoder import dense_decoder
from memcalc.models.families.moe.deepseek import V3, layered, shared_and_routed
from memcalc.models.family import Family, table
from memcalc.nn.layers.latent_attention import rotate_interleaved
from memcalc.nn.layers.rotary import RotaryEmbedding, Rotation, apply_rotary
from memcalc.nn.layers.sparse_indexed_attention import IndexedLatentAttention, Indexer
from memcalc.nn.model import Network
from memcalc.nn.module import Module


class IndexedBlock(Module):
    """Norm, attention, add; norm, MLP, add. What the indexer chose is passed on with the hidden states."""

    scope = "residual stream"

    def __init__(self, attention: Module, mlp: Module, norm: Callable[[], Module]) -> None:
        self.self_attn = attention
        self.mlp = mlp
        self.input_layernorm = norm()
        self.post_attention_layernorm = norm()

    def forward(
        self, hidden: Tensor, rotation: Rotation, mask: Tensor, position_ids: Tensor, carried: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """[b, s, h] to [b, s, h], and indices [b, s, count]."""
        residual = hidden
        hidden = self.input_layernorm(hidden)
        hidden, _weights, chosen = self.self_attn(hidden, rotation, mask, carried)
        hidden = ops.add(residual, hidden)
        residual = hidden
        hidden = self.post_attention_layernorm(hidden)
        hidden = self.mlp(hidden)
        return ops.add(residual, hidden), chosen


def _indexers(c: Config) -> list[bool]:
    """Which layers have an indexer of their own: `indexer_types`, a pattern, or a period with an offset."""
    depth, given = c.integer("num_hidden_layers"), c.items("indexer_types")
    pattern = c.get("index_topk_pattern")
    if given is None and isinstance(pattern, str):
        given = [{"F": "full", "S": "shared"}.get(letter, letter) for letter in pattern]
    elif given is None and pattern:
        given = c.items("index_topk_pattern")
    if given is None:
        period, offset = c.integer("index_topk_freq", 1), c.integer("index_skip_topk_offset", 2, minimum=0)
        given = ["shared" if max(i - offset + 1, 0) % period else "full" for i in range(depth)]
    if len(given) != depth or given[:1] != ["full"]:
        raise ConfigError(
            f"{c.where} has {len(given)} 'indexer_types' for {depth} layers; there must be one each, the first 'full'."
        )
    return [kind != "shared" for kind in given]


def _attention(c: Config, rotate: Callable[..., tuple[Tensor, Tensor]], *, indexed: bool, alone: bool) -> Module:
    hidden, rank, rope_dim = c.integer("hidden_size"), c.integer("q_lora_rank"), c.integer("qk_rope_head_dim")
    indexer = Indexer(
        hidden,
        rank,
        c.integer("index_n_heads"),
        c.integer("index_head_dim"),
        rope_dim,
        c.integer("index_topk"),
        rotate=rotate,
    )
    return IndexedLatentAttention(
        hidden,
        c.integer("num_attention_heads"),
        q_rank=rank,
        indexer=indexer if indexed else None,
        alone=alone,
        kv_rank=c.integer("kv_lora_rank"),
        nope_dim=c.integer("qk_nope_head_dim"),
        rope_dim=rope_dim,
        value_dim=c.integer("v_head_dim"),
        bias=c.flag("attention_bias"),
        dropout=c.probability("attention_dropout"),
    )


def glm_moe_dsa(c: Config, architecture: str | None) -> Network:
    """GLM 5."""
    own = _indexers(c)
    return dense_decoder(
        c,
        architecture,
        rope_layers=own,
        make_attention=lambda layer: _attention(c, rotate_interleaved, indexed=own[layer], alone=False),
        mlp=layered(c, shared_and_routed),
        block=IndexedBlock,
        rotary=RotaryEmbedding(c.integer("qk_rope_head_dim")),
        always_masks=True,
        layers_return_state=True,
    )


def deepseek_v32(c: Config, architecture: str | None) -> Network:
    """DeepSeek V3.2: an indexer in every layer, whose rotary embedding is Llama's."""
    return dense_decoder(
        c,
        architecture,
        make_attention=lambda _: _attention(c, apply_rotary, indexed=True, alone=True),
        mlp=layered(c, shared_and_routed),
        rotary=RotaryEmbedding(c.integer("qk_rope_head_dim")),
        always_masks=True,
    )


FAMILIES = table(
    Family(
        "deepseek_v32",
        deepseek_v32,
        {**V3, "index_topk": 2048, "index_head_dim": 128, "index_n_heads": 64},
        {"num_local_experts": "n_routed_experts"},
        attention="eager, sdpa",
        kinds="decoder with latent attention, experts",
        verified="measured rows",
    ),
    Family(
        "glm_moe_dsa",
        glm_moe_dsa,
        {
            **V3,
            "vocab_size": 154880,
            "hidden_size": 6144,
            "intermediate_size": 12288,
            "num_hidden_layers": 78,
            "num_attention_heads": 64,
            "n_group": 1,
            "topk_group": 1,
            "q_lora_rank": 2048,
            "qk_nope_head_dim": 192,
            "v_head_dim": 256,
            "index_topk": 2048,
            "index_head_dim": 128,
            "index_n_heads": 32,
        },
        {"num_local_experts": "n_routed_experts"},
        attention="eager, sdpa",
        kinds="decoder with latent attention, experts",
    ),
)
