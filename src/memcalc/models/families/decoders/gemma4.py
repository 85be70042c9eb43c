"""Gemma 4 (text): heads of two sizes, shared keys and values, inputs of each layer, and experts beside the MLP."""

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
from memcalc.nn.layers.gemma_shared_kv import (
    PerLayerInputs,
    PowerRMSNorm,
    SharedKeyValues,
    SharingAttention,
    sharing_modes,
)
from memcalc.nn.layers.linear import Linear, ScaledEmbedding
from memcalc.nn.layers.mixture_of_experts import Experts, swiglu
from memcalc.nn.layers.mlp import GatedMLP, activation
from memcalc.nn.layers.rotary import RotaryByWindow, RotaryEmbedding, Rotation
from memcalc.nn.layers.routers import Router
from memcalc.nn.model import Network, positions
from memcalc.nn.module import Buffer, Module, Parameter
from memcalc.nn.run_context import run_context
from memcalc.nn.stack import Stack
from memcalc.tables.dtypes import FP32


class Gemma4Router(Router):
    """Softmax over all experts of normalised and scaled tokens; the weights of the best have a scale an expert."""

    def __init__(self, hidden: int, count: int, per_token: int) -> None:
        self.norm = PowerRMSNorm(hidden, with_scale=False)
        self.proj = Linear(hidden, count, group="experts")
        self.scale = Parameter(hidden, group="experts")
        self.per_expert_scale = Parameter(count, group="experts")
        self.per_token = per_token

    def forward(self, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Tokens [n, h] to probabilities [n, experts], weights and indices [n, k]."""
        hidden = self.norm(hidden)
        hidden = ops.mul_scalar(ops.mul(hidden, self.scale))
        scores = self.proj(hidden)
        probabilities = ops.softmax(scores, FP32)
        weights, indices = ops.topk(probabilities, self.per_token)
        weights = ops.div_(weights, ops.sum(weights, keepdim=True))
        weights = ops.mul(weights, ops.index(self.per_expert_scale, indices))
        return probabilities, weights, indices


class Gemma4Block(Module):
    """Norms around attention and MLP, the layer's own input, and a number that scales the result.

    attention, mlp: the sublayers.
    experts: run beside the MLP; None where there are none.
    own_input: width of the layer's own input and its activation; None where there is none.
    """

    scope = "residual stream"

    def __init__(
        self,
        hidden: int,
        attention: SharingAttention,
        mlp: Module,
        experts: Experts | None,
        own_input: tuple[int, str] | None,
    ) -> None:
        self.self_attn = attention
        self.mlp = mlp
        self.input_layernorm = PowerRMSNorm(hidden)
        self.post_attention_layernorm = PowerRMSNorm(hidden)
        self.pre_feedforward_layernorm = PowerRMSNorm(hidden)
        self.post_feedforward_layernorm = PowerRMSNorm(hidden)
        self.layer_scalar = Buffer(1, dtype=None)
        if own_input is not None:
            self.act = activation(own_input[1])
            self.per_layer_input_gate = Linear(hidden, own_input[0], group="MLP")
            self.per_layer_projection = Linear(own_input[0], hidden, group="MLP")
            self.post_per_layer_input_norm = PowerRMSNorm(hidden)
        self.experts = experts
        if experts is not None:
            self.router = Gemma4Router(hidden, experts.count, experts.per_token)
            self.post_feedforward_layernorm_1 = PowerRMSNorm(hidden)
            self.post_feedforward_layernorm_2 = PowerRMSNorm(hidden)
            self.pre_feedforward_layernorm_2 = PowerRMSNorm(hidden)

    def forward(
        self,
        hidden: Tensor,
        per_layer_input: Tensor | None,
        rotation: Rotation,
        mask: Tensor | None,
        shared: SharedKeyValues,
        position_ids: Tensor,
    ) -> Tensor:
        """[b, s, h] to [b, s, h]."""
        residual = hidden
        hidden = self.input_layernorm(hidden)
        hidden, _held = self.self_attn(hidden, rotation, mask, shared)
        hidden = self.post_attention_layernorm(hidden)
        hidden = ops.add(residual, hidden)
        residual = hidden
        hidden = self.pre_feedforward_layernorm(hidden)
        hidden = self.mlp(hidden)
        if self.experts is not None:
            first = self.post_feedforward_layernorm_1(hidden)
            flat = ops.reshape(residual, -1, residual.shape[-1])
            _held, weights, indices = self.router(flat)
            second = self.pre_feedforward_layernorm_2(flat)
            second = self.experts(second, weights, indices)
            second = ops.reshape(second, *residual.shape)
            second = self.post_feedforward_layernorm_2(second)
            hidden = ops.add(first, second)
        hidden = self.post_feedforward_layernorm(hidden)
        hidden = ops.add(residual, hidden)
        if per_layer_input is not None:
            residual = hidden
            hidden = self.per_layer_input_gate(hidden)
            hidden = self.act(hidden)
            hidden = ops.mul(hidden, per_layer_input)
            hidden = self.per_layer_projection(hidden)
            hidden = self.post_per_layer_input_norm(hidden)
            hidden = ops.add(residual, hidden)
        return ops.mul_(hidden, self.layer_scalar)


class Gemma4TextModel(DecoderModel, PerLayerInputs):
    """The decoder; its layers that share keys and values read the last token alone where generation needs no other."""

    def forward(
        self,
        ids: Tensor,
        padding: bool,
        embeds: Tensor | None = None,
        position_ids: Tensor | None = None,
        between: Callable[[int, Tensor], Tensor] | None = None,
        of_tokens: Tensor | None = None,
        masks: dict[int | None, Tensor | None] | None = None,
    ) -> Tensor:
        """Ids [b, s] to hidden states [b, s, h].

        of_tokens: what the layers' table has for the ids, if known.
        masks: the masks by window, if made before.
        """
        inputs_embeds = self.embed_tokens(ids) if embeds is None else embeds
        del embeds
        inputs = None
        if self.width:
            of_tokens = self.of_tokens(ids) if of_tokens is None else of_tokens
            inputs = self.projected(inputs_embeds, of_tokens)
        del of_tokens
        run = run_context(ids)
        if run.cache is not None:
            for block in self.layers.blocks:
                attention = vars(block)["self_attn"]
                if attention.caches:
                    run.cache.register_layer(attention, attention.window, block.copies, inputs_embeds)
        position_ids = positions(ids.tape, ids.shape[1]) if position_ids is None else position_ids
        if masks is None:
            masks = {window: self._mask(ids, inputs_embeds, padding, window) for window in self.windows}
        hidden = inputs_embeds
        rotation = vars(self)["rotary_emb"](hidden, position_ids)
        last_alone = run.cache is not None and not run.all_logits and run.attention != "flash"
        shared = SharedKeyValues()
        for layer in self.layers:
            attention = vars(layer.module)["self_attn"]
            if attention.sharing == "reuse" and last_alone and hidden.shape[1] > 1:
                hidden = ops.narrow(hidden, 1, 1)
                inputs = None if inputs is None else ops.narrow(inputs, 1, 1)
                rotation = {w: tuple(ops.narrow(x, 1, 1) for x in pair) for w, pair in rotation.items()}
                masks = {w: None if mask is None else ops.narrow(mask, 2, 1) for w, mask in masks.items()}
            own = None if inputs is None else ops.select(inputs, 2)
            window = attention.window
            more = {"rotation": rotation[window], "mask": masks[window]}
            hidden = layer(hidden, own, shared=shared, position_ids=position_ids, **more)
            del own, more
        return self.norm(hidden)  # type: ignore[no-any-return]


def gemma4_text(c: Config, architecture: str | None) -> Network:
    """Gemma 4."""
    if c.get("use_bidirectional_attention") == "all":
        raise ConfigError(
            f"{c.where} has 'use_bidirectional_attention' \"all\", which memcalc does not describe; remove it."
        )
    hidden, vocab, depth = c.integer("hidden_size"), c.integer("vocab_size"), c.integer("num_hidden_layers")
    windows = windows_from(c, [(i + 1) % 6 != 0 for i in range(depth)], c.integer("sliding_window"))
    windows[-1] = None
    shared = c.integer("num_kv_shared_layers", minimum=0)
    if shared >= depth or set(windows[: depth - shared]) != set(windows):
        raise ConfigError(
            f"{c.where} has 'num_kv_shared_layers' {shared} of {depth} layers, whose keys and values no earlier layer "
            "of the same type makes; correct it."
        )
    modes = sharing_modes(windows, shared)
    own_width = c.integer("hidden_size_per_layer_input", minimum=0)
    act, width = c.text("hidden_activation"), c.integer("intermediate_size")
    whole_heads = c.optional("num_global_key_value_heads") if c.flag("attention_k_eq_v") else None
    kv_heads = {True: whole_heads or c.integer("num_key_value_heads"), False: c.integer("num_key_value_heads")}
    head_dims = {True: c.integer("global_head_dim", 512), False: c.head_dim()}

    def build(layer: int) -> Module:
        full = windows[layer] is None
        attention = SharingAttention(
            hidden,
            c.integer("num_attention_heads"),
            kv_heads[full],
            head_dims[full],
            window=windows[layer],
            sharing=modes[layer],
            bias=c.flag("attention_bias"),
            dropout=c.probability("attention_dropout"),
            values_are_keys=full and c.flag("attention_k_eq_v"),
        )
        wide = c.flag("use_double_wide_mlp") and modes[layer] == "reuse"
        mlp = GatedMLP(hidden, width * (2 if wide else 1), act)
        return Gemma4Block(hidden, attention, mlp, _experts(c), (own_width, act) if own_width else None)

    embedding = ScaledEmbedding(vocab, hidden)
    tables = iter([head_dims[window is None] for window in sorted_windows(windows)])
    decoder = Gemma4TextModel(
        embedding,
        Stack(list(zip(windows, modes, strict=True)), build),
        PowerRMSNorm(hidden),
        RotaryByWindow(sorted_windows(windows), lambda: RotaryEmbedding(next(tables))),
        sorted_windows([None, c.integer("sliding_window")]),
    )
    if own_width:
        decoder.add_layer_inputs(hidden, c.integer("vocab_size_per_layer_input"), own_width)
    caps = SOFT_CAP if c.has("final_logit_softcapping") else ()
    tied = c.flag("tie_word_embeddings")
    return heads.decoder(c, architecture, decoder, hidden, embedding, tied=tied, logit_transforms=caps)


def _experts(c: Config) -> Experts | None:
    if not c.flag("enable_moe_block"):
        return None
    hidden, gate = c.integer("hidden_size"), swiglu(activation(c.text("hidden_activation")))
    width, count = c.integer("moe_intermediate_size"), c.integer("num_experts")
    return Experts(hidden, width, count, c.within("top_k_experts", "num_experts"), gate)


FAMILIES = table(
    Family(
        "gemma4_text",
        gemma4_text,
        sizes(
            (262144, 2304, 9216, 30, 8, 4, 131072),
            head_dim=256,
            hidden_activation="gelu_pytorch_tanh",
            attention_dropout=0.0,
            sliding_window=512,
            vocab_size_per_layer_input=262144,
            hidden_size_per_layer_input=256,
            num_kv_shared_layers=0,
            pad_token_id=0,
            tie_word_embeddings=True,
        ),
        kinds="decoder with shared keys and values, experts",
    )
)
