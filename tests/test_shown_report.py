"""Reports in notebooks, pages and pictures: drawn from the job that they answer for."""

import copy
import pickle

import pytest
from support.pages import HOSTILE, Elements

from memcalc import InferenceSetup, ModelSpec, Report, TrainingSetup, UsageError, canonical_spec, estimate

SPEC = ModelSpec.from_parameters("1B")
REPORT = estimate(SPEC, TrainingSetup(seq_len=64), "24GB")


def test_a_page() -> None:
    page = Elements(REPORT.to_html())
    assert page.open == []
    assert "The largest tensors at the peak" in page.words
    assert "mlp.down_proj.weight" in page.words
    assert "What makes it smaller" not in page.words


def test_a_notebook_shows_it() -> None:
    text = REPORT._repr_html_()
    assert text.startswith("<main")
    assert "<svg" in text
    assert "<!doctype" not in text


def test_the_step_over_time() -> None:
    found = REPORT.timeline(samples=50)
    assert len(found.samples) == 50
    assert found.samples[found.peak].total == REPORT.peak.process_bytes
    assert REPORT.to_svg(unit="GB").startswith("<svg")
    assert "prefill" in estimate(SPEC, InferenceSetup(seq_len=64)).to_svg()
    with pytest.raises(UsageError, match="samples"):
        REPORT.timeline(samples=0)


def test_a_report_that_was_read_back_says_the_same_and_has_no_picture() -> None:
    back = type(REPORT).model_validate_json(REPORT.to_json())
    assert back == REPORT
    assert back != estimate(SPEC, TrainingSetup(seq_len=65), "24GB")
    assert "no picture over time" in back.to_html()
    with pytest.raises(UsageError, match="estimate"):
        back.timeline()
    assert Report.model_validate_json(REPORT.to_json()).to_html().startswith("<!doctype")


def test_copies_can_be_drawn() -> None:
    for same in (pickle.loads(pickle.dumps(REPORT)), copy.deepcopy(REPORT)):
        assert same == REPORT
        assert same.timeline(samples=9) == REPORT.timeline(samples=9)


def test_several_gpus() -> None:
    sharded = estimate(SPEC, TrainingSetup(seq_len=64, gpus=4, parallel="fsdp2"))
    assert sharded.timeline().samples
    piped = estimate(SPEC, TrainingSetup(seq_len=64, gpus=2, pipeline_parallel_size=2))
    assert "no picture over time" not in piped.to_html()


def test_a_hostile_name() -> None:
    spec, _ = canonical_spec(10**8)
    page = Elements(estimate(ModelSpec.from_config(spec.config, name=HOSTILE), TrainingSetup(seq_len=16)).to_html())
    assert page.open == []
    assert "script" not in {tag for tag, _ in page.elements}


def test_no_unit() -> None:
    for method in (REPORT.to_html, REPORT.to_svg):
        with pytest.raises(UsageError, match="unit"):
            method(unit="TiB")  # type: ignore[arg-type]
