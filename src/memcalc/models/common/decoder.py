"""The dense decoder that most families are: what their recipes say in a few words, put together from a config."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Literal

from memcalc import ops
from memcalc.autograd.tensor import Tensor
from memcalc.common.escaping import quoted
from memcalc.config.reader import Config
from memcalc.errors import ConfigError
from memcalc.models.common import heads
from memcalc.models.common.causal_lm import DecoderModel
from memcalc.nn.layers.decoder_blocks import DecoderBlock
from memcalc.nn.layers.grouped_query_attention import GroupedQueryAttention
from memcalc.nn.layers.linear import Embedding
from memcalc.nn.layers.masks import RECURRENT
from memcalc.nn.layers.mlp import GatedMLP
from memcalc.nn.layers.norms import RMSNorm
from memcalc.nn.layers.rotary import RotaryEmbedding
from memcalc.nn.model import Network
from memcalc.nn.module import Module
from memcalc.nn.stack import Stack

Windows = Sequence[int | None]
"""The sliding window of each layer; None for full attention."""

SOFT_CAP: tuple[Callable[[Tensor], Tensor], ...] = (ops.mul_scalar, ops.tanh, ops.mul_scalar)
"""Logits divided by a number, through tanh, and multiplied by it."""


def dense_decoder(
    c: Config,
    architecture: str | None,
    *,
    windows: Windows | None = None,
    masks: Windows | None = None,
    turned: Sequence[bool] | None = None,
    attention: dict[str, Any] | None = None,
    attend: Callable[[int], Module | None] | None = None,
    mlp: Callable[[], Module] | Sequence[Callable[[], Module]] | None = None,
    norm: Callable[[int], Module] = RMSNorm,
    block: Callable[[Module, Module, Callable[[], Module]], Module] = DecoderBlock,
    rotary: Module | Literal[False] | None = None,
    embedding: Callable[[int, int], Embedding] = Embedding,
    bend: Sequence[Callable[[Tensor], Tensor]] = (),
    head_bias: bool = False,
    **model: Any,
) -> Network:
    """A decoder like Llama but for what is given; with nothing given, Llama itself.

    `windows` are those of the layers, `masks` those for which the model makes a mask (by default the layers'), `turned`
    says which layers apply the rotary embedding. `attention` and `model` go to GroupedQueryAttention and DecoderModel;
    `attend` makes another attention for layer i, or none. `mlp` makes every layer's, or there is one for each. `rotary`
    is False where there is no rotary embedding.
    """
    hidden, vocab, depth = c.integer("hidden_size"), c.integer("vocab_size"), c.integer("num_hidden_layers")
    windows = [None] * depth if windows is None else windows
    turned = [True] * depth if turned is None else turned
    options: dict[str, Any] = {"dropout": c.probability("attention_dropout", 0.0), **(attention or {})}
    feed_forward = [mlp or gated_mlp(c)] * depth if mlp is None or callable(mlp) else mlp

    def grouped_query(layer: int) -> Module:
        own = options if turned[layer] else {**options, "rotate": None}
        return GroupedQueryAttention(hidden, *c.heads(), window=windows[layer], **own)

    def build(layer: int) -> Module:
        attention = attend(layer) if attend else None
        return block(attention or grouped_query(layer), feed_forward[layer](), partial(norm, hidden))

    table = embedding(vocab, hidden)
    layers = Stack(list(zip(windows, turned, feed_forward, strict=True)), build)
    if rotary is None:
        rotary = RotaryEmbedding(c.head_dim(), long=c.rope_type() == "longrope")
    if masks is None:
        masks = [*windows, None] if set(windows) == {RECURRENT} else windows  # hybrids make attention's mask anyhow
    decoder = DecoderModel(table, layers, norm(hidden), rotary or None, sorted_windows(masks), **model)
    tied = c.flag("tie_word_embeddings")
    return heads.decoder(c, architecture, decoder, hidden, table, tied=tied, bend=bend, bias=head_bias)


def gated_mlp(c: Config, act: str = "hidden_act", *, bias: bool = False, dropout: float = 0.0) -> Callable[[], Module]:
    """What makes a gated MLP as the config describes it; `act` is the key that names its activation function."""
    width, name = c.integer("intermediate_size"), c.text(act)
    return lambda: GatedMLP(c.integer("hidden_size"), width, name, bias=bias, dropout=dropout)


def everywhere(c: Config, key: str = "sliding_window") -> list[int | None]:
    """The same sliding window in every layer, where the config has one."""
    return [c.optional(key)] * c.integer("num_hidden_layers")


def by_type(c: Config, full_every: int, *, key: str = "sliding_window") -> list[int | None]:
    """Windows by `layer_types`; where the config has none, every `full_every`-th layer attends to everything."""
    depth = c.integer("num_hidden_layers")
    return typed(c, [(i + 1) % full_every != 0 for i in range(depth)], c.optional(key))


def typed(c: Config, slides: Sequence[bool], window: int | None) -> list[int | None]:
    """`window` in the layers that `layer_types` calls sliding, or, where the config has none, in those that slide."""
    types = c.layer_types(["sliding_attention" if slide else "full_attention" for slide in slides])
    for kind in types:
        if kind not in ("full_attention", "sliding_attention"):
            raise ConfigError(
                f"{c.where} has {quoted(kind)} among its 'layer_types'; this family has 'full_attention' and "
                f"'sliding_attention'."
            )
    if window is None and "sliding_attention" in types:
        raise ConfigError(
            f"{c.where} has layers with 'sliding_attention', but no 'sliding_window' that is in use; give one, or let "
            "'layer_types' name 'full_attention' alone."
        )
    return [window if kind == "sliding_attention" else None for kind in types]


def sorted_windows(windows: Windows) -> list[int | None]:
    """The distinct windows, full attention first."""
    return sorted(set(windows), key=lambda window: -1 if window is None else window)
