"""Reading a config.json's values: by name or alias, with the family's defaults, and an error that names the key."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from typing import cast

from memcalc.common.escaping import quoted
from memcalc.errors import ConfigError

LARGEST = 10**9
"""No size in a config is larger: a bigger one is a mistake, and would only make the arithmetic absurd."""

DEEPEST = 10**5
"""No model has more layers. They are listed one by one, so that a mistake here would fill the memory."""

DEEPEST_STAGE = 10**3
"""No stage of an image network has more blocks, which are traced one by one."""

_FURTHER_PARTS = ("vision_config", "visual", "audio_config", "audio", "vision_tower_config")
"""Objects that describe towers beside a decoder; one that nobody asks for would be left out in silence."""

_CHANGING_ATTENTION: Mapping[str, tuple[tuple[str, ...], str]] = {
    "sliding_window": (("use_sliding_window", "layer_types"), "has no sliding window"),
    "num_kv_shared_layers": ((), "has no layers that share their keys and values"),
    "kv_source_layer_ids": ((), "has no layers that share their keys and values"),
}
"""Keys that say that layers differ from what a family's layers are: other keys that take them up, and what to say."""


class Config:
    """The values of a config.json, seen by a family: aliases resolved, missing keys filled with the class's defaults.

    `defaults` holds what the family's Transformers config class takes for a key that the file leaves out.
    """

    def __init__(
        self,
        values: Mapping[str, object],
        defaults: Mapping[str, object] | None = None,
        aliases: Mapping[str, str] | None = None,
        where: str = "config.json",
    ) -> None:
        self.values = values
        self.defaults = defaults or {}
        self.aliases = aliases or {}
        self.where = where
        self.asked: set[str] = set()
        """Keys that were looked up: what a family does not ask for means nothing to it."""

    def get(self, key: str) -> object:
        """The value of `key`: as given, under its alias, or the default; None where there is none."""
        self.asked.add(key)
        names = (key, *(alias for alias, target in self.aliases.items() if target == key))
        for name in names:
            if self.values.get(name) is not None:
                return self.values[name]
        if any(name in self.values for name in names):  # null was written: it stands for what the class makes of it
            return None
        return self.defaults.get(key)

    def replaced(self, **values: object) -> Config:
        """The same config with other values for some keys; None stands for what the class makes of null."""
        other = Config({**self.values, **values}, self.defaults, self.aliases, self.where)
        other.asked = self.asked
        return other

    def check_unread(self, model_type: str) -> None:
        """Refuse what would change every layer's attention but was never asked for; call it when the family is built.

        Raises ConfigError.
        """
        for key, (readers, meaning) in _CHANGING_ATTENTION.items():
            value = self.values.get(key)
            if value and (type(value) is int or isinstance(value, list)) and self.asked.isdisjoint((key, *readers)):
                raise ConfigError(
                    f"{self.where} gives {key!r} as {quoted(value)}, but {model_type} {meaning}; remove it, or correct "
                    "'model_type'."
                )

        for key in _FURTHER_PARTS:
            part = self.values.get(key)
            if isinstance(part, Mapping) and part and key not in self.asked:
                raise ConfigError(
                    f"{self.where} has a part {key!r}, which {model_type} as memcalc knows it does not have; "
                    "`memcalc inspect` counts what the model's files hold, and without the part the text model is "
                    "estimated alone."
                )

    def has(self, key: str) -> bool:
        """Whether `key` has a value, given or by default."""
        return self.get(key) is not None

    def integer(self, key: str, default: int | None = None, *, minimum: int = 1) -> int:
        """A whole number of at least `minimum`."""
        value = self.get(key)
        if value is None:
            value = default
        if value is None:
            raise ConfigError(
                f"{self.where} has no {key!r}, which this family needs; add it or take a complete config.json."
            )
        if isinstance(value, str) and value.strip().isdigit():
            value = int(value)
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if isinstance(value, bool) or not isinstance(value, int):
            raise ConfigError(
                f"{self.where} gives {key!r} as {quoted(value)}, but it must be a whole number; correct it."
            )
        largest = DEEPEST if key.endswith(("layer", "layers", "depth")) else LARGEST
        largest = DEEPEST_STAGE if key == "depths" else largest
        if not minimum <= value <= largest:
            raise ConfigError(
                f"{self.where} gives {key!r} as {quoted(value)}, but it must lie in {minimum}..{largest}; correct it."
            )
        return value

    def optional(self, key: str, *, minimum: int = 1) -> int | None:
        """A whole number, or None where the config has none or null."""
        return None if self.get(key) is None else self.integer(key, minimum=minimum)

    def number(self, key: str, default: float | None = None) -> float:
        """A number; a string that spells one is taken for it."""
        value = self.get(key)
        if value is None:
            value = default
        if isinstance(value, str):
            with suppress(ValueError):
                value = float(value)
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not abs(value) <= LARGEST:
            raise ConfigError(f"{self.where} gives {key!r} as {quoted(value)}, but it must be a number; correct it.")
        return float(value)

    def factor(self, key: str, default: float | None = None) -> float:
        """A number above zero: one size over another."""
        value = self.number(key, default)
        if value <= 0:
            raise ConfigError(f"{self.where} gives {key!r} as {value}, but it must be above zero; correct it.")
        return value

    def probability(self, key: str, default: float | None = None) -> float:
        """A dropout probability in [0, 1]."""
        value = self.number(key, default)
        if not 0 <= value <= 1:
            raise ConfigError(f"{self.where} gives {key!r} as {value}, but a probability lies in [0, 1]; correct it.")
        return value

    def flag(self, key: str, default: bool = False) -> bool:
        """true or false."""
        value = self.get(key)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise ConfigError(
                f"{self.where} gives {key!r} as {quoted(value)}, but it must be true or false; correct it."
            )
        return value

    def text(self, key: str, default: str | None = None) -> str:
        """A string."""
        value = self.get(key)
        if value is None:
            value = default
        if not isinstance(value, str):
            raise ConfigError(f"{self.where} gives {key!r} as {quoted(value)}, but it must be a string; correct it.")
        return value

    def items(self, key: str) -> list[object] | None:
        """A list, or None where the config has none."""
        value = self.get(key)
        if value is not None and not isinstance(value, (list, tuple)):
            raise ConfigError(f"{self.where} gives {key!r} as {quoted(value)}, but it must be a list; correct it.")
        return None if value is None else list(value)

    def divides(self, part: str, whole: str) -> int:
        """The whole number `part`, which has to divide the one of `whole`."""
        value, total = self.integer(part), self.integer(whole)
        if total % value:
            raise ConfigError(
                f"{self.where} has {whole!r} {total}, which {part!r} {value} does not divide; correct one."
            )
        return value

    def within(self, part: str, whole: str) -> int:
        """The whole number `part`, which may not be larger than the one of `whole`."""
        value, total = self.integer(part), self.integer(whole)
        if value > total:
            raise ConfigError(f"{self.where} has {part!r} {value}, which is more than {whole!r} {total}; correct one.")
        return value

    def integers(self, key: str, *, minimum: int = 0) -> list[int]:
        """A list of whole numbers of at least `minimum`, empty where the config has none."""
        return [Config({key: item}, where=self.where).integer(key, minimum=minimum) for item in self.items(key) or []]

    def sides(self, key: str) -> tuple[int, int]:
        """Height and width: two whole numbers, or one for both."""
        if not isinstance(self.get(key), (list, tuple)):
            return self.integer(key), self.integer(key)
        given = self.integers(key, minimum=1)
        if len(given) != 2:
            raise ConfigError(f"{self.where} gives {key!r} as {given}, but it must be height and width; correct it.")
        return given[0], given[1]

    def section(self, key: str) -> Mapping[str, object]:
        """A nested object, empty where the config has none."""
        value = self.get(key)
        if value is None:
            return {}
        if not isinstance(value, Mapping):
            raise ConfigError(f"{self.where} gives {key!r} as {quoted(value)}, but it must be an object; correct it.")
        return cast(Mapping[str, object], value)

    def nested(self, key: str, defaults: Mapping[str, object], aliases: Mapping[str, str] | None = None) -> Config:
        """A nested object as a config of its own (`text_config`, `vision_config`).

        What it leaves out has the defaults of its class, as files are written that way; a tower has to be there.
        """
        if key == "vision_config" and not isinstance(self.get(key), Mapping):
            raise ConfigError(
                f"{self.where} has no {key!r} for the images that this family sees; add it or take a complete "
                "config.json."
            )
        return Config(self.section(key), defaults, aliases, f"{self.where}'s {key!r}")

    def layer_types(self, default: list[str], key: str = "layer_types") -> list[str]:
        """The kind of each layer (`layer_types`, or what `key` names), one per hidden layer."""
        given = self.items(key)
        if given is None:
            return default
        if len(given) != len(default):
            raise ConfigError(
                f"{self.where} has {len(given)} {key!r} but {len(default)} 'num_hidden_layers'; they must agree."
            )
        return [str(item) for item in given]

    def num_labels(self, default: int = 2) -> int:
        """Classes of a classification head: `num_labels`, the length of `id2label`, or the class's default."""
        return self.integer("num_labels", len(self.section("id2label")) or default)

    def problem_type(self) -> str:
        """What a classification head is trained for: with one label regression, with more single-label classes."""
        known = ("regression", "single_label_classification", "multi_label_classification")
        problem = self.text("problem_type", known[0] if self.num_labels() == 1 else known[1])
        if problem not in known:
            raise ConfigError(
                f"{self.where} gives 'problem_type' as {quoted(problem)}; it must be one of {', '.join(known)}."
            )
        return problem

    def heads(self) -> tuple[int, int, int]:
        """Attention heads, key-value heads and head dimension (given, or hidden size over heads)."""
        heads = self.integer("num_attention_heads")
        kv_heads = self.integer("num_key_value_heads", heads)
        if heads % kv_heads:
            raise ConfigError(
                f"{self.where} has 'num_attention_heads' {heads}, which 'num_key_value_heads' {kv_heads} does not "
                f"divide; correct one."
            )
        return heads, kv_heads, self.head_dim()

    def rope_type(self) -> str:
        """How the rotary frequencies are scaled ("default" where nothing says so)."""
        section = self.section("rope_parameters") or self.section("rope_scaling")
        kind = section.get("rope_type") or section.get("type") or "default"
        if not isinstance(kind, str):
            raise ConfigError(
                f"{self.where} gives the type of its rope scaling as {quoted(kind)}, but it must be a string; "
                "correct it."
            )
        return kind

    def rotary_dim(self, head_dim: int, factor: float = 1.0) -> int:
        """Elements of a head that are rotated: `head_dim` times `partial_rotary_factor` (by default `factor`).

        The factor stands in `rope_parameters`, in the older `rope_scaling`, or at the top.
        """
        for section in ("rope_parameters", "rope_scaling"):
            if self.section(section).get("partial_rotary_factor") is not None:
                inner = Config(self.section(section), where=f"{section!r} of {self.where}")
                factor = inner.number("partial_rotary_factor")
                break
        else:
            factor = self.number("partial_rotary_factor", factor)
        width = int(head_dim * factor)
        width += width % 2 if width < head_dim else 0  # there is an angle for the odd element too
        if not 2 <= width <= head_dim:
            raise ConfigError(
                f"{self.where} gives 'partial_rotary_factor' as {factor}, which makes {width} of {head_dim} elements "
                f"of a head; it must lie between 0 and 1."
            )
        return width

    def head_dim(self) -> int:
        """`head_dim` where given, else hidden size over heads, which must divide."""
        given = self.optional("head_dim")
        if given is not None:
            return given
        hidden, heads = self.integer("hidden_size"), self.integer("num_attention_heads")
        if hidden % heads:
            raise ConfigError(
                f"{self.where} has 'hidden_size' {hidden}, which 'num_attention_heads' {heads} does not divide, and no "
                f"'head_dim'; give one that fits."
            )
        return hidden // heads
