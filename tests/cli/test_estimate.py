"""`estimate` from the prompt: the example of the documentation page, JSON, fit, and everything that must be refused."""

import json

import pytest
from support.cli_runs import answer, refused, run

from memcalc.estimation import estimate as estimation
from memcalc.tables.gpus import GPUS

FOUR_B = ("estimate", "--params", "4B", "--batch", "16")


def test_the_example_of_the_page_is_recognisable() -> None:
    text = run(*FOUR_B).stdout
    assert "MODEL WEIGHTS" in text
    assert "6 bytes/param" in text
    assert "8 bytes/param" in text
    assert "Assumptions:" in text
    assert "256" in text
    found = answer(*FOUR_B)
    assert found["model"]["parameters"]["total"] == 4_047_191_040
    assert abs(found["peak"]["allocated_bytes"] / 81.85e9 - 1) < 0.01
    assert abs(found["peak"]["process_bytes"] / 85e9 - 1) < 0.02
    measured = 98_211_725_312  # PyTorch's allocator on an H100 without a limit of memory, in step 2 and 3
    assert answer(*FOUR_B, "--gpu", "H200")["peak"]["reserved_bytes"] == measured
    context = 612 * 2**20  # the reading of an H200 (`tables/cuda_contexts.py`)
    assert answer(*FOUR_B, "--gpu", "H200")["peak"]["process_bytes"] == measured + context


@pytest.mark.parametrize("params", ["1.1b", "350M", "0.5B", "4e9", "7_000_000_000", "8030261248"])
def test_counts_that_are_accepted(params: str) -> None:
    found = answer("estimate", "--params", params)
    assert found["components"]["gradients"]["bytes_per_parameter"] == pytest.approx(4, rel=0.01)


def test_every_shape_number_can_be_given() -> None:
    found = answer(
        "estimate",
        "--hidden-size",
        "2048",
        "--num-layers",
        "16",
        "--num-heads",
        "32",
        "--num-kv-heads",
        "8",
        "--head-dim",
        "64",
        "--intermediate-size",
        "8192",
        "--vocab-size",
        "128256",
        "--tie-embeddings",
    )
    assert found["model"]["parameters"]["total"] == 1_235_814_400  # Llama-3.2-1B


def test_the_setup_lists_every_resolved_option() -> None:
    found = answer(*FOUR_B, "--optimizer", "sgd", "--precision", "bf16", "--grad-accum", "2", "--padding-mask")
    setup = found["setup"]
    assert setup["mode"] == "training"
    assert (setup["batch"], setup["seq_len"], setup["grad_accum"]) == (16, 256, 2)
    assert (setup["optimizer"], setup["precision"], setup["padding_mask"]) == ("sgd", "bf16", True)


def test_inference() -> None:
    found = answer("estimate", "--params", "1B", "--mode", "inference", "--dtype", "fp16", "--seq-len", "512")
    assert list(found["phases"]) == ["load", "prefill", "decode"]
    assert found["kv_cache_bytes"] > 0
    assert found["saved_for_backward_bytes"] is None


@pytest.mark.parametrize("gpu", ["H100-80GB", "h100", "80GB", "RTX 4090", "24GB"])
def test_the_gpu_is_named_and_fitted(gpu: str) -> None:
    found = answer("estimate", "--params", "1B", "--gpu", gpu)
    assert found["gpu"]["fits"] is True
    assert found["gpu"]["free_bytes"] == found["gpu"]["usable_bytes"] - found["peak"]["process_bytes"]


def test_check_exits_with_3_and_still_answers() -> None:
    result = run(*FOUR_B, "--gpu", "24GB", "--check", code=3)
    assert "does not fit" in result.stdout
    assert result.stderr == ""
    assert answer(*FOUR_B, "--gpu", "24GB", "--check", code=3)["gpu"]["fits"] is False
    run(*FOUR_B, "--gpu", "B200", "--check", code=0)
    run(*FOUR_B, "--gpu", "24GB", code=0)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--params", "4X"], "4X"),
        (["--params", "-3B"], "not a positive number"),
        (["--params", "0"], "smaller than any transformer"),
        (["--params", ""], "empty"),
        (["--params", "nan"], "not a positive number"),
        (["--params", "1e30"], "larger than any model"),
        ([], "--params"),
        (["--num-layers", "4"], "--hidden-size"),
        (["--hidden-size", "0", "--num-layers", "4"], "--hidden-size must be at least 1"),
        (["--params", "4B", "--hidden-size", "wide"], "--hidden-size needs a whole number"),
        (["--params", "4B", "--batch", "0"], "--batch must be at least 1"),
        (["--params", "4B", "--batch", "-2"], "--batch must be at least 1"),
        (["--params", "4B", "--batch", "two"], "--batch needs a whole number"),
        (["--params", "4B", "--batch", "1.5"], "--batch needs a whole number"),
        (["--params", "4B", "--batch", "9" * 25], "--batch must be at most"),
        (["--params", "4B", "--batch", "9" * 5000], "--batch must be a smaller number than"),
        (["--params", "4B", "--batch"], "requires an argument"),
        (["--params", "4B", "--seq-len", "-1"], "--seq-len must be at least 1"),
        (["--params", "4B", "--precision", "bf17"], "did you mean 'bf16'"),
        (["--params", "4B", "--precision", ""], "--precision cannot be ''"),
        (["--params", "4B", "--attention", "flash3"], "did you mean 'flash'"),
        (["--params", "4B", "--optimizer", "adamW2"], "did you mean 'adamw'"),
        (["--params", "4B", "--optimizer", "zzz"], "optimizer 'zzz' is not known"),
        (["--params", "4B", "--optimizer", "adafactor", "--optimizer-impl", "fused"], "adafactor has no fused"),
        (["--params", "4B", "--mode", "train"], "did you mean 'training'"),
        (["--params", "4B", "--mode", "inference", "--optimizer", "sgd"], "--optimizer belongs to --mode training"),
        (["--params", "4B", "--dtype", "bf16"], "--dtype belongs to --mode inference"),
        (["--params", "4B", "--mode", "inference", "--keep-logits"], "--keep-logits belongs to --mode training"),
        (["--params", "4B", "--gpu", "H10O"], "No GPU is called 'H10O'"),
        (["--params", "4B", "--gpu", "A100"], "'A100-40GB' or 'A100-80GB'"),
        (["--params", "4B", "--check"], "--check needs to know the GPU"),
        (["--params", "4B", "--unit", "MB"], "--unit"),
        (["--params", "4B", "--width", "59"], "--width must lie between 60"),
        (["--params", "4B", "--width", "99999"], "--width must lie between 60"),
        (["--params", "4B", "--json", "--markdown"], "exclude each other"),
        (["--params", "4B", "--allocator-reserve", "-1"], "--allocator-reserve must be at least 0"),
        (["--params", "4B", "--allocator-reserve", "nan"], "--allocator-reserve"),
        (["--params", "4B", "--allocator-reserve", "some"], "--allocator-reserve needs a number"),
        (["--params", "4B", "--allocator-reserve", "nan"], "--allocator-reserve needs a number, not 'nan'"),
        (["--params", "4B", "--allocator-reserve", "٠.٥"], "--allocator-reserve needs a number"),
        (["--params", "4B", "--cuda-context", "big"], "not a size"),
        (["--params", "4B", "--cublas-workspace", "8M"], "ambiguous"),
        (["--params", "4B", "--batc", "1"], "No such option"),
        (["--params", "4B", "extra"], "extra"),
        (["--params", "1B", "--num-layers", "1000000000"], "--num-layers must lie between 1 and 100000"),
        (["--params", "1B", "--vocab-size", "1000000000000"], "--vocab-size must lie between"),
        (["--params", "1T", "--hidden-size", "64"], "larger --hidden-size"),
        (["--params", "1B", "--hidden-size", "64", "--num-layers", "3"], "a model of this shape has 4,293,056"),
        (["--params", "4,5B"], "not a positive number"),
        (["--params", "4B", "--batch", "1,5"], "--batch needs a whole number"),
        (["--params", "4B", "--optimizer", "adamww"], "did you mean 'adamw' or 'adam' or 'adamw-hf'? `memcalc"),
        (["--params", "\x1b[2J4B"], r"\x1b[2J4B"),
        (["--params", "4B", "--gpu", "\x1b[2J"], r"\x1b[2J"),
    ],
)
def test_wrong_usage(arguments: list[str], says: str) -> None:
    assert says in refused(2, "estimate", *arguments)


@pytest.mark.parametrize("arguments", [["estimat"], ["--nothing"], ["gpus", "--all"], ["from-file"], ["schema", "x"]])
def test_wrong_commands(arguments: list[str]) -> None:
    refused(2, *arguments)


def test_a_mistyped_command_is_corrected() -> None:
    assert "did you mean 'estimate'?" in refused(2, "estimat")


def test_the_tables() -> None:
    lines = run("gpus").stdout.splitlines()
    assert len(lines) == len(GPUS) + 1
    assert any(line.split()[:3] == ["H100-80GB", "79.6", "GiB"] for line in lines)
    assert "adamw" in run("optimizers").stdout
    assert "llama" in run("families").stdout
    assert json.loads(run("schema").stdout)["title"] == "Report"


def test_version_and_help() -> None:
    assert run("--version").stdout.startswith("memcalc 0.")
    for arguments in (["--help"], ["-h"], []):
        assert "estimate" in run(*arguments).stdout


def test_a_fault_of_its_own_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object, **__: object) -> None:
        raise KeyError("rotary\x1b[2J")

    monkeypatch.setattr(estimation, "estimate", broken)
    result = run(*FOUR_B, code=1)
    assert result.stdout == ""
    assert "please report it" in result.stderr
    assert "KeyError" in result.stderr
    assert result.stderr.count("\n") == 1
    assert "\x1b" not in result.stderr


def test_debugging_shows_where(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object, **__: object) -> None:
        raise KeyError("rotary")

    monkeypatch.setattr(estimation, "estimate", broken)
    monkeypatch.setenv("MEMCALC_DEBUG", "1")
    with pytest.raises(KeyError):
        run(*FOUR_B, catch_exceptions=False)


def test_a_count_may_stand_alone() -> None:
    assert run("estimate", "1B", "--json").stdout == run("estimate", "--params", "1B", "--json").stdout
    assert "say the same" in refused(2, "estimate", "1B", "--params", "2B")
    assert "'--lora'" not in refused(2, "estimate", "no-count")


@pytest.mark.parametrize(("name", "coloured"), [("FORCE_COLOR", True), ("NO_COLOR", False)])
def test_colours_are_forced_and_forbidden_as_rich_has_it(name: str, coloured: bool) -> None:
    assert ("\x1b[" in run("estimate", "1B", env={name: "1"}).stdout) == coloured
