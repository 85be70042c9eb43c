"""GPUs: one row a GPU, with its memory as the driver reports it, and as CUDA does.

`nvidia-smi` (memory.total) and `rocm-smi` (VRAM Total Memory) say less than the number on the box: firmware, and ECC
where it is on, take their share, and marketing GB are sometimes GiB. Rows without a reading say which datasheet they
follow. A GPU with several chips that each hold their own memory is one row per chip. What a process can have of it is
less again: `gpu_capacities.py`.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from types import MappingProxyType

from memcalc.common.arguments import check_type
from memcalc.common.assumption import Assumption
from memcalc.common.escaping import quoted
from memcalc.common.sizes import MIB
from memcalc.errors import UsageError, close_matches
from memcalc.tables.gpu_capacities import cuda_total
from memcalc.units import format_bytes, parse_size

SMI = "memory.total of nvidia-smi"
SMI_ECC = "memory.total of nvidia-smi, ECC on (the default of this card)"
SMI_NO_ECC = "memory.total of nvidia-smi, ECC off (the default of this card)"
ROCM = "VRAM Total Memory of rocm-smi"
FROM_USER = "the size given with --gpu"


@dataclass(frozen=True)
class Gpu:
    """A GPU to fit a job on.

    `total_bytes` is its memory in bytes, `usable_bytes` what CUDA reports of it, which is all that a process can have.
    `note` says where that comes from, for the assumptions. `compute_capability` is NVIDIA's (major, minor) and None
    where it is unknown; `architecture` is the vendor's name of the generation, or AMD's gfx target, and empty where it
    is unknown.
    """

    name: str
    total_bytes: int
    aliases: tuple[str, ...] = ()
    compute_capability: tuple[int, int] | None = None
    architecture: str = ""
    source: str = FROM_USER
    usable_bytes: int = 0
    note: Assumption | None = None

    def __post_init__(self) -> None:
        if not self.usable_bytes:
            object.__setattr__(self, "usable_bytes", self.total_bytes)


@dataclass(frozen=True)
class _Generation:
    architecture: str
    capability: tuple[int, int] | None

    def gpu(self, name: str, mib: int, *aliases: str, source: str = SMI) -> Gpu:
        """A row of this generation; `mib` is its memory in MiB."""
        seen = cuda_total(name, mib, amd=self.architecture.startswith("gfx"))
        about = "about " if seen.estimated else ""
        usable, total = format_bytes(seen.mib * MIB, "GiB"), format_bytes(mib * MIB, "GiB")
        note = Assumption(
            "gpu_usable_memory",
            f"{name}: of its {total} CUDA reports {about}{usable}, and no process gets more ({seen.source})",
        )
        return Gpu(
            name,
            mib * MIB,
            aliases,
            self.capability,
            self.architecture,
            source,
            seen.mib * MIB,
            note if mib > seen.mib else None,
        )


_PASCAL = _Generation("Pascal", (6, 1))
_PASCAL_100 = _Generation("Pascal", (6, 0))
_VOLTA = _Generation("Volta", (7, 0))
_TURING = _Generation("Turing", (7, 5))
_AMPERE_100 = _Generation("Ampere", (8, 0))
_AMPERE = _Generation("Ampere", (8, 6))
_ADA = _Generation("Ada Lovelace", (8, 9))
_HOPPER = _Generation("Hopper", (9, 0))
_BLACKWELL_100 = _Generation("Blackwell", (10, 0))
_BLACKWELL_103 = _Generation("Blackwell Ultra", (10, 3))
_BLACKWELL = _Generation("Blackwell", (12, 0))
_CDNA2 = _Generation("gfx90a", None)
_CDNA3 = _Generation("gfx942", None)
_CDNA4 = _Generation("gfx950", None)

GPUS: tuple[Gpu, ...] = (
    # GeForce
    _PASCAL.gpu("GTX-1060-6GB", 6144, "GeForce GTX 1060 6GB"),
    _PASCAL.gpu("GTX-1070", 8192, "GeForce GTX 1070"),
    _PASCAL.gpu("GTX-1080", 8192, "GeForce GTX 1080", "1080"),
    _PASCAL.gpu("GTX-1080-Ti", 11264, "GeForce GTX 1080 Ti", "1080 Ti"),
    _TURING.gpu("GTX-1660-Ti", 6144, "GeForce GTX 1660 Ti", "1660 Ti"),
    _TURING.gpu("RTX-2060", 6144, "GeForce RTX 2060", "2060"),
    _TURING.gpu("RTX-2070", 8192, "GeForce RTX 2070", "2070"),
    _TURING.gpu("RTX-2080", 8192, "GeForce RTX 2080", "2080"),
    _TURING.gpu("RTX-2080-Ti", 11264, "GeForce RTX 2080 Ti", "2080 Ti"),
    _TURING.gpu("TITAN-RTX", 24576),
    _AMPERE.gpu("RTX-3050", 8192, "GeForce RTX 3050", "3050"),
    _AMPERE.gpu("RTX-3060", 12288, "GeForce RTX 3060", "3060"),
    _AMPERE.gpu("RTX-3060-Ti", 8192, "GeForce RTX 3060 Ti", "3060 Ti"),
    _AMPERE.gpu("RTX-3070", 8192, "GeForce RTX 3070", "3070"),
    _AMPERE.gpu("RTX-3070-Ti", 8192, "GeForce RTX 3070 Ti", "3070 Ti"),
    _AMPERE.gpu("RTX-3080", 10240, "GeForce RTX 3080", "RTX 3080 10GB", "3080"),
    _AMPERE.gpu("RTX-3080-12GB", 12288),
    _AMPERE.gpu("RTX-3080-Ti", 12288, "GeForce RTX 3080 Ti", "3080 Ti"),
    _AMPERE.gpu("RTX-3090", 24576, "GeForce RTX 3090", "3090"),
    _AMPERE.gpu("RTX-3090-Ti", 24564, "GeForce RTX 3090 Ti", "3090 Ti"),
    _ADA.gpu("RTX-4060", 8188, "GeForce RTX 4060", "4060"),
    _ADA.gpu("RTX-4060-Ti-8GB", 8188),
    _ADA.gpu("RTX-4060-Ti-16GB", 16380),
    _ADA.gpu("RTX-4070", 12282, "GeForce RTX 4070", "4070"),
    _ADA.gpu("RTX-4070-Super", 12282, "GeForce RTX 4070 SUPER", "4070 Super"),
    _ADA.gpu("RTX-4070-Ti", 12282, "GeForce RTX 4070 Ti", "4070 Ti"),
    _ADA.gpu("RTX-4070-Ti-Super", 16376, "GeForce RTX 4070 Ti SUPER", "4070 Ti Super"),
    _ADA.gpu("RTX-4080", 16376, "GeForce RTX 4080", "4080"),
    _ADA.gpu("RTX-4080-Super", 16376, "GeForce RTX 4080 SUPER", "4080 Super"),
    _ADA.gpu("RTX-4090", 24564, "GeForce RTX 4090", "4090"),
    _BLACKWELL.gpu("RTX-5060", 8151, "GeForce RTX 5060", "5060"),
    _BLACKWELL.gpu("RTX-5060-Ti-16GB", 16311),
    _BLACKWELL.gpu("RTX-5070", 12227, "GeForce RTX 5070", "5070"),
    _BLACKWELL.gpu("RTX-5070-Ti", 16303, "GeForce RTX 5070 Ti", "5070 Ti"),
    _BLACKWELL.gpu("RTX-5080", 16303, "GeForce RTX 5080", "5080"),
    _BLACKWELL.gpu("RTX-5090", 32607, "GeForce RTX 5090", "5090"),
    # Workstation
    _TURING.gpu("Quadro-RTX-6000", 24576, source=SMI_NO_ECC),
    _TURING.gpu("Quadro-RTX-8000", 49152, source=SMI_NO_ECC),
    _AMPERE.gpu("RTX-A4000", 16376, "A4000", source=SMI_NO_ECC),
    _AMPERE.gpu("RTX-A4500", 20470, "A4500", source=SMI_NO_ECC),
    _AMPERE.gpu("RTX-A5000", 24564, "A5000", source=SMI_NO_ECC),
    _AMPERE.gpu("RTX-A6000", 49140, "A6000", source=SMI_NO_ECC),
    _ADA.gpu("RTX-2000-Ada", 16380, "RTX 2000 Ada Generation", source=SMI_NO_ECC),
    _ADA.gpu("RTX-4000-Ada", 20475, "RTX 4000 Ada Generation", "RTX 4000 SFF Ada Generation", source=SMI_NO_ECC),
    _ADA.gpu("RTX-4500-Ada", 24570, "RTX 4500 Ada Generation", source=SMI_NO_ECC),
    _ADA.gpu("RTX-5000-Ada", 32760, "RTX 5000 Ada Generation", source=SMI_NO_ECC),
    _ADA.gpu("RTX-6000-Ada", 49140, "RTX 6000 Ada Generation", "6000 Ada", source=SMI_NO_ECC),
    _BLACKWELL.gpu(
        "RTX-PRO-6000",
        97887,
        "RTX PRO 6000 Blackwell",
        "RTX PRO 6000 Blackwell Workstation Edition",
        "RTX PRO 6000 Blackwell Max-Q Workstation Edition",
        "RTX PRO 6000 Blackwell Server Edition",
        source="memory.total of nvidia-smi, the same with ECC on and off",
    ),
    # Data centre
    _PASCAL_100.gpu("P100-16GB", 16384, "P100", "Tesla P100-PCIE-16GB", "Tesla P100-SXM2-16GB"),
    _VOLTA.gpu("V100-16GB", 16384, "Tesla V100-SXM2-16GB", "Tesla V100-PCIE-16GB"),
    _VOLTA.gpu("V100-32GB", 32768, "Tesla V100-SXM2-32GB", "Tesla V100-PCIE-32GB", "Tesla V100-SXM3-32GB"),
    _TURING.gpu("T4", 15360, "Tesla T4", source=SMI_ECC),
    _AMPERE.gpu("A2", 15356, source=SMI_ECC),
    _AMPERE.gpu("A10", 23028, source=SMI_ECC),
    _AMPERE.gpu("A10G", 23028, source=SMI_ECC),
    _AMPERE.gpu("A16", 15356, source="memory.total of nvidia-smi, ECC on, for one of the card's four GPUs"),
    _AMPERE_100.gpu("A30", 24576),
    _AMPERE.gpu("A40", 46068, source=SMI_ECC),
    _AMPERE_100.gpu("A100-40GB", 40960, "A100 40G", "A100-SXM4-40GB", "A100-PCIE-40GB"),
    _AMPERE_100.gpu("A100-80GB", 81920, "A100 80G", "A100-SXM4-80GB", "A100 80GB PCIe"),
    _AMPERE_100.gpu("A800-80GB", 81920, "A800", "A800-SXM4-80GB", "A800 80GB PCIe"),
    _ADA.gpu("L4", 23034, source=SMI_ECC),
    _ADA.gpu("L20", 46068, source=SMI_ECC),
    _ADA.gpu("L40", 46068, source=SMI_ECC),
    _ADA.gpu("L40S", 46068, source=SMI_ECC),
    _HOPPER.gpu("H20", 97871),
    _HOPPER.gpu("H100-80GB", 81559, "H100", "H100 SXM", "H100 SXM5", "H100 80GB HBM3", "H100 PCIe"),
    _HOPPER.gpu("H100-NVL-94GB", 95830, "H100 NVL", "H100-94GB"),
    _HOPPER.gpu("H800-80GB", 81559, "H800", "H800 PCIe"),
    _HOPPER.gpu("H200", 143771, "H200 SXM", "H200 NVL", "H200-141GB"),
    _HOPPER.gpu("GH200-96GB", 97871, "GH200", "GH200 480GB", "GH200 120GB"),
    Gpu(
        "B100",
        192 * 10**9,
        ("B100-192GB",),
        (10, 0),
        "Blackwell",
        "NVIDIA Blackwell architecture brief, 192 GB; no reading of a driver is known",
    ),
    _BLACKWELL_100.gpu("B200", 183359, "B200-180GB"),
    _BLACKWELL_100.gpu("GB200", 189471, source="memory.total of nvidia-smi, for one of the superchip's two GPUs"),
    _BLACKWELL_103.gpu("B300", 275040, "B300 SXM6 AC"),
    _BLACKWELL_103.gpu("GB300", 284208, source="memory.total of nvidia-smi, for one of the superchip's two GPUs"),
    # AMD
    _CDNA2.gpu("MI210", 65520, "Instinct MI210", source=ROCM),
    _CDNA2.gpu("MI250X-GCD", 65520, "MI250X", "MI250", "Instinct MI250X", source=ROCM + ", for one of the two chips"),
    _CDNA3.gpu("MI300X", 196592, "Instinct MI300X", source=ROCM),
    _CDNA3.gpu("MI325X", 262128, "Instinct MI325X", source=ROCM),
    _CDNA4.gpu("MI350X", 294896, "Instinct MI350X", source=ROCM),
    _CDNA4.gpu("MI355X", 294896, "Instinct MI355X", source=ROCM),
)

SMALLEST_GPU = 2**28
"""Least memory of a GPU given by size, bytes (256 MiB): a CUDA context alone takes more."""


def find_gpu(text: str) -> Gpu:
    """The GPU that `--gpu` names: a name or alias of the table, or a size such as `24GB`.

    Case does not matter, nor whether words are joined by spaces, hyphens, underscores or nothing, nor a leading vendor.
    Part of a name is not enough: `A100` alone is an error, because there are two.

    Raises:
        UsageError: no text, no such name, several GPUs, a size without a unit, or one too small for a GPU.
    """
    check_type("--gpu", text, str, "a name of `memcalc gpus`, or a size such as 24GB")
    key = _key(text)
    if (found := _by_name().get(key)) is not None:
        return found
    if (several := re.fullmatch(r"(\d{1,5})\s*[x*×]\s*([a-zA-Z].*)", text.strip())) is not None:
        raise UsageError(
            f"--gpu names one GPU, not {quoted(text)}: give --gpu {quoted(several[2])[1:-1]} and, in training, --gpus "
            f"{int(several[1])}."
        )
    if not re.fullmatch(r"[+-]?[0-9.,_]+(e[0-9+-]+)?\s*[kmgt]?i?b?", text.strip(), re.IGNORECASE):
        raise UsageError(
            f"No GPU is called {quoted(text)}{_meant(key)} `memcalc gpus` lists them, and a size such as 24GB works "
            "too."
        )
    if text.strip()[-1:] not in "bB":
        size = re.sub(r"\s*[gG][iI]?$", "", text.strip())
        raise UsageError(
            f"--gpu {text!r} is neither a GPU of `memcalc gpus` nor a size with a unit, such as "
            f"{size if size.isdecimal() and len(size) < 4 else '24'}GB."
        )
    total = parse_size(text, "--gpu")
    if total < SMALLEST_GPU:
        raise UsageError(f"--gpu {text!r} is too small for a GPU: give a size such as 24GB, or a name.")
    return _card_of_size(text.strip(), total) or Gpu(text.strip(), total)


def _card_of_size(text: str, total: int) -> Gpu | None:
    """The card that a size in whole GB stands for, which is what its maker calls it: 24GB is no 24 * 10**9 bytes.

    Of several cards of that size it is the one in the middle. None where no card is sold as one of this size.
    """
    if text[-2:-1] in "iI" or total % 10**9:
        return None
    cards = sorted((gpu for gpu in GPUS if sold_as(gpu) == total // 10**9), key=lambda gpu: gpu.usable_bytes)
    if not cards:
        return None
    least, middle, most = cards[0], cards[(len(cards) - 1) // 2], cards[-1]
    usable = format_bytes(middle.usable_bytes, "GiB")
    spread = "" if len(cards) == 1 else f", from {format_bytes(least.usable_bytes, 'GiB')} of the {least.name} to "
    spread += f"{format_bytes(most.usable_bytes, 'GiB')} of the {most.name}" if spread else ""
    note = Assumption(
        "gpu_size_as_sold",
        f"--gpu {text} is read as a card that is sold so, such as the {middle.name}, of which CUDA reports {usable}"
        f"{spread}; a size in GiB is taken as it stands",
    )
    return Gpu(text, middle.total_bytes, usable_bytes=middle.usable_bytes, note=note)


_SOLD = (4, 6, 8, 10, 11, 12, 16, 20, 24, 32, 40, 48, 64, 80, 94, 96, 141, 180, 192, 256, 288)


def sold_as(gpu: Gpu) -> int:
    """The GB on the box of a card: the next size that cards are sold with, as firmware and ECC take from it."""
    return next((size for size in _SOLD if gpu.total_bytes <= size * 2**30), 0)


def _key(name: str) -> str:
    """`name` as it is compared: lower case, words joined, without a leading vendor."""
    words = re.sub(r"[\s_-]+", "", name.lower())
    return re.sub(r"^(nvidia|amd)", "", words)


_MOST_MEANT = 6
"""GPUs that an error names."""


def _meant(key: str) -> str:
    """What an unknown name may stand for: the GPUs whose names it begins, else those that are spelled alike."""
    begun = [gpu.name for gpu in GPUS if key and _key(gpu.name).startswith(key)]
    if begun:
        more = f" or {len(begun) - _MOST_MEANT} others" if len(begun) > _MOST_MEANT else ""
        return f"; did you mean {' or '.join(map(repr, begun[:_MOST_MEANT]))}{more}?"
    return close_matches(key, [gpu.name for gpu in GPUS]) or "."


@cache
def _by_name() -> Mapping[str, Gpu]:
    return MappingProxyType({_key(name): gpu for gpu in GPUS for name in (gpu.name, *gpu.aliases)})
