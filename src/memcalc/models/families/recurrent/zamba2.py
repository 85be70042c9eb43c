"""Zamba 2: Mamba 2 layers, and before some of them an attention block whose weights several layers share."""

from __future__ import annotations

from memcalc import ops
from memcalc.autograd.checkpointing import checkpointed, refuse_keywords
from memcalc.autograd.tensor import Tensor
from memcalc.common.escaping import quoted
from memcalc.config.reader import Config
from memcalc.errors import ConfigError
from memcalc.models.common.heads import decoder
from memcalc.models.family import Family, table
from memcalc.nn.layers.linear import Embedding, Linear
from memcalc.nn.layers.masks import causal_mask, recurrent_mask
from memcalc.nn.layers.norms import RMSNorm
from memcalc.nn.layers.recurrent.mamba2 import GatedRMSNorm, Mamba2Mixer, Mamba2Shape
from memcalc.nn.layers.recurrent.zamba_shared_block import SharedAttention, SharedBlock, SharedMLP
from memcalc.nn.layers.rotary import RotaryEmbedding, Rotation
from memcalc.nn.model import Network, positions
from memcalc.nn.module import Module, tie
from memcalc.nn.run_context import run_context
from memcalc.nn.stack import Stack


class MambaLayer(Module):
    """Norm and Mamba 2 mixer; what a shared block made is added in front of the norm."""

    scope = "residual stream"

    def __init__(self, mixer: Module, hidden: int) -> None:
        self.mamba = mixer
        self.input_layernorm = RMSNorm(hidden)

    def forward(
        self,
        hidden: Tensor,
        original: Tensor | None = None,
        mask: Tensor | None = None,
        causal: Tensor | None = None,
        *,
        rotation: Rotation | None = None,
        position_ids: Tensor | None = None,
        added: Tensor | None = None,
    ) -> Tensor:
        """[b, s, h] to [b, s, h]."""
        residual = hidden
        hidden = hidden if added is None else ops.add(hidden, added)
        hidden = self.input_layernorm(hidden)
        hidden, _weights = self.mamba(hidden, None, mask)
        return ops.add(residual, hidden)


class HybridLayer(Module):
    """A shared block and a projection of its own, then a Mamba layer that takes their result in."""

    scope = "residual stream"

    def __init__(self, shared: Module, mamba: Module, hidden: int) -> None:
        self.linear = Linear(hidden, hidden, group="attention")
        self.mamba_decoder = mamba
        self.shared_transformer = shared

    def forward(
        self,
        hidden: Tensor,
        original: Tensor,
        mask: Tensor | None,
        causal: Tensor | None,
        *,
        rotation: Rotation | None,
        position_ids: Tensor,
    ) -> Tensor:
        """[b, s, h] to [b, s, h]."""
        added = self.shared_transformer(hidden, original=original, mask=causal, rotation=rotation)
        added = self.linear(added)
        tape = hidden.tape
        if tape.checkpoint is not None:  # the layer inside is checkpointed too
            out: Tensor = checkpointed(tape, self.mamba_decoder, hidden, mask=mask, added=added)
            return out
        if run_context(tape).checkpointing and run_context(tape).reentrant and not self.skips_checkpointing:
            refuse_keywords([added])
        return self.mamba_decoder(hidden, mask=mask, added=added)  # type: ignore[no-any-return]


class Zamba2Model(Module):
    """Embedding, a stack of layers that all get a copy of the embeddings, and a final norm."""

    def __init__(self, embedding: Module, layers: Stack, norm: Module, rotary: Module | None) -> None:
        self.embed_tokens = embedding
        self.layers = layers
        self.final_layernorm = norm
        self.rotary_emb = rotary

    def forward(self, ids: Tensor, padding: bool) -> Tensor:
        """Ids [b, s] to hidden states [b, s, h]."""
        inputs_embeds = self.embed_tokens(ids)
        hidden = inputs_embeds
        original = ops.clone(inputs_embeds)
        position_ids = positions(ids.tape, ids.shape[1])
        causal = causal_mask(inputs_embeds, padding)
        recurrent = recurrent_mask(ids, padding)
        rotation = None if self.rotary_emb is None else self.rotary_emb(hidden, position_ids)
        for layer in self.layers:
            hidden = layer(hidden, original, recurrent, causal, rotation=rotation, position_ids=position_ids)
        return self.final_layernorm(hidden)  # type: ignore[no-any-return]


_KINDS = ("linear_attention", "hybrid")


def _layer_kinds(c: Config) -> list[str]:
    """Kind of each layer, of which the config calls the first ones `mamba` or `linear_attention`."""
    given = c.items("layers_block_type")
    if given is None:
        attends = {*range(6, 48, 6), 47, 51}
        given = ["hybrid" if layer in attends else "mamba" for layer in range(54)]
    kinds = ["linear_attention" if kind == "mamba" else str(kind) for kind in given]
    depth = c.integer("num_hidden_layers")
    if len(kinds) != depth:
        raise ConfigError(
            f"{c.where} has {len(kinds)} 'layers_block_type' but {depth} 'num_hidden_layers'; they must agree."
        )
    for kind in kinds:
        if kind not in _KINDS:
            raise ConfigError(
                f"{c.where} has {quoted(kind)} in 'layers_block_type'; this family has {' and '.join(_KINDS)}."
            )
    return kinds


def _mixer(c: Config) -> Mamba2Mixer:
    hidden, heads, bias = c.integer("hidden_size"), c.integer("n_mamba_heads"), c.flag("add_bias_linear")
    inner = int(c.factor("mamba_expand") * hidden)
    if inner % heads:
        raise ConfigError(
            f"{c.where} has {inner} inner states ('mamba_expand' times 'hidden_size'), which 'n_mamba_heads' {heads} "
            "does not divide; correct one."
        )
    shape = Mamba2Shape(
        heads,
        inner // heads,
        c.integer("mamba_d_state"),
        c.divides("mamba_ngroups", "n_mamba_heads"),
        c.integer("chunk_size"),
        c.integer("mamba_d_conv"),
    )
    return Mamba2Mixer(hidden, shape, "silu", GatedRMSNorm(inner, shape.groups), bias=bias, out_bias=bias)


def _shared_block(c: Config, uses: list[int], use: int) -> SharedBlock:
    """The block in front of layer `use`, one of the layers `uses` that share its weights."""
    hidden, rank, adapters = c.integer("hidden_size"), c.integer("adapter_rank"), c.flag("use_shared_attention_adapter")
    heads = c.integer("num_attention_heads")
    kv_heads = c.integer("num_key_value_heads", heads)
    if 2 * hidden % heads or heads % kv_heads:
        raise ConfigError(
            f"{c.where} has 'num_attention_heads' {heads}, which must divide twice the 'hidden_size' {hidden} and be a "
            f"multiple of 'num_key_value_heads' {kv_heads}; correct one."
        )
    if adapters and kv_heads != heads:
        raise ConfigError(
            f"{c.where} has 'use_shared_attention_adapter', whose adapters are as wide as all "
            f"'num_attention_heads' {heads}, but {kv_heads} 'num_key_value_heads'; they must agree."
        )
    attention = SharedAttention(
        hidden,
        heads,
        kv_heads,
        rank=rank,
        uses=uses if adapters else [],
        use=use,
        rotary=c.flag("use_mem_rope"),
        dropout=c.probability("attention_dropout"),
    )
    mlp = SharedMLP(
        hidden,
        c.integer("intermediate_size", 4 * hidden),
        c.text("hidden_act"),
        bias=c.flag("add_bias_linear"),
        rank=rank,
        uses=uses,
        use=use,
    )
    return SharedBlock(attention, mlp, hidden)


def zamba2(c: Config, architecture: str | None) -> Network:
    """Zamba 2 in every size, without the `mamba_ssm` kernels."""
    hidden, kinds, cycle = c.integer("hidden_size"), _layer_kinds(c), c.integer("num_mem_blocks")
    hybrids = [layer for layer, kind in enumerate(kinds) if kind == "hybrid"]
    first: dict[int, SharedBlock] = {}
    tied = c.flag("tie_word_embeddings")  # without, Transformers ties no weights at all, those of shared blocks neither

    def build(layer: int) -> Module:
        mamba = MambaLayer(_mixer(c), hidden)
        if layer not in hybrids:
            return mamba
        uses = hybrids[hybrids.index(layer) % cycle :: cycle]
        shared = _shared_block(c, uses, layer)
        if layer == uses[0]:
            first[layer] = shared
        elif tied:
            tie(shared, first[uses[0]])
        return HybridLayer(shared, mamba, hidden)

    embedding = Embedding(c.integer("vocab_size"), hidden)
    rotary = RotaryEmbedding(2 * hidden // c.integer("num_attention_heads")) if c.flag("use_mem_rope") else None
    layers = Stack([layer if kind == "hybrid" else kind for layer, kind in enumerate(kinds)], build)
    model = Zamba2Model(embedding, layers, RMSNorm(hidden), rotary)
    return decoder(c, architecture, model, hidden, embedding, tied=tied)


FAMILIES = table(
    Family(
        "zamba2",
        zamba2,
        {
            "vocab_size": 32000,
            "hidden_size": 2560,
            "num_hidden_layers": 54,
            "mamba_d_state": 64,
            "mamba_d_conv": 4,
            "mamba_expand": 2,
            "mamba_ngroups": 1,
            "n_mamba_heads": 8,
            "chunk_size": 256,
            "add_bias_linear": False,
            "hidden_act": "gelu",
            "num_attention_heads": 32,
            "attention_dropout": 0.0,
            "num_mem_blocks": 1,
            "adapter_rank": 128,
            "pad_token_id": 0,
            "tie_word_embeddings": True,
        },
        {"layer_types": "layers_block_type"},
        kinds="Mamba 2, shared attention",
    )
)
