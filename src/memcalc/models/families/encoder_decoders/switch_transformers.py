"""Switch Transformers: T5 in which some blocks have experts, of which each token meets one.

Source: transformers/models/switch_transformers 5.24. How many tokens an expert gets is data; here every expert gets the
same share, and none overflows.
"""

from __future__ import annotations

from memcalc import ops
from memcalc.autograd.tensor import Tensor
from memcalc.config.reader import Config
from memcalc.errors import ConfigError
from memcalc.models.common.heads import unknown_head
from memcalc.models.families.encoder_decoders.t5 import T5ForConditionalGeneration, T5Stack
from memcalc.models.families.encoder_decoders.t5_model import PlainDense
from memcalc.models.family import Family, table
from memcalc.nn.layers.looped_experts import EVEN_SHARES
from memcalc.nn.layers.masks import OWN_ONES_NOTE, bidirectional_mask, causal_mask
from memcalc.nn.model import Network
from memcalc.nn.module import Module, Parameter
from memcalc.nn.run_context import run_context
from memcalc.ops.jitter import jitter_
from memcalc.tables.dtypes import BOOL, FP32, INT64


class Top1Router(Module):
    """The best expert of each token, in fp32; the tokens of a sequence that overflow an expert's capacity are cut."""

    def __init__(self, c: Config) -> None:
        self.count, hidden = c.integer("num_experts"), c.integer("d_model")
        self.weight = Parameter(self.count, hidden, dtype=FP32, group="experts")
        self.bias = Parameter(self.count, dtype=FP32, group="experts") if c.flag("router_bias") else None

    def forward(self, hidden: Tensor, noisy: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Tokens [b, s, h], and as fp32 with noise, to places [b, s, experts], weights [b, s, 1] and logits."""
        logits = ops.linear(noisy, self.weight, self.bias)
        probs = ops.to(ops.softmax(logits, FP32), hidden.dtype)
        chosen = hidden.tape.empty(logits.shape, INT64)
        priority = ops.empty_like(chosen)
        fits = ops.empty_like(priority, BOOL)
        chosen = ops.empty_like(chosen)
        weights = ops.unsqueeze(ops.max(probs)[0], -1)
        del priority, fits
        return chosen, weights, logits


class SwitchExperts(Module):
    """The experts, one after another, each over its share of the tokens."""

    assumption = EVEN_SHARES

    def __init__(self, c: Config) -> None:
        hidden, width, act = c.integer("d_model"), c.integer("d_ff"), c.text("dense_act_fn")
        self.experts: list[Module] = [PlainDense(hidden, width, act, c) for _ in range(c.integer("num_experts"))]

    def forward(self, hidden: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        """Tokens [n, h], places [n, 1, experts] and weights [n, 1] to [n, h]."""
        tape, (tokens, width) = hidden.tape, hidden.shape
        total = ops.empty_like(hidden.detach())
        counts = tape.empty((len(self.experts),), INT64)
        some = ops.empty_like(counts, BOOL)
        del counts
        hit = tape.empty((len(self.experts), 1), INT64)
        del some
        share = -(-tokens // len(self.experts))
        for expert in self.experts[:tokens]:
            of_expert = tape.empty((1, 1, tokens), INT64)
            places = tape.empty((2, share), INT64)
            del of_expert
            slot, token = ops.select(places, 0), ops.select(places, 0)
            del places
            rows = ops.reshape(ops.index(hidden, token), -1, width)
            made = ops.mul(expert(rows), ops.index(ops.unsqueeze(weights, 2), token, slot))
            total = ops.index_add_(total, token, ops.to(made, hidden.dtype))
        del hit, chosen
        return total


class SwitchMixture(Module):
    """Router and experts. In training noise multiplies what the router reads; where that is in fp32 already, it does so
    in place, and the experts read it too."""

    scope = "experts"

    def __init__(self, c: Config) -> None:
        self.noisy = c.number("router_jitter_noise", 0.01) > 0
        self.router = Top1Router(c)
        self.experts = SwitchExperts(c)

    def forward(self, hidden: Tensor) -> Tensor:
        """[b, s, h] to [b, s, h]."""
        noisy = ops.to(hidden, FP32)
        in_place = noisy is hidden
        if self.noisy and run_context(hidden).training:
            noisy = jitter_(noisy)
        if in_place:
            hidden = noisy
        chosen, weights, _logits = self.router(hidden, noisy)
        del noisy
        flat = ops.view(hidden, -1, hidden.shape[-1])
        made = self.experts(flat, chosen, ops.view(weights, -1, 1))
        return ops.reshape(made, *hidden.shape)


class SwitchStack(T5Stack):
    """A stack that makes a mask of ones where it gets none."""

    assumption = OWN_ONES_NOTE

    def kind(self, c: Config, layer: int, *, decoder: bool) -> str:
        """Whether a block has experts."""
        depth = c.integer("num_layers")
        depth = c.integer("num_decoder_layers", depth) if decoder else depth
        sparse = c.integer(f"num_sparse_{'decoder' if decoder else 'encoder'}_layers", 3, minimum=0)
        step = depth // sparse if sparse else depth
        return "experts" if step == 1 or (step and layer % step == 1) else "MLP"

    def inner(self, c: Config, kind: str) -> Module:
        """Experts, or two dense layers."""
        if kind == "experts":
            return SwitchMixture(c)
        return PlainDense(c.integer("d_model"), c.integer("d_ff"), c.text("dense_act_fn"), c)

    def masks(
        self, embeds: Tensor, padding: bool, states: Tensor | None, past: int
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """As of T5Stack; the encoder adds its mask to the scores."""
        tape, (batch, length, _) = embeds.tape, embeds.shape
        ones = tape.empty((batch, past + length), FP32)
        if states is None:
            mask = ops.to(ops.view(ones, batch, 1, 1, length), embeds.dtype)
            mask = ops.mul_scalar(ops.add_scalar(mask))
            return mask, None, ones
        mask_of_own = causal_mask(embeds, True, past=past)
        return mask_of_own, bidirectional_mask(embeds, padding, states.shape[1]), ones


class SwitchTransformersForConditionalGeneration(T5ForConditionalGeneration):
    """T5 of such stacks."""

    stack = SwitchStack


def switch_transformers(c: Config, architecture: str | None) -> Network:
    """Switch Transformers of every size."""
    known = "SwitchTransformersForConditionalGeneration"
    if architecture not in (None, known):
        raise unknown_head(c, str(architecture), (known,))
    if c.text("router_dtype", "float32") != "float32" or c.flag("output_router_logits"):
        raise ConfigError(
            f"{c.where} asks for 'router_dtype' or 'output_router_logits', which memcalc does not describe here; leave "
            "them out."
        )
    return SwitchTransformersForConditionalGeneration(c, scaled=c.flag("tie_word_embeddings", True))


FAMILIES = table(
    Family(
        "switch_transformers",
        switch_transformers,
        {
            "vocab_size": 32128,
            "d_model": 768,
            "d_kv": 64,
            "d_ff": 2048,
            "num_layers": 12,
            "num_heads": 12,
            "num_experts": 8,
            "relative_attention_num_buckets": 32,
            "dropout_rate": 0.1,
            "dense_act_fn": "relu",
        },
        {
            "hidden_size": "d_model",
            "num_attention_heads": "num_heads",
            "num_hidden_layers": "num_layers",
            "head_dim": "d_kv",
        },
        blocks="encoder-decoder",
        attention="eager",
        kinds="encoder-decoder, experts",
    )
)
