"""What a framework's module gets to read: one file's values, and what the other files and the launch line said."""

from __future__ import annotations

from collections.abc import Mapping as Rows
from dataclasses import dataclass, field
from typing import Any

from memcalc.run_configs.keys import Key
from memcalc.run_configs.mapping import Mapping
from memcalc.run_configs.sharding import Sharding, apply


@dataclass
class Context:
    """The values of one training file or command line.

    `sharding` and `mixed_precision` come from an Accelerate or DeepSpeed file, `world` from the launch line;
    `command` is the subcommand (`trl dpo` → dpo) or the script's name, `environment` the variables in front of it.
    """

    values: dict[str, Any]
    where: str
    out: Mapping
    command: str = ""
    environment: dict[str, str] = field(default_factory=dict)
    sharding: Sharding | None = None
    mixed_precision: str = ""
    world: int | None = None
    world_from: str = ""
    rows: Rows[str, Key] | None = None
    release: tuple[int, ...] | None = None

    def finish(self, found: Sharding) -> None:
        """Set the parallel options, last of all."""
        apply(self.out, found)
