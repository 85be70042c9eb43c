"""A checkpoint as its headers describe it: tensors, stored bytes, and the parameters that they stand for."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

from memcalc.config.quantization import Quantization
from memcalc.errors import CheckpointError
from memcalc.sources.checkpoint.safetensors import BITS, Header
from memcalc.sources.checkpoint.stored_tensor import Role, StoredTensor
from memcalc.sources.checkpoint.tensor_roles import understand
from memcalc.sources.display_names import shown

# More tensors than any model has: the largest published mixtures of experts come to 207,000.
MOST_TENSORS = 300_000


@dataclass(frozen=True)
class IgnoredFile:
    """A file that looks like weights and is not counted, with its bytes where known."""

    path: str
    nbytes: int | None
    reason: str


@dataclass(frozen=True)
class Declared:
    """What an index file or the metadata says about itself: a cross-check, never the answer."""

    total_bytes: int | None = None
    total_parameters: int | None = None


_NOTHING = Declared()


@dataclass(frozen=True)
class Checkpoint:
    """All tensors of one model (or of one component of a pipeline), bytes and counts as integers."""

    tensors: tuple[StoredTensor, ...]
    files: tuple[str, ...]
    format: str = "safetensors"
    quantization: Quantization | None = None
    packings: tuple[str, ...] = ()
    metadata: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    declared: Declared = _NOTHING
    header_bytes: int = 0
    ignored: tuple[IgnoredFile, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def stored_bytes(self) -> int:
        """Bytes of all tensors in the files, constants and buffers included."""
        return sum(tensor.nbytes for tensor in self.tensors)

    @property
    def stored_bytes_by_dtype(self) -> dict[str, int]:
        """The same by the files' own dtype names, largest first."""
        return _by_dtype((t.dtype, t.nbytes) for t in self.tensors)

    @property
    def parameters(self) -> int:
        """Model parameters that the files stand for; packed words are unpacked, constants and buffers not counted."""
        return sum(tensor.parameters for tensor in self.tensors)

    @property
    def quantized_parameters(self) -> int:
        """Those of them that are stored quantized; the rest is wide."""
        return sum(tensor.parameters for tensor in self.tensors if tensor.role is Role.QUANTIZED)

    @property
    def stored_dtype(self) -> str | None:
        """The dtype that most wide parameters have; None when there are none."""
        dtypes = _by_dtype((t.dtype, t.parameters) for t in self.tensors if t.role is Role.PARAMETER)
        return next(iter(dtypes), None)

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Unpacked weights by name, where the header tells their shape."""
        return {
            tensor.weight: tensor.shape
            for tensor in self.tensors
            if tensor.shape is not None and tensor.role in (Role.PARAMETER, Role.QUANTIZED)
        }

    def loaded_bytes(self, dtype: str | None) -> int:
        """Bytes once loaded: quantized weights, their constants and buffers as stored, wide parameters in `dtype`.

        Args:
            dtype: a safetensors or torch name ("BF16", "bfloat16"); None leaves every tensor as it is stored.
        """
        if dtype is None:
            return self.stored_bytes
        size = dtype_bits(dtype)
        return sum(t.parameters * size // 8 if t.role is Role.PARAMETER else t.nbytes for t in self.tensors)


# torch's names of the dtypes that a model may be loaded in, as safetensors spells them.
TORCH_NAMES: Mapping[str, str] = MappingProxyType(
    {
        "float64": "F64",
        "double": "F64",
        "float32": "F32",
        "float": "F32",
        "fp32": "F32",
        "float16": "F16",
        "half": "F16",
        "fp16": "F16",
        "bfloat16": "BF16",
        "bf16": "BF16",
        "float8_e4m3fn": "F8_E4M3",
        "float8_e5m2": "F8_E5M2",
        "int8": "I8",
        "uint8": "U8",
    }
)


def safetensors_dtype(name: str) -> str | None:
    """ "torch.bfloat16", "bf16" or "BF16" as "BF16"; None for what is no dtype ("auto", "4bit")."""
    plain = name.strip().removeprefix("torch.")
    return TORCH_NAMES.get(plain.lower(), plain.upper() if plain.upper() in BITS else None)


def dtype_bits(name: str) -> int:
    """Bits of one element of a dtype under either name.

    Raises:
        ValueError: `name` is no dtype; callers have checked what the user typed.
    """
    spelled = safetensors_dtype(name)
    if spelled is None:
        raise ValueError(f"no dtype is called {name!r}.")
    return BITS[spelled]


def assemble(
    headers: Sequence[tuple[str, Header]],
    quantization: Quantization | None = None,
    *,
    declared: Declared = _NOTHING,
    ignored: Iterable[IgnoredFile] = (),
    notes: Iterable[str] = (),
) -> Checkpoint:
    """One checkpoint out of the headers of its files, in the files' order.

    A tensor that several files hold is counted once, in the first of them, with a note.

    Raises:
        CheckpointError: they hold more tensors than any model.
    """
    if sum(len(header.tensors) for _, header in headers) > MOST_TENSORS:
        raise CheckpointError(
            f"{shown(headers[0][0])} and its like describe over {MOST_TENSORS:,} tensors, more than any model has: "
            "are all of these files one model's?"
        )
    metadata: dict[str, str] = {}
    owners: dict[str, str] = {}
    tensors, collected, twice = [], list(notes), 0
    for file, header in headers:
        metadata.update(header.metadata)
        collected.extend(header.notes)
        for tensor in header.tensors:
            if owners.setdefault(tensor.name, file) == file:
                tensors.append(tensor)
            else:
                twice += 1
    if twice:
        collected.append(f"{twice:,} tensors lie in more than one file; each is counted once")
    stored = tuple(understand(tensors, quantization, metadata, owners))
    packings = tuple(dict.fromkeys(tensor.packing for tensor in stored if tensor.packing))
    collected.extend(_doubts(quantization, packings))
    return Checkpoint(
        stored,
        tuple(file for file, _ in headers),
        "safetensors",
        quantization,
        packings,
        MappingProxyType(metadata),
        declared,
        sum(header.nbytes for _, header in headers),
        tuple(ignored),
        tuple(collected),
    )


def _doubts(quantization: Quantization | None, packings: tuple[str, ...]) -> list[str]:
    if quantization and not quantization.known:
        return [
            f"quantization {quantization.method!r} is not known: parameters are counted from shapes and may be too few"
        ]
    if quantization and not packings:
        return [f"the config says {quantization}, but no tensor in the files is quantized"]
    if packings and not quantization:
        return [f"the files hold quantized weights ({', '.join(packings)}), which no config states"]
    return []


def _by_dtype(pairs: Iterable[tuple[str, int]]) -> dict[str, int]:
    totals: Counter[str] = Counter()
    for dtype, amount in pairs:
        totals[dtype] += amount
    return dict(totals.most_common())
