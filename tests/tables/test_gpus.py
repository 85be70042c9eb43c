"""The GPU and overhead tables: names find exactly one row, and never by part of a name."""

import pytest

from memcalc.common.sizes import MIB
from memcalc.errors import UsageError
from memcalc.tables.cuda_contexts import READINGS, context_of
from memcalc.tables.gpus import GPUS, Gpu, find_gpu
from memcalc.tables.overheads import CUDA_CONTEXT_INFERENCE, CUDA_CONTEXT_TRAINING, WORKSPACES, workspace_of


def test_the_table_is_long_and_sane() -> None:
    assert len(GPUS) >= 40
    for gpu in GPUS:
        assert 4 * 2**30 < gpu.total_bytes < 512 * 2**30, gpu
        assert gpu.source, gpu
        assert gpu.architecture, gpu


def test_every_name_and_alias_finds_its_own_row() -> None:
    for gpu in GPUS:
        for name in (gpu.name, *gpu.aliases):
            for spelling in (name, name.upper(), name.lower(), name.replace("-", " "), f"NVIDIA {name}"):
                assert find_gpu(spelling) is gpu, spelling


@pytest.mark.parametrize(
    ("name", "mib", "capability"),
    [
        ("H100-80GB", 81559, (9, 0)),
        ("NVIDIA H100 80GB HBM3", 81559, (9, 0)),
        ("H100 NVL", 95830, (9, 0)),
        ("A100-80GB", 81920, (8, 0)),
        ("NVIDIA A100-SXM4-40GB", 40960, (8, 0)),
        ("a6000", 49140, (8, 6)),
        ("rtx 4090", 24564, (8, 9)),
        ("4090", 24564, (8, 9)),
        ("RTX_5090", 32607, (12, 0)),
        ("T4", 15360, (7, 5)),
        ("H200", 143771, (9, 0)),
        ("b200", 183359, (10, 0)),
        ("MI300X", 196592, None),
    ],
)
def test_known_gpus(name: str, mib: int, capability: tuple[int, int] | None) -> None:
    gpu = find_gpu(name)
    assert gpu.total_bytes == mib * MIB
    assert gpu.compute_capability == capability


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("A100", "did you mean 'A100-40GB' or 'A100-80GB'?"),
        ("V100", "did you mean 'V100-16GB' or 'V100-32GB'?"),
        ("H10", "No GPU is called 'H10'"),
        ("H1000-80GB", "did you mean 'H100-80GB'"),
        ("RTX 4900", "did you mean 'RTX-4090'"),
        ("RTX", "'RTX-2060' or 'RTX-2070' or 'RTX-2080' or 'RTX-2080-Ti' or 'RTX-3050' or 'RTX-3060' or 34 others"),
        ("2xA100-80GB", "give --gpu A100-80GB and, in training, --gpus 2"),
        ("8 x h100", "give --gpu h100 and, in training, --gpus 8"),
        ("16", "such as 16GB"),
        ("24G", "such as 24GB"),
        ("-3GB", "is not a size"),
        ("gaudi", "No GPU is called 'gaudi'"),
        ("", "No GPU is called ''"),
        ("[bold]\x1b[31m", "'[bold]\\x1b[31m'"),
        ("24", "a size with a unit"),
        ("24G", "a size with a unit"),
        ("100MiB", "too small for a GPU"),
        ("0GB", "too small for a GPU"),
        ("99999999999GB", "larger than any memory"),
        ("1.2.3GB", "not a size"),
    ],
)
def test_what_is_no_gpu(text: str, says: str) -> None:
    with pytest.raises(UsageError) as refusal:
        find_gpu(text)
    assert says in str(refusal.value)


@pytest.mark.parametrize(("text", "nbytes"), [("23GB", 23 * 10**9), ("80 GiB", 80 * 2**30), ("1.5tb", 1500 * 10**9)])
def test_a_size_is_a_gpu_without_a_name(text: str, nbytes: int) -> None:
    assert find_gpu(text) == Gpu(text, nbytes)


@pytest.mark.parametrize(
    ("gpu", "name", "nbytes"),
    [
        (None, "cuBLAS workspace", 8_519_680),
        ("24GB", "cuBLAS workspace", 8_519_680),
        ("RTX-4090", "cuBLAS workspace", 8_519_680),
        ("A100-80GB", "cuBLAS workspace", 8_519_680),
        ("H100-80GB", "cuBLAS workspace", 32 * MIB),
        ("B200", "cuBLAS workspace", 32 * MIB),
        ("RTX-5090", "cuBLAS workspace", 32 * MIB),
        ("MI210", "hipBLAS workspace", 32 * MIB),
        ("MI300X", "hipBLAS workspace", 128 * MIB),
    ],
)
def test_workspace_by_generation(gpu: str | None, name: str, nbytes: int) -> None:
    row = workspace_of(find_gpu(gpu) if gpu else None)
    assert (row.name, row.nbytes) == (name, nbytes)


@pytest.mark.parametrize(
    ("name", "least", "most"),
    [
        ("A100-80GB", 79.1, 79.35),
        ("H100-80GB", 79.1, 79.65),
        ("H200", 139.7, 139.85),
        ("RTX-3090", 23.55, 23.7),
        ("RTX-4090", 23.5, 23.65),
        ("RTX-A6000", 47.4, 47.55),
        ("L40S", 44.35, 44.55),
        ("T4", 14.5, 14.8),
        ("V100-16GB", 15.7, 15.8),
        ("B300", 267.6, 267.8),
    ],
)
def test_a_process_can_have_what_cuda_reports(name: str, least: float, most: float) -> None:
    gpu = find_gpu(name)
    assert least <= gpu.usable_bytes / 2**30 <= most
    assert gpu.note is not None
    assert "CUDA reports" in gpu.note.text


def test_no_card_gives_more_than_it_has() -> None:
    for gpu in GPUS:
        kept = (gpu.total_bytes - gpu.usable_bytes) / 2**30
        assert 0 <= kept < 1.2, gpu
        assert (gpu.note is not None) == (kept > 0), gpu
    assert find_gpu("MI300X").usable_bytes == find_gpu("MI300X").total_bytes


@pytest.mark.parametrize(
    ("size", "card", "apart"),
    [("24GB", "RTX-4090", 0.2), ("80GB", "H100-80GB", 0.1), ("48GB", "RTX-A6000", 3.2), ("141 gb", "H200", 0.0)],
)
def test_a_size_on_a_box_is_the_card(size: str, card: str, apart: float) -> None:
    gpu = find_gpu(size)
    assert abs(gpu.usable_bytes - find_gpu(card).usable_bytes) <= apart * 2**30
    assert gpu.note is not None
    assert f"--gpu {size} is read as a card" in gpu.note.text
    assert find_gpu("24GiB").note is None


def test_every_overhead_names_its_source() -> None:
    assert all(row.source for row in WORKSPACES)
    assert all(row.source for row in (CUDA_CONTEXT_TRAINING, CUDA_CONTEXT_INFERENCE))
    assert CUDA_CONTEXT_TRAINING.nbytes - CUDA_CONTEXT_INFERENCE.nbytes == 8 * MIB


@pytest.mark.parametrize(
    ("name", "mib", "says"),
    [
        ("H100-80GB", 601, "one reading"),
        ("T4", 205, "the most of 3 readings, 140 to 205 MiB"),
        ("A10G", 710, "of its compute capability: RTX-3060, RTX-3090, RTX-A4000, RTX-A6000"),
        ("GH200-96GB", 612, "of its compute capability: H100-80GB, H200"),
    ],
)
def test_the_context_is_the_most_that_was_read_on_a_gpu_or_on_its_like(name: str, mib: int, says: str) -> None:
    found = context_of(find_gpu(name))
    assert found is not None
    assert found[0] == mib * MIB
    assert says in found[1]


def test_the_context_of_what_nobody_read_is_the_measured_one() -> None:
    assert [context_of(gpu) for gpu in (None, find_gpu("V100-16GB"), find_gpu("24GB"), find_gpu("RTX-A6000"))] == [
        None
    ] * 4


def test_every_reading_names_a_gpu_of_the_table() -> None:
    for row in READINGS:
        assert find_gpu(row.gpu).compute_capability == row.capability
        assert row.source
