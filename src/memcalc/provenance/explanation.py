"""What `memcalc explain` answers: the tensors that are alive at one moment, and its JSON."""

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import Field

from memcalc.common.assumption import Assumption
from memcalc.report.contract import Contract


class TensorEntry(Contract):
    """Tensors alike: of one layout, made by one operation of a module (in each of its blocks), alive for one reason."""

    row: str = Field(description="Row of the box, as the keys of components are spelled.")
    part: str = Field(description="Part of the row, as the box names it.")
    bytes: int = Field(description="Bytes of all of them; negative where memory that stood before was freed.")
    count: int = Field(description="How many there are, in all blocks of the model.", ge=1)
    shape: tuple[int, ...] | None = Field(
        description="Shape of each; null where it is no tensor, or several of different shapes."
    )
    dtype: str | None = Field(description="Its dtype, as torch names it; null where it is not one tensor's.")
    module: str = Field(
        description="Module that made them, with {0..31} for the numbers of blocks; empty outside the model."
    )
    operation: str = Field(description="What made them: torch's name of the operation, or what stands there.")
    made_in: str = Field(description="Phase in which they were made; 'before the step' for what stands.")
    alive_because: str = Field(description="What still refers to them; {n} is the number of their own block.")
    until: str = Field(description="When they die.")
    formula: str = Field(
        description="Bytes of one, in the model's own numbers; round_up(n, m) is the next multiple of m."
    )
    numbers: Mapping[str, int | float] = Field(description="Values of the formula's names.")
    source: str = Field(description="File and line of memcalc's recipe that says so.")


class Explanation(Contract):
    """All that is alive at one moment of a step, the largest first; it sums to total_bytes with left_out_bytes."""

    schema_version: Literal[1] = Field(
        default=1, description="Version of this contract; it rises when a key goes or changes its meaning."
    )
    model: str = Field(description="Name of the model.")
    phase: str = Field(description="Phase of the step.")
    moment: str = Field(description="The moment in words, as the report's peak.moment.")
    is_peak: bool = Field(description="Whether it is the peak of the whole step.")
    total_bytes: int = Field(
        description="Bytes at that moment with all that stands around the tensors; at the peak peak.process_bytes."
    )
    rows: Mapping[str, int] = Field(description="Bytes of each row of the box at that moment.")
    tensors: tuple[TensorEntry, ...] = Field(description="What is alive, the largest first.")
    left_out_bytes: int = Field(description="Bytes of entries that --row and --top leave out.")
    assumptions: tuple[Assumption, ...] = Field(description="Everything that the user did not say.")

    def shown(self, row: str | None, top: int | None) -> "Explanation":
        """With the entries of one row alone, and no more than `top` of them."""
        chosen = [entry for entry in self.tensors if row is None or entry.row == row][:top]
        rest = self.total_bytes - sum(entry.bytes for entry in chosen)
        return self.model_copy(update={"tensors": tuple(chosen), "left_out_bytes": rest})

    def to_dict(self) -> dict[str, Any]:
        """Plain values, as JSON has them."""
        return self.model_dump(mode="json")
