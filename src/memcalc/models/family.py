"""What a family of models is: how one is built from a config, and Transformers' values for keys that are left out."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, Literal

if TYPE_CHECKING:
    from memcalc.config.reader import Config
    from memcalc.nn.model import Network

MEASURED: Final = "measured rows, exact counts"


@dataclass(frozen=True, slots=True)
class Family:
    """A family of models.

    model_type: that of its config.json.
    build: the model of a config and of a head's class name (None: the family's usual head).
    defaults: the config values of Transformers for keys that a config leaves out; switches not named are off.
    aliases: other names of keys.
    blocks: how the model is run.
    attention: the implementations that Transformers has for it; the first is used where the requested one is missing.
    verified: what stands behind the numbers.
    supports: what it is computed for.
    kinds: for people, what its blocks are where they are not all attention and an MLP.
    positions_of_target: `max_position_embeddings` is about what the decoder writes, not about the sequence length.
    attention_assumed: its code is its repository's own, and is taken to attend as Transformers' family does.
    """

    model_type: str
    build: Callable[[Config, str | None], Network]
    defaults: Mapping[str, object]
    aliases: Mapping[str, str] = field(default_factory=dict)
    blocks: Literal["decoder", "encoder", "encoder-decoder"] = "decoder"
    attention: str = "eager, sdpa, flash"
    verified: str = MEASURED
    supports: str = "training, inference, LoRA"
    kinds: str = ""
    attention_assumed: bool = False
    positions_of_target: bool = False

    @property
    def is_measured(self) -> bool:
        """Whether measured rows stand behind the numbers."""
        return "measured rows" in self.verified

    def attention_used(self, asked: str) -> str:
        """The attention implementation that runs when `asked` is requested: eager where the family does not have it."""
        return asked if asked in self.attention.split(", ") else "eager"


def table(*families: Family) -> dict[str, Family]:
    """Families by their model type."""
    return {family.model_type: family for family in families}


_TEXT = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "max_position_embeddings",
)
_IMAGE = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "image_size",
    "patch_size",
    "num_channels",
)


def sizes(columns: tuple[int, int, int, int, int, int, int], **more: object) -> dict[str, object]:
    """Config values of a text model: (vocab, hidden, MLP, layers, heads, KV heads, positions), 0 for none, and others
    by name."""
    return _named(_TEXT, columns) | more


def llama_sizes(columns: tuple[int, int, int, int, int, int, int], **more: object) -> dict[str, object]:
    """The same, with SiLU and a head of its own unless `more` says otherwise."""
    return sizes(columns) | {"hidden_act": "silu", "tie_word_embeddings": False} | more


def vit_sizes(columns: tuple[int, int, int, int, int, int, int], **more: object) -> dict[str, object]:
    """Config values of an image network: (hidden, MLP, layers, heads, image, patch, channels), 0 for none, and others
    by name."""
    return _named(_IMAGE, columns) | more


def _named(names: tuple[str, ...], columns: tuple[int, ...]) -> dict[str, object]:
    return {name: number for name, number in zip(names, columns, strict=True) if number}
