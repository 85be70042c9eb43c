"""The library as its users meet it: its types, its ways in and out, and what it refuses."""

import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from support.paths import ROOT
from support.readme import BLOCKS

import memcalc
from memcalc import (
    Assumption,
    InferenceReport,
    InferenceSetup,
    MemcalcError,
    ModelSpec,
    Report,
    TrainingReport,
    TrainingSetup,
    canonical_spec,
    estimate,
)
from memcalc.render import box, styles

SPEC = ModelSpec.from_parameters("1B")

TYPED_USE = """
from typing import assert_type

from memcalc import (
    GpuFit, InferencePhases, InferenceSetup, ModelSpec, Report, Serving, TrainingPhases, TrainingSetup, estimate
)

spec = ModelSpec.from_parameters("1B", num_kv_heads=4)
assert_type(estimate(spec, TrainingSetup()).phases, TrainingPhases)
assert_type(estimate(spec, TrainingSetup(), "H100").gpu, GpuFit)
assert_type(estimate(spec, InferenceSetup()).phases, InferencePhases)
assert_type(estimate(spec, InferenceSetup()).kv_cache_bytes, int)
assert_type(estimate(spec, InferenceSetup(), "H100").serving, Serving)


def either(setup: TrainingSetup | InferenceSetup, gpu: str | None) -> Report:
    report = estimate(spec, setup, gpu)
    assert_type(report.gpu, GpuFit | None)
    return report
"""


@pytest.mark.skipif(find_spec("mypy") is None, reason="mypy is not installed")
def test_the_readme_and_a_typed_program_pass_mypy(tmp_path: Path) -> None:
    snippets = [block for language, block in BLOCKS if language == "python"]
    for index, text in enumerate([*snippets, TYPED_USE]):
        (tmp_path / f"snippet{index}.py").write_text(text, encoding="utf-8")
    command = [
        sys.executable,
        "-m",
        "mypy",
        "--strict",
        "--config-file=",
        "--cache-dir",
        str(ROOT / ".mypy_cache" / "users"),
        ".",
    ]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


def test_everything_that_is_named_is_there() -> None:
    for name in memcalc.__all__:
        assert getattr(memcalc, name) is not None
    assert set(memcalc.__all__) <= set(dir(memcalc))
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = memcalc.nothing


def test_a_report_prints_as_its_box() -> None:
    report = estimate(SPEC, TrainingSetup(seq_len=64), "24GB")
    assert str(report) + "\n" == report.render() == styles.plain(box.render(report))
    assert report.render(width=100, unit="GB", unicode=False).isascii()
    assert "\x1b[" in report.render(color=True)
    assert report.to_markdown().startswith("**")
    assert Report.model_validate_json(report.to_json()).render() == report.render()


def test_a_report_is_of_its_kind() -> None:
    assert type(estimate(SPEC, TrainingSetup(seq_len=8))) is TrainingReport
    assert type(estimate(SPEC, InferenceSetup(seq_len=8))) is InferenceReport
    assert isinstance(estimate(SPEC, TrainingSetup(seq_len=8), "24GB"), TrainingReport)


def test_a_model_of_a_count_states_its_shape() -> None:
    made, assumptions = canonical_spec(10**9)
    assert (SPEC.config, list(SPEC.assumptions)) == (made.config, assumptions)
    assert estimate(SPEC, TrainingSetup(seq_len=8)).assumptions[0].code == "model_shape"
    assert ModelSpec.from_parameters(10**9, num_kv_heads=4).config["num_key_value_heads"] == 4


def test_a_model_is_read_from_a_file(tmp_path: Path) -> None:
    config = tmp_path / "config.json"
    config.write_text('{"model_type": "llama", "num_hidden_layers": 2}', encoding="utf-8")
    spec = ModelSpec.from_file(config)
    assert isinstance(spec, ModelSpec)
    assert (spec.name, spec.model_type) == (tmp_path.name, "llama")
    assert estimate(spec, TrainingSetup(seq_len=8)).model.name == tmp_path.name
    folder = ModelSpec.from_file(str(tmp_path))
    assert folder == ModelSpec.from_pretrained(str(tmp_path))
    assert "files_used" in {said.code for said in estimate(folder, TrainingSetup(seq_len=8)).assumptions}


def test_an_adapter_is_no_model(tmp_path: Path) -> None:
    text = '{"peft_type": "LORA", "r": 8, "base_model_name_or_path": "org/base", "target_modules": ["q_proj"]}'
    (tmp_path / "adapter_config.json").write_text(text, encoding="utf-8")
    with pytest.raises(MemcalcError, match="is an adapter for org/base, not a model"):
        ModelSpec.from_file(tmp_path)


WRONG: Any = (24, None, "soon", "config.json", ["a line"], {"batchsize": 3}, "MB")
NUMBER, NOTHING, TEXT, PATH, LINES, MISSPELT, UNIT = WRONG
"""Values of kinds that a type checker would not let pass."""

REFUSED: list[tuple[Any, str]] = [
    (lambda: ModelSpec.from_file(NUMBER), "path needs a path, not 24"),
    (lambda: ModelSpec.from_file("there/is/none"), "there/is/none"),
    (lambda: ModelSpec.from_pretrained(NOTHING), "model needs the id of a model"),
    (lambda: ModelSpec.from_pretrained("no id"), "no id"),
    (lambda: ModelSpec.from_pretrained("a/b", token=NUMBER), "token needs text"),
    (lambda: ModelSpec.from_pretrained("a/b", timeout=TEXT), "timeout needs a number"),
    (lambda: ModelSpec.from_parameters(NOTHING), "count needs a number of parameters"),
    (lambda: ModelSpec.from_parameters("many"), "many"),
    (lambda: ModelSpec.from_config(PATH), "not its path"),
    (lambda: estimate(NOTHING, TrainingSetup()), "spec needs a ModelSpec"),
    (lambda: estimate(SPEC, NOTHING), "setup needs a TrainingSetup"),
    (lambda: estimate(SPEC, TrainingSetup(), NUMBER), "gpu needs a GPU's name"),
    (lambda: estimate(SPEC, TrainingSetup(), assumptions=LINES), "assumptions needs a list of assumptions"),
    (lambda: TrainingSetup(**MISSPELT), "batchsize"),
    (lambda: TrainingSetup().model_copy(update={"batchsize": 3}), "batchsize"),
    (lambda: estimate(SPEC, TrainingSetup(seq_len=8)).render(unit=UNIT), "unit must be GiB or GB, not 'MB'"),
    (lambda: estimate(SPEC, TrainingSetup(seq_len=8)).render(width=TEXT), "width needs a number of columns"),
]


@pytest.mark.parametrize(("wrong", "said"), REFUSED, ids=[said for _, said in REFUSED])
def test_what_is_wrong_is_a_memcalc_error(wrong: Any, said: str) -> None:
    with pytest.raises(MemcalcError) as problem:
        wrong()
    assert said in str(problem.value)


def test_what_the_caller_assumed_is_said() -> None:
    said = Assumption("from_a_sheet", "sizes are those of a data sheet")
    assert said in estimate(SPEC, TrainingSetup(seq_len=8), assumptions=[said]).assumptions
