"""Remedies in a framework's own keys: read back, they are the remedy."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from support.cli_runs import run

from memcalc import TrainingSetup, canonical_spec, estimate, find_gpu
from memcalc.decide.config_remedies import config_remedies
from memcalc.decide.remedies import OFFLOADING, REMEDIES, SHARDING
from memcalc.decide.what_fits import advise
from memcalc.run_configs.read import read
from memcalc.run_configs.remedy_keys import REMEDY_KEYS

_TRAINER = "per_device_train_batch_size: 4\ngradient_accumulation_steps: 2\nbf16: true\noptim: adamw_torch\n"
FILES = {
    "axolotl": "base_model: org/m\nmicro_batch_size: 4\ngradient_accumulation_steps: 2\nsequence_len: 2048\n"
    "bf16: true\noptimizer: adamw_torch\ndatasets:\n  - path: d\n    type: alpaca\n",
    "llamafactory": "model_name_or_path: org/m\nstage: sft\ndo_train: true\nfinetuning_type: full\ndataset: d\n"
    "template: llama3\ncutoff_len: 2048\ndisable_gradient_checkpointing: true\n" + _TRAINER,
    "trl": "model_name_or_path: org/m\ndataset_name: d\nmax_length: 2048\ngradient_checkpointing: false\n" + _TRAINER,
    "hf": "output_dir: o\n" + _TRAINER,
    "msswift": "model: org/m\ntuner_type: full\nmax_length: 2048\ngradient_checkpointing: false\n" + _TRAINER,
}
OURS = {remedy.name: remedy.options for remedy in (*REMEDIES, *SHARDING, *OFFLOADING)}


def rereading(framework: str, folder: Path) -> Callable[[Sequence[str]], Any]:
    path = folder / "run.yaml"
    path.write_text(FILES[framework])
    return lambda words: read([str(path)], list(words), framework=framework).setup


def setup_of(said: dict[str, Any], **more: Any) -> TrainingSetup:
    return TrainingSetup(**{name: said[name] for name in said if name in TrainingSetup.model_fields}, **more)


@pytest.mark.parametrize("framework", FILES)
def test_the_keys_mean_what_the_remedy_does(framework: str, tmp_path: Path) -> None:
    reread = rereading(framework, tmp_path)
    setup = setup_of(reread(()), gpus=4)
    found = config_remedies(framework, setup, reread)
    assert found is not None
    names = [remedy.name for remedy in found]
    assert set(names) == REMEDY_KEYS[framework].keys() - {"QLoRA of the adapters"}
    for remedy in found:
        if remedy.name == "gradient accumulation":
            assert (remedy.options["batch"], remedy.options["grad_accum"]) == (1, 8)
            continue
        aim = {name: value for name, value in OURS[remedy.name].items() if name not in ("precision", "quantization")}
        has = {name: remedy.options.get(name, getattr(setup, name)) for name in aim}
        assert has == aim or (framework, remedy.name) == ("trl", "fused loss")  # TRL's own loss makes no logits anyway
        if remedy.name == "QLoRA":
            assert remedy.options["quantization"].startswith("nf4")


@pytest.mark.parametrize("framework", ["axolotl", "llamafactory", "trl", "msswift"])
def test_the_stack_read_back_is_what_was_promised(framework: str, tmp_path: Path) -> None:
    reread = rereading(framework, tmp_path)
    spec, gpu = canonical_spec(8 * 10**9)[0], find_gpu("RTX-4090")
    setup = setup_of({"seq_len": 2048, **reread(())})
    advice = advise(spec, setup, gpu, known=config_remedies(framework, setup, reread))
    assert advice.stack
    keys = [pair.split(": ") for remedy in advice.stack for pair in remedy.keys.split(", ")]
    again = setup_of({"seq_len": 2048, **reread([word for key, value in keys for word in (f"--{key}", value)])})
    report = estimate(spec, again, gpu)
    assert report.gpu is not None
    assert report.gpu.fits
    assert report.peak.process_bytes == advice.process_bytes


def test_a_framework_without_a_table_has_memcalcs_own() -> None:
    assert config_remedies("torchtitan", TrainingSetup(), lambda words: {}) is None


def test_below_the_box_stand_the_frameworks_keys(tmp_path: Path) -> None:
    rereading("axolotl", tmp_path)
    text = run("from-config", str(tmp_path / "run.yaml"), "--model", "8B", "--gpu", "RTX-4090").stdout
    below = text[text.index("What makes it smaller") :]
    assert "gradient_checkpointing: true" in below
    assert "--activation-checkpointing" not in below
