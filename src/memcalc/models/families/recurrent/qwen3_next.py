"""Qwen 3 Next and the text models of Qwen 3.5: three gated delta nets to one gated attention."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from memcalc import ops
from memcalc.autograd.tensor import Tensor
from memcalc.config.reader import Config
from memcalc.models.common.decoder import dense_decoder, gated_mlp
from memcalc.models.families.moe.mixtral_qwen_olmoe import qwen_mlps, qwen_shared_mixture
from memcalc.models.family import Family, table
from memcalc.nn.layers.masks import RECURRENT
from memcalc.nn.layers.norms import GemmaRMSNorm
from memcalc.nn.layers.recurrent.gated_delta_net import DeltaShape, GatedAttention, GatedDeltaNet
from memcalc.nn.layers.rotary import RotaryEmbedding, Rotation
from memcalc.nn.model import Network
from memcalc.nn.module import Buffer, Module
from memcalc.tables.dtypes import FP32


class RotaryOfGrids(Module):
    """cos and sin from positions in time, height and width: three tables, of which one is put together."""

    scope = "rotary embedding"

    def __init__(self, dim: int) -> None:
        self.inv_freq = Buffer(dim // 2)
        self.original_inv_freq = Buffer(dim // 2)

    def forward(self, x: Tensor, position_ids: Tensor) -> Rotation:
        """The pair [b, s, dim] for positions [1, s], or [3, b, s] where images are; `x` [b, s, h] gives its dtype."""
        grids = position_ids
        if len(grids.shape) == 2:
            grids = ops.expand(ops.unsqueeze(position_ids, 0), 3, x.shape[0], -1)
        freqs = ops.mul(ops.to(ops.unsqueeze(grids, -1), FP32), self.inv_freq)
        cos = ops.mul_scalar(ops.cos(freqs))
        sin = ops.mul_scalar(ops.sin(freqs))
        sin = ops.cat((ops.select(sin, 0), ops.select(sin, 0)), -1)
        cos = ops.cat((ops.select(cos, 0), ops.select(cos, 0)), -1)
        return ops.to(cos, x.dtype), ops.to(sin, x.dtype)


def _network(
    c: Config,
    architecture: str | None,
    mlp: list[Callable[[], Module]],
    rotary: Callable[[int], Module],
    *,
    interleaved: bool,
) -> Network:
    hidden, depth, act = c.integer("hidden_size"), c.integer("num_hidden_layers"), c.text("hidden_act")
    every = c.integer("full_attention_interval", 4)
    types = c.layer_types(["full_attention" if (i + 1) % every == 0 else "linear_attention" for i in range(depth)])
    recurrent = [kind == "linear_attention" for kind in types]
    options: dict[str, Any] = {"bias": c.flag("attention_bias"), "dropout": c.probability("attention_dropout")}
    shape = DeltaShape(
        c.divides("linear_num_key_heads", "linear_num_value_heads"),
        c.integer("linear_key_head_dim"),
        c.integer("linear_num_value_heads"),
        c.integer("linear_value_head_dim"),
        c.integer("linear_conv_kernel_dim"),
    )

    def attend(layer: int) -> Module:
        if recurrent[layer]:
            return GatedDeltaNet(hidden, shape, act, interleaved=interleaved)
        return GatedAttention(hidden, *c.heads(), **options)

    return dense_decoder(
        c,
        architecture,
        windows=[RECURRENT if kind else None for kind in recurrent],
        mlp=mlp,
        make_attention=attend,
        norm=GemmaRMSNorm,
        rotary=rotary(c.rotary_dim(c.head_dim(), 0.25)),
    )


def qwen3_next(c: Config, architecture: str | None) -> Network:
    """Qwen 3 Next: experts in nearly every layer."""
    mlps = qwen_mlps(c, qwen_shared_mixture(c, normalise=c.flag("norm_topk_prob")))
    return _network(c, architecture, mlps, RotaryEmbedding, interleaved=True)


def qwen3_5_text(c: Config, architecture: str | None) -> Network:
    """The text model of Qwen 3.5."""
    return _network(c, architecture, [gated_mlp(c)] * c.integer("num_hidden_layers"), RotaryOfGrids, interleaved=False)


def qwen3_5_moe_text(c: Config, architecture: str | None) -> Network:
    """The text model of Qwen 3.5 with experts."""
    mixture = qwen_shared_mixture(c, normalise=True)
    return _network(c, architecture, [mixture] * c.integer("num_hidden_layers"), RotaryOfGrids, interleaved=False)


_DELTA: dict[str, object] = {
    "vocab_size": 248320,
    "num_attention_heads": 16,
    "hidden_act": "silu",
    "head_dim": 256,
    "attention_dropout": 0.0,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "tie_word_embeddings": False,
}
_EXPERTS: dict[str, object] = {
    "hidden_size": 2048,
    "num_key_value_heads": 2,
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
    "router_aux_loss_coef": 0.001,
}
FAMILIES = table(
    Family(
        "qwen3_next",
        qwen3_next,
        {
            **_DELTA,
            **_EXPERTS,
            "vocab_size": 151936,
            "intermediate_size": 5632,
            "num_hidden_layers": 48,
            "decoder_sparse_step": 1,
            "num_experts_per_tok": 10,
            "num_experts": 512,
            "norm_topk_prob": True,
        },
        kinds="delta net, attention, experts",
    ),
    Family(
        "qwen3_5_text",
        qwen3_5_text,
        {**_DELTA, "hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 32, "num_key_value_heads": 4},
        kinds="delta net, attention",
        verified="measured rows",
    ),
    Family(
        "qwen3_5_moe_text",
        qwen3_5_moe_text,
        {**_DELTA, **_EXPERTS, "num_hidden_layers": 40, "num_experts_per_tok": 8, "num_experts": 256},
        kinds="delta net, attention, experts",
        verified="measured rows",
    ),
)
