"""T5 and its relatives: encoder and decoder, relative position biases, RMS norms before each sublayer, no biases."""

from __future__ import annotations

from memcalc import ops
from memcalc.autograd.tensor import Tensor
from memcalc.config.reader import Config
from memcalc.models.common.heads import unknown_head
from memcalc.models.common.seq2seq import decoder_cache, decoder_input, encoded
from memcalc.models.families.encoder_decoders.t5_model import T5Block
from memcalc.models.family import Family, table
from memcalc.nn.kv_cache import Cache
from memcalc.nn.layers.linear import Embedding, Linear
from memcalc.nn.layers.losses import token_loss
from memcalc.nn.layers.masks import bidirectional_mask, causal_mask
from memcalc.nn.layers.norms import RMSNorm
from memcalc.nn.model import Batch, Network, Outputs
from memcalc.nn.module import Module
from memcalc.nn.stack import Stack


class T5Stack(Module):
    """Encoder or decoder. In T5 its first block makes the biases that all share; in UMT5 each makes its own."""

    def __init__(self, c: Config, table: Embedding, depth: int, *, decoder: bool, umt5: bool = False) -> None:
        self.embed_tokens = table
        kinds = [("block" if umt5 or i else "first", self.kind(c, i, decoder=decoder)) for i in range(depth)]
        self.block = Stack(
            kinds,
            lambda i: T5Block(c, has_bias=umt5 or i == 0, decoder=decoder, umt5=umt5, inner=self.inner(c, kinds[i][1])),
            name="decoder block" if decoder else "encoder block",
        )
        self.final_layer_norm = RMSNorm(c.integer("d_model"), scale_in="input")
        self.dropout = c.probability("dropout_rate")
        self.decoder, self.umt5 = decoder, umt5

    def kind(self, c: Config, layer: int, *, decoder: bool) -> str:
        """What the feed-forward of a block is."""
        return "MLP"

    def inner(self, c: Config, kind: str) -> Module | None:
        """A module for a feed-forward of that kind; None: T5's own."""
        return None

    def masks(
        self, embeds: Tensor, padding: bool, states: Tensor | None, past: int
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """The mask of a block's own tokens, that of the encoder's states, and what stays alive beside them."""
        if states is None:
            return bidirectional_mask(embeds, padding), None, None
        mask = causal_mask(embeds, False, past=past)
        return mask, bidirectional_mask(embeds, padding, states.shape[1]), None

    def forward(self, ids: Tensor, padding: bool, states: Tensor | None = None, cache: Cache | None = None) -> Tensor:
        """Ids [b, s], and the encoder's states [b, t, h] in a decoder, to hidden states [b, s, h]."""
        inputs_embeds = self.embed_tokens(ids)
        mask, states_mask, _kept = self.masks(inputs_embeds, padding, states, 0 if cache is None else cache.past)
        bias = cross_bias = None
        hidden = ops.dropout(inputs_embeds, self.dropout)
        for block in self.block:
            if self.umt5:
                hidden, _ = block(hidden, mask, states, states_mask=states_mask, cache=cache)
            else:
                hidden, (bias, cross_bias) = block(hidden, mask, states, bias, cross_bias, states_mask, cache=cache)
        hidden = self.final_layer_norm(hidden)
        return ops.dropout(hidden, self.dropout)


class T5EncoderModel(Network):
    """The encoder alone, as diffusion models use it for their prompts. There is no loss to train it on."""

    encodes_only = True

    def __init__(self, c: Config, *, umt5: bool) -> None:
        self.shared = Embedding(c.integer("vocab_size"), c.integer("d_model"))
        self.encoder = T5Stack(c, self.shared, c.integer("num_layers"), decoder=False, umt5=umt5)

    def forward(self, batch: Batch) -> Outputs:
        """Hidden states of the source."""
        return Outputs(None, (self.encoder(batch.ids, batch.padding),))


class T5ForConditionalGeneration(Network):
    """Encoder and decoder with one embedding table, and a head, which shares it unless the config unties it.

    Transformers' config classes force the tie, but a checkpoint that holds a head of its own (T5 1.1, mT5) keeps it.
    """

    stack: type[T5Stack] = T5Stack
    """What encoder and decoder are."""

    def __init__(self, c: Config, *, umt5: bool = False, scaled: bool) -> None:
        hidden, vocab = c.integer("d_model"), c.integer("vocab_size")
        depth = c.integer("num_layers")
        self.shared = Embedding(vocab, hidden)
        self.encoder = self.stack(c, self.shared, depth, decoder=False, umt5=umt5)
        self.decoder = self.stack(c, self.shared, c.integer("num_decoder_layers", depth), decoder=True, umt5=umt5)
        self.lm_head = Linear(hidden, vocab, group="LM head")
        if c.flag("tie_word_embeddings", True):
            self.lm_head.weight = self.shared.weight
        self.scaled = scaled

    def forward(self, batch: Batch) -> Outputs:
        """Loss and logits. In generation, the first call encodes and decodes a start token, later ones decode."""
        tape = batch.ids.tape
        cache = decoder_cache(tape, in_training=True)
        states = encoded(batch, cache, self.encoder)
        labels = None if batch.labels is None else batch.target()
        decoder_ids = decoder_input(batch, labels, cache)
        decoded = self.decoder(decoder_ids, batch.padding, states, cache)
        if cache is not None:
            cache.past += decoder_ids.shape[1]
        with tape.scoped("head and loss"):
            out = ops.mul_scalar(decoded) if self.scaled else decoded
            logits = self.lm_head(out)
            loss = None if labels is None else token_loss(logits, labels)
        return Outputs(loss, (logits, states, cache))


def t5(c: Config, architecture: str | None) -> Network:
    """T5 in all its versions: the original scales the decoder's output, version 1.1 (untied) does not."""
    return _conditional(c, architecture, umt5=False, scaled=c.get("tie_word_embeddings") is not False)


def mt5(c: Config, architecture: str | None) -> Network:
    """mT5: T5 1.1 without the scaling."""
    return _conditional(c, architecture, umt5=False, scaled=False)


def umt5(c: Config, architecture: str | None) -> Network:
    """UMT5: every block has a bias of its own."""
    return _conditional(c, architecture, umt5=True, scaled=c.get("tie_word_embeddings") is not False)


def _conditional(c: Config, architecture: str | None, *, umt5: bool, scaled: bool) -> Network:
    name = architecture or ""
    if name == "" or name.endswith(("ForConditionalGeneration", "WithLMHeadModel", "T5Model")):
        return T5ForConditionalGeneration(c, umt5=umt5, scaled=scaled)
    if name.endswith("EncoderModel"):
        return T5EncoderModel(c, umt5=umt5)
    raise unknown_head(c, name, ("ForConditionalGeneration", "EncoderModel"))


_DEFAULTS = {
    "d_model": 512,
    "d_kv": 64,
    "relative_attention_num_buckets": 32,
    "dropout_rate": 0.1,
    "classifier_dropout": 0.0,
}
_LATER = {
    **_DEFAULTS,
    "vocab_size": 250112,
    "d_ff": 1024,
    "num_layers": 8,
    "num_heads": 6,
    "feed_forward_proj": "gated-gelu",
}
_ALIASES = {
    "hidden_size": "d_model",
    "num_attention_heads": "num_heads",
    "num_hidden_layers": "num_layers",
    "head_dim": "d_kv",
}
FAMILIES = table(
    Family(
        "t5",
        t5,
        {**_DEFAULTS, "vocab_size": 32128, "d_ff": 2048, "num_layers": 6, "num_heads": 8, "feed_forward_proj": "relu"},
        _ALIASES,
        blocks="encoder-decoder",
        attention="eager, sdpa",
    ),
    Family("mt5", mt5, _LATER, _ALIASES, "encoder-decoder", "eager, sdpa", "measured rows, exact counts"),
    Family("umt5", umt5, _LATER, _ALIASES, "encoder-decoder", "eager, sdpa", "measured rows"),
)
