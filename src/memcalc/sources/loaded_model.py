"""What a name or a path turned out to be: config, headers, and everything worth telling about them."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from memcalc.errors import ConfigError
from memcalc.sources.adapter import Adapter
from memcalc.sources.checkpoint.checkpoint import Checkpoint, IgnoredFile
from memcalc.sources.display_names import shown
from memcalc.tables.weight_formats import WeightFormat

CONFIG = "config.json"


@dataclass(frozen=True)
class Traffic:
    """What an answer from the Hub cost: requests (redirects included) and bytes of their bodies."""

    requests: int = 0
    bytes_fetched: int = 0


@dataclass(frozen=True)
class Component:
    """One module of a pipeline that model_index.json names and that has weights.

    `checkpoint` is None where they cannot be read; `why` says why. `counted`: its config was read off its weights,
    which are as many as that config has, under other names.
    """

    name: str
    library: str
    class_name: str
    config: Mapping[str, Any] | None
    checkpoint: Checkpoint | None
    notes: tuple[str, ...] = ()
    why: str = ""
    counted: bool = False
    modules: Mapping[str, WeightFormat] = field(default_factory=dict)
    """The type of each quantized linear layer of a GGUF file, by the layer's name."""

    @property
    def files(self) -> tuple[str, ...]:
        """The files that its weights are read from."""
        return () if self.checkpoint is None else self.checkpoint.files


@dataclass(frozen=True)
class LoadedModel:
    """Everything that was read under `name`; `origin` is "file", "hub" or "cache".

    `checkpoint` is None when there are no weights that memcalc reads (none, or only pickles); the answer then rests on
    `config`. An adapter has its `base` beside it where that could be read. `components` is empty but for pipelines.
    """

    name: str
    origin: str
    config: Mapping[str, Any] | None
    checkpoint: Checkpoint | None
    adapter: Adapter | None = None
    base: "LoadedModel | None" = None
    components: tuple[Component, ...] = ()
    ignored: tuple[IgnoredFile, ...] = ()
    revision: str | None = None
    traffic: Traffic = Traffic()
    notes: tuple[str, ...] = ()
    config_file: str = CONFIG
    """The name of the file that `config` was read from: a GGUF has no config.json."""
    unfit: str = ""
    """Why weights without a config are those of no model that memcalc describes, where that is known."""

    @contextmanager
    def naming_its_file(self) -> Iterator[None]:
        """Let errors about the config name the file that it stands in."""
        try:
            yield
        except ConfigError as problem:
            text = str(problem)
            if self.config_file == CONFIG or CONFIG not in text:
                raise
            raise type(problem)(text.replace(CONFIG, shown(self.config_file))) from None

    @property
    def is_pipeline(self) -> bool:
        """Whether it is a diffusion pipeline, or an adapter for one."""
        return bool(self.components or (self.base is not None and self.base.components))

    @property
    def custom_code(self) -> bool:
        """Whether the config asks for code of the repository (`auto_map`), which memcalc never runs."""
        return bool((self.config or {}).get("auto_map"))

    def require_config(self) -> Mapping[str, Any]:
        """The config that gives the shapes: the model's own, or that of an adapter's base.

        Raises:
            ConfigError: there is none, with what to do instead.
        """
        if self.config is not None:
            return self.config
        if self.base is not None:
            return self.base.require_config()
        if self.adapter is not None:
            base = shown(self.adapter.base_model or "a model it does not name")
            size = "" if self.adapter.parameters is None else f" of {self.adapter.parameters:,} parameters"
            raise ConfigError(
                f"{shown(self.name)} is only an adapter{size} for {base}: "
                "give that model with --base, or its size with --params."
            )
        if self.components:
            raise ConfigError(
                f"{shown(self.name)} is a pipeline of several models: inspect shows each component's weights."
            )
        if self.unfit:
            raise ConfigError(f"{shown(self.name)} {self.unfit}")
        raise ConfigError(
            f"{shown(self.name)} has no config.json: try --generic, which reads the shapes from the weights' names."
        )
