"""Megatron-Core's GPTModel with the sizes of a decoder: one rank's share of its weights, and its forward.

Source: megatron/core/models/gpt/gpt_model.py and models/common/embeddings of Megatron-Core 0.16.
"""

from __future__ import annotations

from memcalc import ops
from memcalc.autograd.tape import OVERHEAD
from memcalc.autograd.tensor import Tensor
from memcalc.common.sizes import Shape
from memcalc.errors import UsageError
from memcalc.models.common.causal_lm import CausalLM, DecoderModel
from memcalc.nn.layers.decoder_blocks import PRE_NORM, DecoderBlock
from memcalc.nn.layers.grouped_query_attention import PER_HEAD, GroupedQueryAttention
from memcalc.nn.layers.linear import Embedding
from memcalc.nn.layers.mlp import GatedMLP, PlainMLP
from memcalc.nn.layers.norms import LayerNorm, RMSNorm
from memcalc.nn.model import Batch, Network, Outputs
from memcalc.nn.module import Buffer, Module
from memcalc.nn.run_context import run_context
from memcalc.nn.stack import Stack
from memcalc.parallel import megatron_ops
from memcalc.parallel.megatron_layers import ColumnParallelLinear, LayerGroup, LayerSizes, TransformerLayer
from memcalc.parallel.megatron_ops import TensorRanks
from memcalc.parallel.pipeline_stage import Stage, received
from memcalc.parallel.setup import ParallelSetup
from memcalc.tables.dtypes import BOOL, FP32

VOCABULARY_MULTIPLE = 128
"""What the vocabulary of each rank is padded to a multiple of (`--make-vocab-size-divisible-by`)."""


class VocabParallelEmbedding(Embedding):
    """An embedding divided by words, whose output the ranks sum or cut along the sequence."""

    def __init__(self, words: int, width: int, ranks: TensorRanks) -> None:
        super().__init__(words // ranks.size, width)
        self.ranks = ranks

    def forward(self, ids: Tensor) -> Tensor:
        """Ids [b, s] to [s, b, h], or to this rank's part of the sequence."""
        own, mask = megatron_ops.masked_ids(ids, self.ranks)
        out = ops.embedding(own, self.weight)
        if mask is not None:
            out = ops.masked_fill_(out, ops.unsqueeze(mask, -1))
        if self.ranks.sequence:
            out = ops.contiguous(ops.transpose(out, 0, 1))
            return megatron_ops.reduce_output(out, self.ranks)
        out = megatron_ops.reduce_output(out, self.ranks)
        return ops.contiguous(ops.transpose(out, 0, 1))


class GPTModel(Stage):
    """Embedding, layers, final norm and head; losses are computed of logits that stay divided by words."""

    sends_and_forgets = True
    first = last = True

    def __init__(self, sizes: LayerSizes, depth: int, words: int, ranks: TensorRanks, *, tied: bool, rotary: bool):
        self.ranks, self.hidden, self.heads = ranks, sizes.hidden, sizes.heads
        self.embedding: VocabParallelEmbedding | None = VocabParallelEmbedding(words, sizes.hidden, ranks)
        self.inv_freq = Buffer(sizes.head_dim // 2) if rotary else None
        self.layers = Stack([0] * depth, lambda _: TransformerLayer(sizes, ranks))
        self.final_layernorm: Module | None = sizes.norm(sizes.hidden)
        head = ColumnParallelLinear(sizes.hidden, words, ranks, bias=False, group="LM head")
        if tied and self.embedding is not None:
            head.weight = self.embedding.weight
        self.output_layer: Module | None = head
        self.head_dim, self._sizes = sizes.head_dim, sizes
        self.dropout = sizes.dropout

    def forward(self, batch: Batch) -> Outputs:
        """Loss of a micro-batch."""
        tape = batch.ids.tape
        if self.embedding is None:
            hidden = received(tape, self.boundary(*batch.ids.shape), held=False)
        else:
            hidden = ops.dropout(self.embedding(batch.ids), self.dropout)
        angles = None
        if self.inv_freq is not None:  # made once and kept
            shape = (batch.ids.shape[1], 1, 1, self.head_dim)
            angles = tape.external_tensor(shape, FP32, OVERHEAD, "rotary embedding")
        mask = self._mask(batch)
        for layer in self.layers:
            hidden = layer(hidden, angles, mask)
        if self.output_layer is None or self.final_layernorm is None:
            return Outputs(_sent(hidden))
        hidden = self.final_layernorm(hidden)
        with tape.scoped("head and loss"):
            logits = self.output_layer(hidden)
            labels = ops.contiguous(ops.transpose(batch.ids, 0, 1))
            losses = megatron_ops.vocab_parallel_cross_entropy(logits, labels)
            losses = ops.contiguous(ops.transpose(losses, 0, 1))
        del logits, labels, hidden
        return Outputs(ops.sum(ops.view(losses, -1), 0))

    def _mask(self, batch: Batch) -> Tensor | None:
        """The causal mask of attention that is written out, and room for the scores that it is added to."""
        tape = batch.ids.tape
        if run_context(tape).attention != "eager":
            return None
        (rows, length), heads = batch.ids.shape, self.heads // self.ranks.size
        scores = rows * heads * length * length * run_context(tape).weights_dtype.itemsize
        self.ranks.gathered = max(self.ranks.gathered, scores)
        return tape.external_tensor((1, 1, length, length), BOOL, OVERHEAD, "attention mask")

    def keep(self, index: int, stages: int) -> None:
        """Be stage `index` of a pipeline. Raises UsageError where stages do not get equally many layers."""
        if self.layers.depth % stages:
            raise UsageError(
                f"Megatron-Core gives every stage equally many layers, and {self.layers.depth} layers are no multiple "
                f"of {stages} stages; change --pipeline-parallel-size."
            )
        each = self.layers.depth // stages
        self.layers.keep(range(index * each, (index + 1) * each))
        self.first, self.last = index == 0, index == stages - 1
        if not self.first:
            self.embedding = None
        if not self.last:
            self.final_layernorm = self.output_layer = None

    def recompute(self, layout: ParallelSetup) -> None:
        """Let checkpointing be that of `layout`, where there is any: `recompute_method` and `recompute_num_layers`."""
        count, layers = layout.recompute_layers, self.layers
        for block in layers.blocks:
            assert isinstance(block, TransformerLayer)
            block.recomputes_mlp = "mlp" in layout.recompute_modules
            block.self_attention.recomputes_core = "core_attn" in layout.recompute_modules
        if layout.recompute_block:
            layers.split([position < count for position in range(layers.depth)])
            for position, block in layers.positions:
                block.skips_checkpointing = position >= count
        elif count > 1:
            sizes = [min(count, layers.depth - start) for start in range(0, layers.depth, count)]
            self.layers = Stack(sizes, lambda group: LayerGroup(self._sizes, self.ranks, sizes[group]))

    def boundary(self, batch: int, length: int) -> Shape:
        """Shape of what stages send to each other: this rank's part of the sequence."""
        return self.ranks.part((length, batch, self.hidden))


def _sent(hidden: Tensor) -> Tensor:
    """Hidden states once they are sent: their memory is given back, an element stays (`deallocate_output_tensor`)."""
    hidden.storage = hidden.tape.allocate(hidden.dtype.itemsize)
    return hidden


def megatron_model(network: Network, layout: ParallelSetup) -> GPTModel:
    """Megatron-Core's model with the sizes of `network`, unbound.

    Raises UsageError where it is no decoder that Megatron-Core's GPTModel is as memcalc knows it, or does not divide.
    """
    if not (isinstance(network, CausalLM) and isinstance(network.model, DecoderModel)):
        raise _unknown("this model")
    model = network.model
    block = model.layers.blocks[0]
    sizes = _sizes(block, model.norm, model.layers)
    ranks = TensorRanks(layout.tensor, layout.sequence)
    for what, count in (("key-value heads", sizes.kv_heads), ("MLP width", sizes.width)):
        if count % ranks.size:
            raise UsageError(
                f"--tensor-parallel-size {ranks.size} does not divide the {what} {count}; take a size that does."
            )
    multiple = VOCABULARY_MULTIPLE * ranks.size
    words = -(-network.lm_head.weight.shape[0] // multiple) * multiple
    tied = network.lm_head.weight is vars(model.embed_tokens).get("weight")
    return GPTModel(sizes, model.layers.depth, words, ranks, tied=tied, rotary=model.rotary_emb is not None)


def _sizes(block: Module, norm: Module, layers: Stack) -> LayerSizes:
    attention, mlp = vars(block).get("self_attn"), vars(block).get("mlp")
    usual = type(block) is DecoderBlock and block.names == PRE_NORM and not block.residual_multiplier
    alike = all(type(other) is type(block) and type(vars(other).get("mlp")) is type(mlp) for other in layers.blocks)
    if not (usual and alike and isinstance(norm, (RMSNorm, LayerNorm))):
        raise _unknown("this family's block")
    if not isinstance(attention, GroupedQueryAttention) or _has_more(attention):
        raise _unknown("this family's attention")
    if isinstance(mlp, GatedMLP) and mlp.ffn_sub_norm is None:
        down, gated = mlp.down_proj, True
    elif isinstance(mlp, PlainMLP):
        down, gated = vars(mlp)[mlp.names[1]], False
    else:
        raise _unknown("this family's MLP")
    return LayerSizes(
        hidden=down.outputs,
        heads=attention.heads,
        kv_heads=attention.kv_heads,
        head_dim=attention.head_dim,
        width=down.inputs,
        gated=gated,
        bias=down.bias is not None,
        qkv_bias=attention.q_proj.bias is not None,
        qk_norm=attention.qk_norm is not None,
        layer_norm=isinstance(norm, LayerNorm),
        dropout=max(mlp.dropout, attention.out_dropout),
        attention_dropout=attention.dropout,
    )


def _has_more(attention: GroupedQueryAttention) -> bool:
    """Whether it has what Megatron's self-attention has not, as memcalc knows it."""
    more = attention.fused or attention.clip_qkv or attention.key_multiplier or attention.attn_logit_softcapping
    return more or attention.sinks is not None or attention.qk_norm not in (None, PER_HEAD)


def _unknown(what: str) -> UsageError:
    return UsageError(
        f"--parallel megatron is described for dense decoders of Llama's kind, and {what} is no such; use --parallel "
        "fsdp2, ddp or a ZeRO stage."
    )
