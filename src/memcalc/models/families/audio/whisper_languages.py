"""Language models that hear through Whisper's encoder: Voxtral and Qwen2-Audio.

A recording takes as many tokens of a sequence as the encoder gives for its fixed length.
"""

from __future__ import annotations

from typing import Any

from memcalc import ops
from memcalc.autograd.tape import OVERHEAD
from memcalc.autograd.tensor import Tensor
from memcalc.common.assumption import Assumption
from memcalc.common.image_sides import ImageSize
from memcalc.config.reader import Config
from memcalc.errors import ConfigError, UsageError
from memcalc.models.common.vision_encoder import ImageFeatures, VisionEncoder
from memcalc.models.common.vision_language import VisionLanguage, language_model
from memcalc.models.families.audio.whisper import Conv, whisper_blocks
from memcalc.models.family import Family, table
from memcalc.models.vision_towers.registry import Projector
from memcalc.nn.kv_cache import Cache
from memcalc.nn.layers.linear import Linear
from memcalc.nn.layers.masks import bidirectional_mask
from memcalc.nn.layers.norms import LayerNorm
from memcalc.nn.layers.position_embeddings import FrozenTable
from memcalc.nn.model import IMAGES, Batch, Network
from memcalc.nn.module import Module
from memcalc.nn.run_context import run_context
from memcalc.nn.towers import as_tower
from memcalc.tables.dtypes import BOOL, FP32, INT64


class AudioTower(Module):
    """Whisper's encoder: two convolutions, positions, blocks and a LayerNorm.

    pools: the mean of every two states goes to the norm, and positions are in the weights' dtype (Qwen2-Audio).
    """

    def __init__(self, a: Config, *, pools: bool) -> None:
        hidden, self.mels, self.length = (
            a.integer("d_model"),
            a.integer("num_mel_bins"),
            a.integer("max_source_positions"),
        )
        self.conv1 = Conv(self.mels, hidden, 1)
        self.conv1.is_input_embedding = True
        self.conv2 = Conv(hidden, hidden, 2)
        self.embed_positions = FrozenTable(self.length, hidden, dtype=None if pools else FP32)
        self.layers = whisper_blocks(a, "encoder")
        self.layer_norm = LayerNorm(hidden)
        self.dropout, self.pools = a.probability("dropout"), pools

    def forward(self, features: Tensor, mask: Tensor | None) -> Tensor:
        """Mel features [n, mels, 2 s] to states [n, s, h], or [n, s / 2, h] where it pools."""
        embeds = ops.gelu(self.conv1(features))
        embeds = ops.gelu(self.conv2(embeds))
        embeds = ops.permute(embeds, 0, 2, 1)
        hidden = ops.add(embeds, self.embed_positions.weight)
        if not self.pools:
            hidden = ops.to(hidden, embeds.dtype)
        hidden = ops.dropout(hidden, self.dropout)
        for layer in self.layers:
            hidden = layer(hidden, mask)
        if self.pools:
            wide = ops.unsqueeze(ops.permute(hidden, 0, 2, 1), 2)
            pooled = ops.avg_pool2d(wide, 2, 1)
            hidden = ops.permute(ops.squeeze(pooled, 2), 0, 2, 1)
        return self.layer_norm(hidden)


class AudioEncoder(VisionEncoder):
    """The tower and its projection to the decoder's width. A recording is as long as the tower's positions."""

    def __init__(self, a: Config, tower: AudioTower, projector: Module, count: int) -> None:
        self.config, self.count = a, count
        self.audio_tower = tower
        self.multi_modal_projector = projector
        self.assumption = Assumption(
            "recordings",
            f"a recording of the encoder's full length ({tower.length} positions) takes {count} tokens of a sequence; "
            "--images-per-sequence says how many recordings each has",
        )

    def tokens(self, size: ImageSize) -> int:
        """As many for every recording. Raises UsageError where a size of images is asked for."""
        if size is not None:
            raise UsageError("--image-size is for models that see, and this one hears; leave it out.")
        return self.count

    def mel_features(self, batch: Batch) -> Tensor:
        """Mel features [n, mels, 2 s] of the recordings of a batch, an input of the step."""
        tape, tower = batch.ids.tape, self.audio_tower
        shape = (batch.ids.shape[0] * batch.images, tower.mels, 2 * tower.length)
        return tape.external_tensor(shape, run_context(tape).weights_dtype, OVERHEAD, IMAGES)


class VoxtralEncoder(AudioEncoder):
    """Every few states are one token."""

    def encode_images(self, batch: Batch) -> ImageFeatures:
        """Features of the recordings of a batch [n, width]."""
        states = self.audio_tower(self.mel_features(batch), None)
        states = ops.reshape(states, -1, vars(self.multi_modal_projector)["linear_1"].inputs)
        return ImageFeatures(self.multi_modal_projector(states), ())


class Hearing(VisionLanguage):
    """A decoder that hears."""

    def image_side(self, size: ImageSize) -> int | None:
        """It takes no images."""
        return None


class LinearProjector(Module):
    """Qwen2-Audio's: one linear layer."""

    def __init__(self, hidden: int, width: int) -> None:
        self.linear = Linear(hidden, width, bias=True)

    def forward(self, states: Tensor) -> Tensor:
        """[..., h] to [..., width]."""
        return self.linear(states)


class Qwen2Audio(Hearing):
    """It masks what of a recording is padding, and keeps the states that are not."""

    visual: AudioEncoder

    def _read(self, batch: Batch) -> tuple[Tensor, tuple[Any, ...], tuple[Any, ...]]:
        ids, tape, encoder = batch.ids, batch.ids.tape, self.visual
        run = run_context(tape)
        embeds: Tensor = vars(self.text.model)["embed_tokens"](ids)
        held: list[object] = []
        outer, run.cache = run.cache, None
        if batch.images and (outer is None or not outer.length):
            self.check_tokens(batch)
            embeds, held = self._merged(batch, encoder, embeds)
        run.cache = outer
        made = Cache() if outer is None and self.caches and not run.checkpointing else None
        run.cache = outer or made
        hidden = self.text.model(ids, batch.padding, embeds=embeds)
        run.cache = outer
        del held
        return hidden, (made,), ()

    def _merged(self, batch: Batch, encoder: AudioEncoder, embeds: Tensor) -> tuple[Tensor, list[object]]:
        """The embeddings with states in place of audio tokens, and what stays until the decoder is through."""
        ids, tape, tower = batch.ids, batch.ids.tape, encoder.audio_tower
        features = encoder.mel_features(batch)
        count = features.shape[0]
        lengths = [tape.empty((count,), INT64) for _ in range(2)]
        places = tape.empty((tower.length,), INT64)
        padding = tape.empty((count, tower.length), BOOL)
        heard = tape.empty((count, tower.length), INT64)
        dummy = tape.empty((count, tower.length, 1), embeds.dtype)
        mask = bidirectional_mask(dummy, True)
        states = tower(features, mask)
        chosen = encoder.multi_modal_projector(states)
        tokens = ops.compare(ids)
        follow = tape.empty((), BOOL)
        kept = tape.empty((count, chosen.shape[1]), BOOL)
        chosen = ops.index_mask(chosen, kept, count * chosen.shape[1])
        where = ops.unsqueeze(ops.compare(ids), -1)
        chosen = ops.to(chosen, embeds.dtype)
        merged = ops.masked_scatter(embeds, where, chosen)
        return merged, [lengths, places, padding, heard, dummy, mask, states, tokens, follow, kept, chosen, where]


def voxtral(c: Config, architecture: str | None) -> Network:
    """Voxtral: Llama behind Whisper."""
    text = language_model(c, "llama", tied=c.flag("tie_word_embeddings"), given=_missing(c, _MINISTRAL))
    a = c.nested("audio_config", _WHISPER, _ALIASES)
    hidden, width = a.integer("d_model"), a.integer("encoder_ffn_dim")
    if width % hidden or a.integer("max_source_positions") % (width // hidden):
        raise ConfigError(
            f"{a.where} has 'intermediate_size' {width}, into which no whole number of states of {hidden} fits, or one "
            "that does not divide 'max_source_positions'; correct one."
        )
    projector = Projector(width, text.model.lm_head.weight.shape[1], c.text("projector_hidden_act"), bias=False)
    tower = AudioTower(a, pools=False)
    return Hearing(_as_ears(VoxtralEncoder(a, tower, projector, tower.length * hidden // width)), text, own_cache=True)


def qwen2_audio(c: Config, architecture: str | None) -> Network:
    """Qwen2-Audio: Qwen 2 behind Whisper."""
    text = language_model(c, "qwen2", tied=c.flag("tie_word_embeddings"))
    text.model.shifts_logits = True
    a = c.nested("audio_config", _WHISPER, _ALIASES)
    projector = LinearProjector(a.integer("d_model"), text.model.lm_head.weight.shape[1])
    tower = AudioTower(a, pools=True)
    encoder = _as_ears(AudioEncoder(a, tower, projector, (tower.length - 2) // 2 + 1))
    return Qwen2Audio(encoder, text, own_cache=True)


def _as_ears(encoder: AudioEncoder) -> AudioEncoder:
    return as_tower(encoder, "audio", "audio tower")


def _missing(c: Config, defaults: dict[str, object]) -> dict[str, object]:
    """The defaults that `text_config` does not give."""
    given = c.section("text_config")
    return {key: value for key, value in defaults.items() if key not in given}


_ALIASES = {
    "hidden_size": "d_model",
    "num_hidden_layers": "encoder_layers",
    "num_attention_heads": "encoder_attention_heads",
    "intermediate_size": "encoder_ffn_dim",
}
_WHISPER: dict[str, object] = {
    "d_model": 1280,
    "encoder_layers": 32,
    "encoder_attention_heads": 20,
    "encoder_ffn_dim": 5120,
    "num_mel_bins": 128,
    "max_source_positions": 1500,
    "activation_function": "gelu",
    "dropout": 0.0,
    "attention_dropout": 0.0,
    "activation_dropout": 0.0,
}
_MINISTRAL: dict[str, object] = {
    "vocab_size": 131072,
    "hidden_size": 3072,
    "intermediate_size": 8192,
    "num_hidden_layers": 30,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
    "head_dim": 128,
}

FAMILIES = table(
    Family(
        "voxtral", voxtral, {"projector_hidden_act": "gelu", "tie_word_embeddings": False}, kinds="audio tower, decoder"
    ),
    Family("qwen2_audio", qwen2_audio, {"tie_word_embeddings": False}, kinds="audio tower, decoder"),
)
