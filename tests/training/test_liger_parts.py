"""Liger's kernels one by one: what each saves adds up to what all save, and the files of trainers switch them."""

from pathlib import Path

import pytest
from support.cli_runs import answer, refused
from support.shapes import decoder

from memcalc import ModelSpec, TrainingSetup, estimate

QWEN3 = ModelSpec.from_config(decoder(128, 2, 4, 2, 384, 1000, model_type="qwen3"))


def saved(parts: str | None) -> int:
    liger = {} if parts is None else {"kernels": "liger", "liger_kernels": parts}
    found = estimate(QWEN3, TrainingSetup(precision="bf16", **liger)).saved_for_backward_bytes  # type: ignore[arg-type]
    assert found is not None
    return found


def test_what_parts_save_adds_up() -> None:
    without = saved(None)
    alone = [without - saved(part) for part in ("rope", "rms_norm", "swiglu")]
    assert sum(alone) == without - saved("all") == without - saved("liger_rope,rms-norm,geglu")
    assert alone[1] > 0 < alone[2]


AXOLOTL = """
base_model: {model}
plugins: [axolotl.integrations.liger.LigerPlugin]
liger_rope: true
liger_glu_activation: true
sequence_len: 64
micro_batch_size: 1
gradient_accumulation_steps: 1
datasets: [{{path: x, type: alpaca}}]
"""
TRAINER = """
{{
  "model_name_or_path": "{model}",
  "output_dir": "x",
  "use_liger_kernel": true,
  "per_device_train_batch_size": 1,
  "liger_kernel_config": {{"rms_norm": false, "fused_linear_cross_entropy": false}}
}}
"""


@pytest.mark.parametrize(("text", "name"), [(AXOLOTL, "a.yaml"), (TRAINER, "args.json")])
def test_files_of_trainers_switch_them(tmp_path: Path, text: str, name: str) -> None:
    (tmp_path / name).write_text(text.format(model="1B"))
    found = answer("from-config", str(tmp_path / name), "--model", "1B", "--seq-len", "64")["setup"]
    assert found["kernels"] == "liger"
    assert found["liger_kernels"] == "rope,swiglu"
    assert found["loss_implementation"] == "eager"


def test_a_part_that_is_none() -> None:
    assert "rope, rms_norm, swiglu" in refused(
        2, "estimate", "--params", "1B", "--kernels", "liger", "--liger-kernels", "loss"
    )
