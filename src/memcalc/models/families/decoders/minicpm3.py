"""MiniCPM 3: DeepSeek's latent attention in Llama's blocks, and numbers that multiply on the way."""

from __future__ import annotations

from functools import partial

from memcalc import ops
from memcalc.autograd.tensor import Tensor
from memcalc.config.reader import Config
from memcalc.models.common.causal_lm import CausalLM
from memcalc.models.common.decoder import dense_decoder, gated_mlp
from memcalc.models.families.moe.deepseek import latent_attention
from memcalc.models.family import Family, llama_sizes, table
from memcalc.nn.layers.decoder_blocks import DecoderBlock
from memcalc.nn.layers.linear import ScaledEmbedding
from memcalc.nn.layers.rotary import RotaryEmbedding, apply_rotary
from memcalc.nn.model import Batch, Network, Outputs
from memcalc.tables.dtypes import INT64


class DividedLM(CausalLM):
    """Hidden states are divided by a number before the head."""

    def head_and_loss(self, batch: Batch, hidden: Tensor, kept: tuple[Tensor, ...] = ()) -> Outputs:
        """Loss and logits of hidden states [b, s, h]."""
        return super().head_and_loss(batch, ops.mul_scalar(hidden), kept)


def minicpm3(c: Config, architecture: str | None) -> Network:
    """MiniCPM3-4B."""
    if c.optional("v_head_dim") is None:
        c = c.replaced(v_head_dim=c.integer("hidden_size") // c.divides("num_attention_heads", "hidden_size"))
    network = dense_decoder(
        c,
        architecture,
        make_attention=lambda _: latent_attention(c, apply_rotary),
        mlp=gated_mlp(c),
        embedding=partial(ScaledEmbedding, scale_dtype=INT64 if isinstance(c.get("scale_emb"), int) else None),
        block=partial(DecoderBlock, residual_multiplier=True),
        rotary=RotaryEmbedding(c.integer("qk_rope_head_dim")),
    )
    if isinstance(network, CausalLM):
        network.__class__ = DividedLM
    return network


FAMILIES = table(
    Family(
        "minicpm3",
        minicpm3,
        llama_sizes(
            (73448, 2560, 6400, 62, 40, 40, 32768),
            attention_dropout=0.0,
            kv_lora_rank=256,
            q_lora_rank=768,
            qk_nope_head_dim=64,
            qk_rope_head_dim=32,
            scale_emb=12,
            tie_word_embeddings=True,
        ),
        kinds="decoder with latent attention",
    )
)
