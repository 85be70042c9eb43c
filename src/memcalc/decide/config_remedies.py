"""Remedies of a run that a framework's files describe: only those that the framework has, in its own keys."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from memcalc.decide.remedies import Remedy, remedies
from memcalc.errors import MemcalcError
from memcalc.run_configs.remedy_keys import REMEDY_KEYS
from memcalc.setup.setup import TrainingSetup

Reread = Callable[[Sequence[str]], Mapping[str, Any]]
"""What the files say, as options, when these words (`--key value`) override them."""


def config_remedies(framework: str, setup: TrainingSetup, reread: Reread) -> list[Remedy] | None:
    """What makes `setup` smaller in a framework's keys; None where its keys are not known.

    A framework's key may change more than memcalc's option of that name does, so each is what the files say with it.
    """
    known = REMEDY_KEYS.get(framework)
    if known is None:
        return None
    before = reread(())
    found = []
    for remedy in remedies(setup):
        has_adapters = remedy.name == "QLoRA" and setup.lora_rank is not None
        keys = known.get("QLoRA of the adapters" if has_adapters else remedy.name)
        if keys is None:
            continue
        values = {key: text.format(**remedy.options) for key, text in keys.items()}
        try:
            after = reread([word for key, text in values.items() for word in (f"--{key}", text)])
        except MemcalcError:  # such as a key that this file's other keys rule out
            continue
        words = ", ".join(f"{key}: {text}" for key, text in values.items())
        found.append(Remedy(remedy.name, remedy.cost, _changes(before, after), remedy.only_from, words))
    return found


def _changes(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, Any]:
    """The options that differ; one that is no longer there has its default again."""
    fields = TrainingSetup.model_fields
    return {
        name: after[name] if name in after else fields[name].get_default()
        for name in {**before, **after}
        if name in fields and (name not in after or before.get(name) != after[name])
    }
