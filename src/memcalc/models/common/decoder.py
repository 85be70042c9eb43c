"""Builds the decoder that most families are from a config: Llama, with named differences."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any, Literal

from memcalc import ops
from memcalc.autograd.tensor import Tensor
from memcalc.common.escaping import quoted
from memcalc.config.reader import Config
from memcalc.errors import ConfigError
from memcalc.models.common import heads
from memcalc.models.common.causal_lm import DecoderModel
from memcalc.nn.layers.decoder_blocks import PRE_NORM, DecoderBlock, NormNames
from memcalc.nn.layers.grouped_query_attention import GroupedQueryAttention
from memcalc.nn.layers.linear import Embedding
from memcalc.nn.layers.masks import RECURRENT
from memcalc.nn.layers.mlp import GatedMLP, PlainMLP
from memcalc.nn.layers.norms import RMSNorm
from memcalc.nn.layers.rotary import RotaryEmbedding
from memcalc.nn.model import Network
from memcalc.nn.module import Module
from memcalc.nn.stack import Stack

Windows = Sequence[int | None]
"""The sliding window of each layer; None for full attention."""

SOFT_CAP: tuple[Callable[[Tensor], Tensor], ...] = (ops.mul_scalar, ops.tanh, ops.mul_scalar)
"""Soft capping of logits: tanh(logits / cap) * cap."""


def dense_decoder(
    c: Config,
    architecture: str | None,
    *,
    windows: Windows | None = None,
    masks: Windows | None = None,
    rope_layers: Sequence[bool] | None = None,
    attention: dict[str, Any] | None = None,
    make_attention: Callable[[int], Module | None] | None = None,
    mlp: Callable[[], Module] | Sequence[Callable[[], Module]] | None = None,
    norm: Callable[[int], Module] = RMSNorm,
    block: Callable[[Module, Module, Callable[[], Module]], Module] = DecoderBlock,
    rotary: Module | Literal[False] | None = None,
    embedding: Callable[[int, int], Embedding] = Embedding,
    logit_transforms: Sequence[Callable[[Tensor], Tensor]] = (),
    head_bias: bool = False,
    **model: Any,
) -> Network:
    """A decoder like Llama but for what is given; with nothing given, Llama itself.

    windows: the sliding window of each layer in tokens, None for full attention.
    masks: the windows for which the model makes a mask; by default those of the layers.
    rope_layers: for each layer, whether it applies the rotary embedding.
    attention: keyword arguments of GroupedQueryAttention.
    make_attention: makes the attention (or mixer) of layer i instead; None for GroupedQueryAttention.
    mlp: makes the MLP of every layer, or one such function a layer.
    norm: makes a norm of a width.
    block: makes a block of attention, MLP and a function that makes its norms.
    rotary: the rotary embedding, False for none.
    embedding: makes the token embedding of (vocab, hidden).
    logit_transforms: what the head does to its logits before the loss.
    head_bias: the language-model head has a bias.
    model: keyword arguments of DecoderModel.
    """
    hidden, vocab, depth = c.integer("hidden_size"), c.integer("vocab_size"), c.integer("num_hidden_layers")
    windows = [None] * depth if windows is None else windows
    rope_layers = [True] * depth if rope_layers is None else rope_layers
    options: dict[str, Any] = {"dropout": c.probability("attention_dropout", 0.0), **(attention or {})}
    feed_forward = [mlp or gated_mlp(c)] * depth if mlp is None or callable(mlp) else mlp

    def grouped_query(layer: int) -> Module:
        rotation = {} if rope_layers[layer] else {"rotate": None}
        return GroupedQueryAttention(hidden, *c.heads(), window=windows[layer], **{**options, **rotation})

    def build(layer: int) -> Module:
        attention = make_attention(layer) if make_attention else None
        return block(attention or grouped_query(layer), feed_forward[layer](), partial(norm, hidden))

    table = embedding(vocab, hidden)
    layers = Stack(list(zip(windows, rope_layers, feed_forward, strict=True)), build)
    if rotary is None:
        rotary = RotaryEmbedding(c.head_dim(), long=c.rope_type() == "longrope")
    if masks is None:
        masks = [*windows, None] if set(windows) == {RECURRENT} else windows  # hybrids make attention's mask too
    decoder = DecoderModel(table, layers, norm(hidden), rotary or None, sorted_windows(masks), **model)
    tied = c.flag("tie_word_embeddings")
    return heads.decoder(
        c, architecture, decoder, hidden, table, tied=tied, logit_transforms=logit_transforms, bias=head_bias
    )


def llama_like(
    c: Config,
    architecture: str | None,
    *,
    bias: str | bool = "attention_bias",
    out_bias: str | bool | None = None,
    mlp_bias: str | bool = False,
    gated: bool = True,
    mlp_names: tuple[str, str] = ("up_proj", "down_proj"),
    norms: NormNames = PRE_NORM,
    dropout: str = "",
    multipliers: bool = False,
    attention: Mapping[str, Any] = MappingProxyType({}),
    **decoder: Any,
) -> Network:
    """A decoder that a row describes: Llama, with named differences. A text is the config key of the value.

    bias, out_bias, mlp_bias: biases of the query, key and value projections, of the output projection (None: the same
        as `bias`), and of the MLP.
    gated: the MLP has a gate; without one, `mlp_names` are the attribute names of its two projections.
    norms: attribute names of the norms of a block.
    dropout: key of the dropout on the outputs of attention and MLP.
    multipliers: numbers multiply the embeddings, what is added to the residual stream, and the logits (Granite).
    attention, decoder: further keyword arguments of GroupedQueryAttention and dense_decoder.
    """

    def flag(key: str | bool) -> bool:
        return c.flag(key) if isinstance(key, str) else key

    rate = c.probability(dropout) if dropout else 0.0
    biases = {"bias": flag(bias), "out_bias": flag(bias if out_bias is None else out_bias), "out_dropout": rate}
    hidden, width, act, biased = (
        c.integer("hidden_size"),
        c.integer("intermediate_size"),
        c.text("hidden_act"),
        flag(mlp_bias),
    )
    scaling = {"embedding_multiplier": True, "logit_transforms": (ops.mul_scalar,)} if multipliers else {}

    def mlp() -> Module:
        if gated:
            return GatedMLP(hidden, width, act, bias=biased, dropout=rate)
        return PlainMLP(hidden, width, act, names=mlp_names, bias=biased, dropout=rate)

    block = partial(DecoderBlock, names=norms, residual_multiplier=multipliers)
    given = {"attention": {**biases, **attention}, "mlp": mlp, "block": block, **scaling, **decoder}
    return dense_decoder(c, architecture, **given)


def biases(c: Config, key: str = "attention_bias") -> dict[str, Any]:
    """Keyword arguments of an attention whose four projections have a bias if `key` says so."""
    return {"bias": c.flag(key), "out_bias": c.flag(key)}


def gated_mlp(c: Config, act: str = "hidden_act", *, bias: bool = False, dropout: float = 0.0) -> Callable[[], Module]:
    """A function that makes the config's gated MLP; `act` is the key of its activation function."""
    width, name = c.integer("intermediate_size"), c.text(act)
    return lambda: GatedMLP(c.integer("hidden_size"), width, name, bias=bias, dropout=dropout)


def same_window(c: Config, key: str = "sliding_window") -> list[int | None]:
    """`sliding_window` for every layer; None where the config has none."""
    return [c.optional(key)] * c.integer("num_hidden_layers")


def windows_by_layer_type(c: Config, full_every: int, *, key: str = "sliding_window") -> list[int | None]:
    """Windows by `layer_types`; without it, every `full_every`-th layer has full attention."""
    depth = c.integer("num_hidden_layers")
    return windows_from(c, [(i + 1) % full_every != 0 for i in range(depth)], c.optional(key))


def windows_from(c: Config, slides: Sequence[bool], window: int | None) -> list[int | None]:
    """`window` in the layers that `layer_types` calls sliding; without it, in those that `slides` marks.

    Raises ConfigError where a type is unknown or a sliding layer has no window.
    """
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
