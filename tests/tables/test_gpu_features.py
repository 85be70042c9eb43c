"""What is known of GPUs besides their memory: rows that their makers and the libraries name."""

import pytest

from memcalc.tables.gpu_features import _NVLINK, features
from memcalc.tables.gpus import GPUS, find_gpu


@pytest.mark.parametrize(
    ("name", "known"),
    [
        ("T4", ((), False, None)),
        ("V100-32GB", ((), False, 300)),
        ("RTX-3090", ((2,), False, 112.5)),
        ("A100-80GB", ((2,), False, 600)),
        ("RTX-4090", ((2,), True, 0)),
        ("L40S", ((2,), True, 0)),
        ("H100-80GB", ((2, 3), True, 900)),
        ("B200", (None, True, 1800)),
        ("MI250X-GCD", ((2,), False, None)),
        ("MI300X", ((2,), True, None)),
        ("24GB", (None, None, None)),
    ],
)
def test_what_is_known(name: str, known: tuple[object, ...]) -> None:
    assert features(find_gpu(name)) == known


def test_every_name_is_a_row_of_the_table() -> None:
    assert set(_NVLINK) <= {gpu.name for gpu in GPUS}


def test_newer_generations_can_no_less() -> None:
    of_nvidia = sorted(
        (gpu.compute_capability, bool(features(gpu).fp8)) for gpu in GPUS if gpu.compute_capability is not None
    )
    assert [fp8 for _, fp8 in of_nvidia] == sorted(fp8 for _, fp8 in of_nvidia)
