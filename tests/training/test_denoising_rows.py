"""The loop of diffusers' training scripts, run for real: every row to the byte, or by the tensor that differs."""

from typing import Any

import pytest
from support.diffusion_rows import differences, rows

ROWS = dict(rows())

NOT_OFFERED = {"sd15 full bf16 sdpa math", "sd3 full bf16 sdpa math", "flux full bf16 sdpa math"}
"""Attention by PyTorch's math kernel alone, which no option asks for."""

WORKSPACE = "the row's cuBLAS workspaces, counted as the larger blocks that they were given"
SECOND_MAP = "bitsandbytes keeps its second map, 1024 bytes, once beside the copies that layers have"

KNOWN: dict[str, tuple[tuple[int, int, int], str]] = {
    "flux real dev lora 512x768 r4 ckpt adamw8bit text 77": ((-917504, -917504, -918016), WORKSPACE),
    "flux real dev qlora 512x768 r4 ckpt adamw8bit text 77": ((1024, 1024, 512), SECOND_MAP),
    "ltx full bf16": ((1024, 0, 0), "one vector of the width, not explained"),
    "lumina2 full fp32 a100 b2": ((1024, 0, 0), "two blocks of 512 bytes at the loss, not explained"),
    "sdxl controlnet mixed ckpt b2": ((3072, 0, 0), "six blocks of 512 bytes, not explained"),
    "sd15 controlnet fp32 a100": ((-393216, -393216, -393216), WORKSPACE),
    "flux dora script b2 fp32": ((0, 1572864, 0), "one tensor of a DoRA layer's backward in fp32, not explained"),
    "flux controlnet fp32 a100": ((0, 786432, 0), "one tensor of the width in fp32, not explained"),
    "wan real 1.3b full mixed 480x832x33 ckpt": ((-139264, -139264, -139264), WORKSPACE),
}


@pytest.mark.parametrize("name", [name for name in ROWS if name not in NOT_OFFERED])
def test_row(name: str) -> None:
    found = differences(ROWS[name])
    assert found[:3] == KNOWN.get(name, ((0, 0, 0), ""))[0]
    assert not any(found[3:])  # encode, where there is one


def test_what_differs_is_small_and_has_a_row() -> None:
    assert KNOWN.keys() <= ROWS.keys()
    for name, (found, _) in KNOWN.items():
        peak: dict[str, Any] = ROWS[name]["measured"]["phase_rounded"]
        assert max(map(abs, found)) <= 0.005 * max(peak.values())
