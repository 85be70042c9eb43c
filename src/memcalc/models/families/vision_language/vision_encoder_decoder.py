"""A text decoder that looks at the states of an image network (VisionEncoderDecoderModel): TrOCR, GPT-2."""

from __future__ import annotations

from memcalc.autograd.tensor import Tensor
from memcalc.common.escaping import quoted
from memcalc.config.reader import Config
from memcalc.errors import ConfigError
from memcalc.models.common.heads import unknown_head
from memcalc.models.common.image_models import ImageEmbedder, picture
from memcalc.models.common.seq2seq import decoder_cache, decoder_input, encoded
from memcalc.models.families.vision_language.gpt2_over_states import GPT2OverStates
from memcalc.models.families.vision_language.trocr import TROCR_DEFAULTS, TrocrDecoder
from memcalc.models.family import Family, table
from memcalc.nn.kv_cache import Cache
from memcalc.nn.layers.linear import Linear
from memcalc.nn.layers.losses import token_loss
from memcalc.nn.layers.vision_transformer import VisionTower
from memcalc.nn.model import Batch, Network, Outputs

ENCODERS = ("vit", "deit")
"""Image networks whose states a decoder was measured to read."""


class VisionEncoderDecoder(Network):
    """Generation encodes the image, and begins with a start token."""

    main_input = "pixel_values"
    source_is_text = False

    def __init__(self, c: Config) -> None:
        vision, text = _encoder(c), _text(c)
        self.config, hidden = vision, vision.integer("hidden_size")
        given, width = text.optional("cross_attention_hidden_size"), text.integer("hidden_size")
        if given is not None and given != hidden:
            raise ConfigError(
                f"{text.where} has 'cross_attention_hidden_size' {given}, but the encoder's 'hidden_size' is {hidden}; "
                "they must agree."
            )
        self.encoder = _tower(vision)
        self.decoder = TrocrDecoder(text, given) if text.get("model_type") == "trocr" else GPT2OverStates(text)
        self.enc_to_dec_proj = Linear(hidden, width, bias=True) if given is None and hidden != width else None

    def forward(self, batch: Batch) -> Outputs:
        """Loss and logits."""
        cache = decoder_cache(batch.ids.tape, in_training=True)
        pooled: list[Tensor | None] = []  # unused, but there to the end
        if batch.labels is None and cache is not None:
            encoded(batch, cache, lambda _ids, _padding: self._encode(batch, cache, pooled))
        labels = None if batch.labels is None else batch.target()
        states = encoded(batch, cache, lambda _ids, _padding: self._encode(batch, cache, pooled))
        read = states if self.enc_to_dec_proj is None else self.enc_to_dec_proj(states)
        ids = decoder_input(batch, labels, cache)
        logits = self.decoder(ids, read, cache)
        if cache is not None:
            cache.past += ids.shape[1]
        with logits.tape.scoped("head and loss"):
            loss = None if labels is None else token_loss(logits, labels)
        return Outputs(loss, (logits, states, cache))

    def _encode(self, batch: Batch, cache: Cache | None, pooled: list[Tensor | None]) -> Tensor:
        states, vector, _ = self.encoder(picture(batch, self.config))
        pooled.append(vector)
        if cache is not None and vector is not None and batch.labels is None:
            cache.set_state(self, "pooled image", vector)  # `generate` keeps all that the encoder gave
        return states


def _encoder(c: Config) -> Config:
    from memcalc.models.registry import families, family

    section = c.section("encoder")
    kind = section.get("model_type")
    if kind not in ENCODERS or kind not in families():
        raise ConfigError(
            f"{c.where} has an 'encoder' of type {quoted(str(kind))}, but memcalc describes "
            f"{' and '.join(ENCODERS)} in this place; take such a model."
        )
    row = family(str(kind))
    return Config(section, row.defaults, row.aliases, f"{c.where}'s 'encoder'")


def _text(c: Config) -> Config:
    from memcalc.models.registry import family

    section, where = c.section("decoder"), f"{c.where}'s 'decoder'"
    if section.get("model_type") == "trocr":
        return Config(section, TROCR_DEFAULTS, {"d_model": "hidden_size"}, where)
    if section.get("model_type") != "gpt2":
        raise ConfigError(
            f"{c.where} has a 'decoder' of type {quoted(str(section.get('model_type')))}, but memcalc describes trocr "
            "and gpt2 in this place; take such a model."
        )
    row = family("gpt2")
    text = Config(section, row.defaults, row.aliases, where)
    if not text.flag("add_cross_attention") or text.optional("cross_attention_hidden_size") is not None:
        raise ConfigError(
            f"{where} needs 'add_cross_attention', to look at the image, and no 'cross_attention_hidden_size', which "
            "GPT-2 does not read; correct it."
        )
    return text


def _tower(vision: Config) -> VisionTower:
    from memcalc.models.registry import family

    network = family(str(vision.get("model_type"))).build(vision, "Model")
    assert isinstance(network, ImageEmbedder)
    tower: VisionTower = network.model
    return tower


def vision_encoder_decoder(c: Config, architecture: str | None) -> Network:
    """TrOCR and others of its make."""
    if architecture is not None and architecture != "VisionEncoderDecoderModel":
        raise unknown_head(c, architecture, ("VisionEncoderDecoderModel",))
    return VisionEncoderDecoder(c)


FAMILIES = table(
    Family("vision-encoder-decoder", vision_encoder_decoder, {}, blocks="encoder-decoder", attention="sdpa, eager")
)
