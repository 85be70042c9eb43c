"""The index of a sharded checkpoint, and what its shards say otherwise."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any

from memcalc.errors import CheckpointError
from memcalc.sources.checkpoint.checkpoint import Declared
from memcalc.sources.checkpoint.safetensors import Header
from memcalc.sources.display_names import shown, some
from memcalc.sources.json_object import parse_object


@dataclass(frozen=True)
class ShardIndex:
    """Which file holds which tensor, as `model.safetensors.index.json` says."""

    name: str
    weight_map: Mapping[str, str]
    declared: Declared

    @property
    def shards(self) -> tuple[str, ...]:
        """The files named, each once, in order."""
        return tuple(sorted(set(self.weight_map.values())))


def parse_index(data: bytes, name: str) -> ShardIndex:
    """The index in `data`; shard names are relative to the folder of the index.

    Raises:
        CheckpointError: no usable weight_map, or one that names a file outside the folder.
    """
    raw = parse_object(data, name, CheckpointError)
    weight_map = raw.get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(
            f"{shown(name)} has no weight_map, so it names no shards: download it again, or remove it where the "
            "weights are one file."
        )
    for tensor, shard in weight_map.items():
        if not isinstance(shard, str) or not shard:
            raise CheckpointError(f"{shown(name)} names no file for tensor {shown(tensor)}: download the index again.")
    for shard in sorted(set(weight_map.values())):
        if not is_inside(shard):
            raise CheckpointError(
                f"{shown(name)} names the shard {shown(shard)}, which lies outside the model's folder: "
                "memcalc does not follow it, correct the index."
            )
    metadata = raw.get("metadata")
    return ShardIndex(name, weight_map, _declared(metadata if isinstance(metadata, dict) else {}))


def is_inside(path: str) -> bool:
    """Whether a name from an index stays inside the folder that holds the index, on every system."""
    parts = PurePosixPath(path.replace("\\", "/"))
    return not parts.is_absolute() and ".." not in parts.parts and ":" not in path and "\0" not in path


def _declared(metadata: Mapping[str, Any]) -> Declared:
    return Declared(_whole(metadata.get("total_size")), _whole(metadata.get("total_parameters")))


def _whole(value: Any) -> int | None:
    """Old writers store the totals as floats; text and booleans are no totals, nor is what no disk holds."""
    if type(value) is float and value.is_integer():
        value = int(value)
    return value if type(value) is int and 0 <= value < 2**63 else None


def check_present(index: ShardIndex, present: Sequence[str]) -> None:
    """Raise CheckpointError when a shard that the index names is not there."""
    there = set(present)
    missing = [shard for shard in index.shards if shard not in there]
    if missing:
        raise CheckpointError(
            f"{shown(index.name)} names {len(missing):,} of {len(index.shards):,} shards that are missing "
            f"({some(missing)}): finish the download, or estimate from config.json alone."
        )


def disagreements(index: ShardIndex, headers: Sequence[tuple[str, Header]]) -> list[str]:
    """One line for each way in which the shards' headers are not what the index says; the headers are used."""
    held = {tensor.name: file for file, header in headers for tensor in header.tensors}
    missing = [name for name in index.weight_map if name not in held]
    extra = [name for name in held if name not in index.weight_map]
    moved = [name for name, file in index.weight_map.items() if held.get(name, file) != file]
    lines = []
    if missing:
        lines.append(f"the index lists {_tensors(missing)} that no shard holds ({some(missing)}); not counted")
    if extra:
        lines.append(f"the shards hold {_tensors(extra)} that the index does not list ({some(extra)}); counted")
    if moved:
        lines.append(f"{_tensors(moved)} in another shard than the index says ({some(moved)}); counted once")
    return lines


def _tensors(names: Sequence[str]) -> str:
    return f"{len(names):,} tensor{'s' if len(names) != 1 else ''}"
