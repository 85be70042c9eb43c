"""What was read, for scripts: a JSON object, or the memcalc command line that it stands for."""

from __future__ import annotations

import shlex
from collections.abc import Collection
from typing import Any

from memcalc.run_configs import option_names as our
from memcalc.run_configs.mapping import Mapping, plain
from memcalc.run_configs.model_names import repository

OFF = (False, "none", None)
"""Values that are what memcalc does by itself."""

_SHOWN_WHEN_OFF = (our.KBIT, our.RESHARD, our.CACHE_LATENTS, our.CACHE_TEXT)


def as_json(mapping: Mapping) -> dict[str, Any]:
    """The object that `--show-setup --json` prints."""
    return {
        "model": mapping.model if mapping.model is None else plain(mapping.model),
        "framework": mapping.framework,
        "mode": mapping.mode,
        "setup": {name: plain(value) for name, value in mapping.setup.items()},
        "facts": {name: plain(value) for name, value in mapping.facts.items()},
        "mapped": [
            {
                "key": row.key,
                "value": row.value,
                "option": row.option or None,
                "meaning": row.meaning,
                "default": row.default,
            }
            for row in mapping.mapped
        ],
        "ignored": mapping.ignored,
        "dead": mapping.dead,
        "unknown": mapping.unknown,
        "assumed": [*mapping.assumed, *mapping.lacks],
        "asked": mapping.asked,
    }


def as_options(mapping: Mapping, known: Collection[str]) -> str:
    """The memcalc command line; `known` are the options that it has, others are left out."""
    words = ["memcalc", *_model(mapping)]
    if mapping.mode != "training":
        words += ["--mode", mapping.mode]
    for name, value in mapping.setup.items():
        option = f"--{name.replace('_', '-')}"
        stays = name in _SHOWN_WHEN_OFF or name.startswith(our.ZERO_PREFIX)
        if name not in known or (value in OFF and not stays):
            continue
        if isinstance(value, bool):
            words.append(option if value else f"--no-{option[2:]}")
        else:
            words += [option, str(value)]
    return shlex.join(words)


def is_count(mapping: Mapping) -> bool:
    """Whether the model is a parameter count."""
    return _model(mapping)[0] == "estimate"


def _model(mapping: Mapping) -> list[str]:
    name = None if mapping.model is None else repository(mapping.model)
    if name is None:
        return ["from-hub", "MODEL"]
    if name.startswith((".", "/", "~")) or name.endswith((".gguf", ".json", ".safetensors")):
        return ["from-file", name]
    if "/" not in name:
        return ["estimate", "--params", name] if name[:1].isdigit() else ["from-hub", name]
    return ["from-hub", name]
