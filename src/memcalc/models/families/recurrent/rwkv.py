"""RWKV 4: a recurrence over tokens in place of attention, and MLPs that look one token back."""

from __future__ import annotations

from collections.abc import Sequence

from memcalc import ops
from memcalc.autograd.tensor import Tensor
from memcalc.common.assumption import Assumption
from memcalc.config.reader import DEEPEST, Config
from memcalc.errors import ConfigError
from memcalc.models.common.heads import decoder
from memcalc.models.family import Family, table
from memcalc.nn.layers.linear import Embedding, Linear
from memcalc.nn.layers.norms import LayerNorm
from memcalc.nn.layers.recurrent.token_loop import token_steps
from memcalc.nn.model import Network
from memcalc.nn.module import Module, Parameter
from memcalc.nn.run_context import run_context
from memcalc.nn.stack import Stack
from memcalc.tables.dtypes import FP32

STATES = ("last inputs of MLPs", "last inputs of recurrences", "numerators", "denominators", "maxima")
"""What generation keeps, each [b, h, layers]: the last three in fp32, the others in the dtype of the model."""


def _mixed(hidden: Tensor, shifted: Tensor, mix: Tensor) -> Tensor:
    return ops.add(ops.mul(hidden, mix), ops.mul(shifted, ops.add_scalar(mix)))


def _shifted(hidden: Tensor, before: Tensor | None) -> Tensor:
    """Each token's predecessor [b, s, h], of which generation has kept the first, a state `before` [b, h, layers].

    For one token it is that state [b, h] alone: with several sequences, each then meets the states of all.
    """
    if before is not None and hidden.shape[1] == 1:
        return ops.select(before, 2)
    return ops.pad(hidden, 1, 0)


def _wkv(decay: Tensor, first: Tensor, key: Tensor, value: Tensor, state: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
    """The recurrence over key and value [b, s, a] from a state, and its last one: three of [b, a] in fp32, or none.

    What a token makes stays bound until the next one's takes its place.
    """
    tape, length = key.tape, key.shape[1]
    out = ops.empty_like(key)
    if not state:
        one = ops.select(key.detach(), 1)
        numerator, denominator, largest = (
            ops.empty_like(one, FP32),
            ops.empty_like(one, FP32),
            ops.add_scalar(ops.empty_like(one, FP32)),
        )
        del one
    else:
        numerator, denominator, largest = state
    decay = ops.neg(ops.exp(decay))
    for _ in token_steps(tape, length):
        k = ops.to(ops.select(key, 1), FP32)
        v = ops.select(value, 1)
        now = ops.maximum(largest, ops.add(k, first))
        e1 = ops.exp(ops.sub(largest, now))
        e2 = ops.exp(ops.sub(ops.add(k, first), now))
        above = ops.add(ops.mul(e1, numerator), ops.mul(e2, v))
        below = ops.add(ops.mul(e1, denominator), e2)
        out = ops.copy_slice_(out, ops.to(ops.div(above, below), out.dtype))
        new = ops.maximum(ops.add(largest, decay), k)
        e1 = ops.exp(ops.sub(ops.add(largest, decay), new))
        e2 = ops.exp(ops.sub(k, new))
        numerator = ops.add(ops.mul(e1, numerator), ops.mul(e2, v))
        denominator = ops.add(ops.mul(e1, denominator), e2)
        largest = new
    return out, [numerator, denominator, largest]


class TimeMix(Module):
    """RWKV's recurrence in plain PyTorch, token by token."""

    scope = "recurrence"
    assumption = Assumption(
        "rwkv_recurrence",
        "the recurrence of RWKV runs token by token in plain PyTorch, as Transformers does where it finds no compiled "
        "kernel; with one it takes much less",
    )

    def __init__(self, hidden: int, inner: int) -> None:
        self.time_decay = Parameter(inner, group="recurrence")
        self.time_first = Parameter(inner, group="recurrence")
        self.time_mix_key = Parameter(1, 1, hidden, group="recurrence")
        self.time_mix_value = Parameter(1, 1, hidden, group="recurrence")
        self.time_mix_receptance = Parameter(1, 1, hidden, group="recurrence")
        self.key = Linear(hidden, inner, group="recurrence")
        self.value = Linear(hidden, inner, group="recurrence")
        self.receptance = Linear(hidden, inner, group="recurrence")
        self.output = Linear(inner, hidden, group="recurrence")

    def forward(self, hidden: Tensor, states: Sequence[Tensor] = ()) -> Tensor:
        """[b, s, h] to [b, s, h]; generation's states are written to."""
        receptance, key, value = self._project(hidden, states[1] if states else None)
        own = [ops.select(state, 2) for state in states[2:]]
        wkv, last = _wkv(self.time_decay, self.time_first, key, value, own)
        if not states:
            last.clear()
        return self.output(ops.mul(receptance, wkv))

    def _project(self, hidden: Tensor, before: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        shifted = _shifted(hidden, before)
        key = _mixed(hidden, shifted, self.time_mix_key)
        value = _mixed(hidden, shifted, self.time_mix_value)
        receptance = _mixed(hidden, shifted, self.time_mix_receptance)
        key = self.key(key)
        value = self.value(value)
        receptance = ops.sigmoid(self.receptance(receptance))
        return receptance, key, value


class ChannelMix(Module):
    """RWKV's MLP: a squared ReLU after a gate, on tokens mixed with those before them."""

    scope = "MLP"

    def __init__(self, hidden: int, width: int) -> None:
        self.time_mix_key = Parameter(1, 1, hidden, group="MLP")
        self.time_mix_receptance = Parameter(1, 1, hidden, group="MLP")
        self.key = Linear(hidden, width, group="MLP")
        self.receptance = Linear(hidden, hidden, group="MLP")
        self.value = Linear(width, hidden, group="MLP")

    def forward(self, hidden: Tensor, states: Sequence[Tensor] = ()) -> Tensor:
        """[b, s, h] to [b, s, h]."""
        shifted = _shifted(hidden, states[0] if states else None)
        key = _mixed(hidden, shifted, self.time_mix_key)
        receptance = _mixed(hidden, shifted, self.time_mix_receptance)
        key = ops.pow(ops.relu(self.key(key)))
        value = self.value(key)
        receptance = ops.sigmoid(self.receptance(receptance))
        return ops.mul(receptance, value)


class RwkvBlock(Module):
    """A norm and the recurrence, a norm and the MLP, each added; the first block has a norm in front.

    Generation halves what a block gives if it is `halved`.
    """

    scope = "residual stream"

    def __init__(self, hidden: int, inner: int, width: int, *, first: bool, halved: bool) -> None:
        self.halved = halved
        self.pre_ln = LayerNorm(hidden) if first else None
        self.ln1 = LayerNorm(hidden)
        self.ln2 = LayerNorm(hidden)
        self.attention = TimeMix(hidden, inner)
        self.feed_forward = ChannelMix(hidden, width)

    def forward(self, hidden: Tensor, states: Sequence[Tensor] = ()) -> Tensor:
        """[b, s, h] to [b, s, h]."""
        hidden = self._run(hidden, states)
        return ops.mul_scalar(hidden) if self.halved and not run_context(hidden).training else hidden

    def _run(self, hidden: Tensor, states: Sequence[Tensor]) -> Tensor:
        if self.pre_ln is not None:
            hidden = self.pre_ln(hidden)
        attention = self.attention(self.ln1(hidden), states=states)
        hidden = ops.add(hidden, attention)
        feed_forward = self.feed_forward(self.ln2(hidden), states=states)
        return ops.add(hidden, feed_forward)


class RwkvModel(Module):
    """Embedding, blocks and a final norm."""

    def __init__(self, embeddings: Module, blocks: Stack, norm: Module, inner: int) -> None:
        self.inner = inner
        self.embeddings = embeddings
        self.blocks = blocks
        self.ln_out = norm

    def forward(self, ids: Tensor, padding: bool) -> Tensor:
        """Ids [b, s] to hidden states [b, s, h]; there is no mask."""
        embeds = self.embeddings(ids)
        states = self._states(embeds)
        hidden = embeds
        for block in self.blocks:
            hidden = block(hidden, states=states)
        return self.ln_out(hidden)  # type: ignore[no-any-return]

    def _states(self, embeds: Tensor) -> list[Tensor]:
        """What generation keeps between tokens, made at its first call."""
        cache = run_context(embeds).cache
        if cache is None:
            return []
        shape = (embeds.shape[0], embeds.shape[2], self.blocks.depth)
        dtypes = (embeds.dtype, embeds.dtype, FP32, FP32, FP32)
        if self.inner != embeds.shape[2]:
            raise ConfigError(
                f"generation keeps states as wide as 'hidden_size' {embeds.shape[2]}, but 'attention_hidden_size' is "
                f"{self.inner}, which Transformers cannot run; make them equal."
            )
        return [cache.state(self, shape, dtype, embeds, name) for name, dtype in zip(STATES, dtypes, strict=True)]


def rwkv(c: Config, architecture: str | None) -> Network:
    """RWKV 4 in every size, without the compiled kernel."""
    hidden, depth = c.integer("hidden_size"), c.integer("num_hidden_layers")
    inner, width = c.integer("attention_hidden_size", hidden), c.integer("intermediate_size", 4 * hidden)
    embedding = Embedding(c.integer("vocab_size"), hidden)
    every = c.integer("rescale_every", minimum=-DEEPEST)
    halved = [every > 0 and (layer + 1) % every == 0 for layer in range(depth)]
    blocks = Stack(halved, lambda layer: RwkvBlock(hidden, inner, width, first=layer == 0, halved=halved[layer]))
    model = RwkvModel(embedding, blocks, LayerNorm(hidden), inner)
    return decoder(c, architecture, model, hidden, embedding, tied=c.flag("tie_word_embeddings"))


FAMILIES = table(
    Family(
        "rwkv",
        rwkv,
        {
            "vocab_size": 50277,
            "hidden_size": 4096,
            "num_hidden_layers": 32,
            "rescale_every": 6,
            "tie_word_embeddings": False,
        },
        attention="eager",
        kinds="RWKV",
    )
)
