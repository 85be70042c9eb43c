"""What `memcalc explain` answers: the tensors that are alive at one moment, and its JSON."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from memcalc.common.assumption import Assumption


def _says(description: str) -> dict[str, Any]:
    """A field's meaning, for the JSON Schema."""
    return {"description": description}


@dataclass(frozen=True, kw_only=True)
class TensorEntry:
    """Tensors alike: of one layout, made by one operation of a module (in each of its blocks), alive for one reason."""

    row: str = field(metadata=_says("Row of the box, as the keys of components are spelled."))
    part: str = field(metadata=_says("Part of the row, as the box names it."))
    bytes: int = field(metadata=_says("Bytes of all of them; negative where memory that stood before was freed."))
    count: int = field(metadata=_says("How many there are, in all blocks of the model."))
    shape: tuple[int, ...] | None = field(metadata=_says("Shape of each; null where it is no tensor of one shape."))
    dtype: str | None = field(metadata=_says("Its dtype, as torch names it."))
    module: str = field(
        metadata=_says("Module that made them; {0..31} stands for blocks' numbers. Empty: outside the model.")
    )
    operation: str = field(metadata=_says("What made them: torch's name of the operation."))
    made_in: str = field(metadata=_says("Phase in which they were made; before the step for what stands."))
    alive_because: str = field(metadata=_says("What still refers to them; {n} is the number of their own block."))
    until: str = field(metadata=_says("When they die."))
    formula: str = field(
        metadata=_says("Bytes of one, in the model's own numbers; round_up(n, m) is the next multiple of m.")
    )
    numbers: Mapping[str, int | float] = field(metadata=_says("Values of the formula's names."))
    source: str = field(metadata=_says("File and line of memcalc's recipe that says so."))


@dataclass(frozen=True, kw_only=True)
class Explanation:
    """All that is alive at one moment of a step, the largest first; the entries sum to the total."""

    model: str = field(metadata=_says("Name of the model."))
    phase: str = field(metadata=_says("Phase of the step."))
    moment: str = field(metadata=_says("The moment in words, as the report's peak.moment."))
    is_peak: bool = field(metadata=_says("Whether it is the peak of the whole step."))
    total_bytes: int = field(metadata=_says("Bytes at that moment with all that stands around the tensors."))
    rows: Mapping[str, int] = field(metadata=_says("Bytes of each row of the box at that moment."))
    tensors: tuple[TensorEntry, ...] = field(metadata=_says("What is alive, the largest first."))
    left_out_bytes: int = field(metadata=_says("Bytes of entries that --row and --top leave out."))
    assumptions: tuple[Assumption, ...] = field(metadata=_says("Everything that the user did not say."))

    def shown(self, row: str | None, top: int | None) -> Explanation:
        """With the entries of one row alone, and no more than `top` of them."""
        chosen = [entry for entry in self.tensors if row is None or entry.row == row][:top]
        rest = self.total_bytes - sum(entry.bytes for entry in chosen)
        return replace(self, tensors=tuple(chosen), left_out_bytes=rest)

    def to_dict(self) -> dict[str, Any]:
        """Plain values, as JSON has them."""
        return asdict(self)
