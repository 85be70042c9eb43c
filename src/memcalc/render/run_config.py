"""What was read of run files, as text for a terminal."""

from __future__ import annotations

from memcalc.run_configs.mapping import Mapped, Mapping, shown


def render(mapping: Mapping, *, verbose: bool = False) -> str:
    """The report: what became of each key that counts, what has no effect, what was taken and what is asked for."""
    lines = [f"{mapping.framework}: {mapping.mode} of {mapping.model or 'a model that is not named'}", ""]
    rows = [row for row in mapping.mapped if row.option or not row.default]
    options = [f"--{row.option.replace('_', '-')}" if row.option else "" for row in rows]
    width = max(map(len, options), default=0)
    lines += [f"  {option:<{width}}  {_key(row)} → {_ours(row)}" for option, row in zip(options, rows, strict=True)]
    for heading, sentences in (
        ("no effect", mapping.dead),
        ("taken", mapping.assumed),
        ("not modelled", mapping.lacks),
        ("unknown", [f"{name} is no key that memcalc knows" for name in mapping.unknown]),
        ("asked for", mapping.asked),
    ):
        if sentences:
            lines += ["", f"{heading}:", *(f"  {sentence}" for sentence in sentences)]
    if mapping.ignored:
        lines += ["", _ignored(mapping.ignored, verbose)]
    return "\n".join(lines) + "\n"


def _key(row: Mapped) -> str:
    if row.default and " " in row.key:  # a fact that no key stands for
        return row.key
    return f"{row.key} absent" if row.default else f"{row.key}: {shown(row.value)}"


def _ours(row: Mapped) -> str:
    if not row.option:
        return row.meaning
    value = {True: "on", False: "off"}[row.ours] if isinstance(row.ours, bool) else shown(row.ours)
    return f"{value} ({row.meaning})" if row.meaning else value


def _ignored(names: list[str], verbose: bool) -> str:
    count = f"ignored: {len(names)} {'key that does' if len(names) == 1 else 'keys that do'} not change memory"
    return f"{count}: {', '.join(names)}" if verbose else f"{count} (--verbose lists them)"
