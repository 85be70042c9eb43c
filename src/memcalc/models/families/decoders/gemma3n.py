"""Gemma 3n (text): several streams of which a layer computes one, shared keys and values, and inputs of each layer."""

from __future__ import annotations

from collections.abc import Callable

from memcalc import ops
from memcalc.autograd.tensor import Tensor
from memcalc.config.reader import Config
from memcalc.errors import ConfigError
from memcalc.models.common import heads
from memcalc.models.common.causal_lm import DecoderModel
from memcalc.models.common.decoder import SOFT_CAP, sorted_windows, windows_from
from memcalc.models.family import Family, sizes, table
from memcalc.nn.layers.gemma3n_block import Gemma3nBlock, SparseMLP
from memcalc.nn.layers.gemma_shared_kv import (
    PerLayerInputs,
    PowerRMSNorm,
    SharedKeyValues,
    SharingAttention,
    sharing_modes,
)
from memcalc.nn.layers.linear import Linear, ScaledEmbedding
from memcalc.nn.layers.rotary import RotaryByWindow, RotaryEmbedding
from memcalc.nn.model import Network, positions
from memcalc.nn.module import Buffer, Module
from memcalc.nn.run_context import run_context
from memcalc.nn.stack import Stack
from memcalc.tables.dtypes import BOOL, INT64


class Gemma3nTextModel(DecoderModel, PerLayerInputs):
    """The decoder; the streams are made of the embeddings, and their mean goes to the norm."""

    def add_streams(self, hidden: int, streams: int) -> None:
        """Have `streams` streams."""
        self.altup_projections = [Linear(hidden, hidden, group="other") for _ in range(1, streams)]
        self.altup_unembed_projections = [Linear(hidden, hidden, group="other") for _ in range(1, streams)]
        self.per_layer_projection_scale = Buffer(dtype=None)
        self.per_layer_input_scale = Buffer(dtype=None)

    def scaled_projection(self, projection: Tensor) -> Tensor:
        """The projection times a number, in place."""
        return ops.mul_(projection, self.per_layer_projection_scale)

    def scaled_sum(self, total: Tensor) -> Tensor:
        """Table and projection together, times a number."""
        return ops.mul(total, self.per_layer_input_scale)

    def forward(
        self,
        ids: Tensor,
        padding: bool,
        embeds: Tensor | None = None,
        position_ids: Tensor | None = None,
        between: Callable[[int, Tensor], Tensor] | None = None,
        of_tokens: Tensor | None = None,
    ) -> Tensor:
        """Ids [b, s] to hidden states [b, s, h]; `of_tokens` are what the layers' table has for them, if known."""
        inputs_embeds = self.embed_tokens(ids) if embeds is None else embeds
        del embeds
        inputs = self.projected(inputs_embeds, self._of_known_tokens(ids) if of_tokens is None else of_tokens)
        del of_tokens
        run = run_context(ids)
        if run.cache is not None:
            for block in self.layers.blocks:
                attention = vars(block)["self_attn"]
                if attention.caches:
                    run.cache.register_layer(attention, attention.window, block.copies, inputs_embeds)
        position_ids = positions(ids.tape, ids.shape[1]) if position_ids is None else position_ids
        masks = {window: self._mask(ids, inputs_embeds, padding, window) for window in self.windows}
        magnitude = _magnitude(inputs_embeds)
        streams = [inputs_embeds]
        for projection in self.altup_projections:
            projected = projection(inputs_embeds)
            current, new_magnitude = _as_large(projected, inputs_embeds, magnitude)
            streams.append(current)
        hidden = ops.stack(streams, 0)
        rotation = vars(self)["rotary_emb"](hidden, position_ids)
        shared = SharedKeyValues()
        for layer in self.layers:
            window = vars(layer.module)["self_attn"].window
            own = ops.select(inputs, 2)
            more = {"mask": masks[window], "shared": shared, "position_ids": position_ids}
            hidden = layer(hidden, rotation[window], own, **more)
        magnitude = _magnitude(ops.select(hidden, 0))
        streams = [ops.select(hidden, 0)]
        for projection in self.altup_unembed_projections:
            projected = projection(ops.select(hidden, 0))
            current, new_magnitude = _as_large(projected, inputs_embeds, magnitude)
            streams.append(current)
        del new_magnitude
        hidden = ops.stack(streams, 0)
        hidden = ops.mean(hidden, 0, keepdim=False)
        return self.norm(hidden)  # type: ignore[no-any-return]

    def _of_known_tokens(self, ids: Tensor) -> Tensor:
        """What the table has for ids [b, s]; those that it does not have are read as 0."""
        low, high = ops.empty_like(ids, BOOL), ops.empty_like(ids, BOOL)
        known = ops.empty_like(ids, BOOL)
        del low, high
        zero = ids.tape.empty((), INT64)
        ids = ops.empty_like(ids)
        del known, zero
        return self.of_tokens(ids)


def _magnitude(hidden: Tensor) -> Tensor:
    """The root mean square of hidden states [b, s, h]: [b, s, 1]."""
    return ops.pow(ops.mean(ops.pow(hidden)), 0.5)


def _as_large(projected: Tensor, like: Tensor, magnitude: Tensor) -> tuple[Tensor, Tensor]:
    """A projection [b, s, h] made as large as `magnitude` [b, s, 1] says, and how large it was."""
    current = ops.to(projected, like.dtype)
    new_magnitude = ops.mean(ops.pow(current))
    new_magnitude = ops.sqrt(ops.clamp(new_magnitude, 1))
    return ops.div(ops.mul(current, magnitude), new_magnitude), new_magnitude


def gemma3n_text(c: Config, architecture: str | None) -> Network:
    """Gemma 3n."""
    hidden, depth = c.integer("hidden_size"), c.integer("num_hidden_layers")
    windows = windows_from(c, [(i + 1) % 5 != 0 for i in range(depth)], c.integer("sliding_window"))
    shared = c.integer("num_kv_shared_layers", minimum=0)
    if shared >= depth or set(windows[: depth - shared]) != set(windows):
        raise ConfigError(
            f"{c.where} has 'num_kv_shared_layers' {shared} of {depth} layers, whose keys and values no earlier layer "
            "of the same type makes; correct it."
        )
    modes = sharing_modes(windows, shared) if shared else [None] * depth
    sparse, widths = _sparse(c, depth), _widths(c, depth)

    def build(layer: int) -> Module:
        attention = SharingAttention(
            hidden,
            *c.heads(),
            window=windows[layer],
            sharing=modes[layer],
            bias=c.flag("attention_bias"),
            dropout=c.probability("attention_dropout"),
            value_last=True,
        )
        mlp = SparseMLP(hidden, widths[layer], c.text("hidden_activation"), sparse=sparse[layer])
        return Gemma3nBlock(c, attention, mlp)

    embedding = ScaledEmbedding(c.integer("vocab_size"), hidden)
    decoder = Gemma3nTextModel(
        embedding,
        Stack(list(zip(windows, modes, sparse, widths, strict=True)), build),
        PowerRMSNorm(hidden),
        RotaryByWindow(sorted_windows(windows), lambda: RotaryEmbedding(c.head_dim())),
        sorted_windows([None, c.integer("sliding_window")]),
    )
    decoder.add_layer_inputs(hidden, c.integer("vocab_size_per_layer_input"), c.integer("hidden_size_per_layer_input"))
    decoder.add_streams(hidden, c.integer("altup_num_inputs"))
    tied = c.flag("tie_word_embeddings")
    caps = SOFT_CAP if c.has("final_logit_softcapping") else ()
    return heads.decoder(c, architecture, decoder, hidden, embedding, tied=tied, logit_transforms=caps)


def _sparse(c: Config, depth: int) -> list[bool]:
    """Which layers have a sparse gate."""
    given = c.items("activation_sparsity_pattern")
    if given is None:
        return [depth > 10 and layer < 10 for layer in range(depth)]
    if len(given) != depth:
        raise ConfigError(
            f"{c.where} has {len(given)} values of 'activation_sparsity_pattern' for {depth} layers; correct one."
        )
    return [bool(value) for value in given]


def _widths(c: Config, depth: int) -> list[int]:
    """Width of each layer's MLP."""
    if not isinstance(c.get("intermediate_size"), (list, tuple)):
        return [c.integer("intermediate_size")] * depth
    widths = c.integers("intermediate_size", minimum=1)
    if len(widths) != depth:
        raise ConfigError(f"{c.where} has {len(widths)} values of 'intermediate_size' for {depth} layers; correct one.")
    return widths


FAMILIES = table(
    Family(
        "gemma3n_text",
        gemma3n_text,
        sizes(
            (262400, 2048, 16384, 35, 8, 2, 32768),
            head_dim=256,
            hidden_activation="gelu_pytorch_tanh",
            attention_dropout=0.0,
            sliding_window=512,
            final_logit_softcapping=30.0,
            vocab_size_per_layer_input=262144,
            hidden_size_per_layer_input=256,
            altup_coef_clip=120.0,
            altup_correct_scale=True,
            altup_num_inputs=4,
            num_kv_shared_layers=15,
            laurel_rank=64,
            pad_token_id=0,
            tie_word_embeddings=True,
        ),
        kinds="decoder with shared keys and values, streams",
    )
)
