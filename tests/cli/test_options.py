"""The options are the setup's fields: each by its name, in the help, with its default, and reaching the setup."""

import json
import re
from typing import Any, Literal, get_args, get_origin

import pytest
from support.cli_runs import refused, run

from memcalc.cli.options import SETUPS, Declared, build_setup, declared, read_value
from memcalc.cli.program import COMMANDS
from memcalc.errors import UsageError
from memcalc.setup.setup import InferenceSetup, TrainingSetup

WITH_SETUP = ("estimate", "from-file", "from-hub")


def help_of(command: str, width: int = 200) -> str:
    return str(run(command, "--help", env={"COLUMNS": str(width)}).stdout)


@pytest.mark.parametrize("command", COMMANDS)
def test_every_option_and_argument_has_help(command: str) -> None:
    lines = help_of(command, 80).splitlines()
    entries = [index for index, line in enumerate(lines) if re.match(r"│ (-|[A-Z|/. ]+ +│$)", line)]
    assert entries
    for index in entries:
        assert re.match(r"│ +\S.*│$", lines[index + 1]), lines[index]
        below = next(line for line in lines[index + 1 :] if not re.match(r"│ (-|[a-z|])", line))
        assert re.match(r"│     \S", below), lines[index]


@pytest.mark.parametrize("width", [60, 80, 120, 200])
@pytest.mark.parametrize("command", ["estimate", "from-config"])
def test_panels_hold_a_dozen_options_and_keep_within_the_terminal(command: str, width: int) -> None:
    text = help_of(command, width)
    assert max(map(len, text.splitlines())) <= width
    panels = re.split(r"^╭─ (.+?) ─+╮$", text, flags=re.MULTILINE)[1:]
    for title, panel in zip(panels[::2], panels[1::2], strict=True):
        if title != "Arguments":
            assert 1 <= len(re.findall(r"^│ --(?!no-)", panel, flags=re.MULTILINE)) <= 12, title
    for option in declared():
        assert f" --{option.replace('_', '-')}" in text


@pytest.mark.parametrize("command", WITH_SETUP)
def test_every_field_is_an_option_of_every_estimating_command(command: str) -> None:
    text = help_of(command)
    for setup in SETUPS.values():
        for field in setup.model_fields:
            assert f"--{field.replace('_', '-')}" in text


def test_defaults_are_in_the_help() -> None:
    text = re.sub(r"[\s│]+", "", help_of("estimate", 80))
    for option in declared().values():
        if option.default not in (None, False):
            assert f"[default:{str(option.default).lower()}]" in text


def test_fields_are_options_of_the_modes_that_have_them() -> None:
    for option in declared().values():
        assert option.modes == tuple(mode for mode, setup in SETUPS.items() if option.name in setup.model_fields)


def sample(option: Declared) -> Any:
    """A value for `option` that is not its default, as text."""
    if option.kind is bool:
        return not option.default
    if get_origin(option.kind) is Literal:
        return next(choice for choice in reversed(get_args(option.kind)) if choice != option.default)
    return {int: "7", float: "0.5", str: "500MiB"}[option.kind]


def test_every_choice_is_read_as_itself() -> None:
    for option in declared().values():
        if get_origin(option.kind) is Literal:
            for choice in get_args(option.kind):
                assert read_value(option.option, option.kind, choice) == choice


ALONE = {
    "batch",
    "seq_len",
    "attention",
    "padding_mask",
    "cuda_context",
    "cublas_workspace",
    "allocator_reserve",
    "dtype",
}


@pytest.mark.parametrize("name", sorted(ALONE))
def test_what_is_given_reaches_the_setup(name: str) -> None:
    option = declared()[name]
    given = sample(option)
    setup = build_setup(option.modes[-1], {name: given, **{other: None for other in declared() if other != name}})
    assert getattr(setup, name) == option.read(given) != option.default
    assert setup.model_fields_set == {name}


def test_nothing_given_is_the_default_setup() -> None:
    nothing = dict.fromkeys(declared())
    assert build_setup("training", nothing) == TrainingSetup()
    assert build_setup("inference", nothing) == InferenceSetup()


@pytest.mark.parametrize(
    ("kind", "text", "value"),
    [
        (int, "4096", 4096),
        (int, "4_096", 4096),
        (int, "4,096", 4096),
        (int, " 8 ", 8),
        (int, "-1", -1),
        (float, "1e-2", 0.01),
        (str, "adamw", "adamw"),
        (Literal["a", "b"], "b", "b"),
        (Literal["bf16", "vLLM"], "BF16", "bf16"),
        (Literal["bf16", "vLLM"], "torch.bfloat16", "bf16"),
        (Literal["bf16", "vLLM"], "vllm", "vLLM"),
        (Literal["eager", "flash"], "flash_attention_2", "flash"),
        (Literal["f16", "q8_0"], "Q8_0", "q8_0"),
        (Literal["float16", "bf16"], "float16", "float16"),
    ],
)
def test_reading_values(kind: Any, text: str, value: object) -> None:
    assert read_value("--x", kind, text) == value


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        (int, ""),
        (int, "1e3"),
        (int, "0x10"),
        (int, "1.0"),
        (int, "²"),
        (float, ""),
        (float, "1GB"),
        (str, " "),
        (Literal["a"], "b"),
    ],
)
def test_values_that_cannot_be_read(kind: Any, text: str) -> None:
    with pytest.raises(UsageError, match="--x"):
        read_value("--x", kind, text)


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("memcalc gp", {"gpus"}),
        ("memcalc estimate --precision mix", {"mixed-bf16", "mixed-fp16"}),
        ("memcalc estimate --gpu H100", {"H100-80GB", "H100-NVL-94GB"}),
        ("memcalc estimate --mode inf", {"inference"}),
        ("memcalc estimate --unit G", {"GiB", "GB"}),
        ("memcalc estimate --optimizer paged-l", {"paged-lion", "paged-lion-8bit"}),
        ("memcalc estimate --like llama", {"llama-2", "llama-3"}),
        ("memcalc estimate --sez", set()),
        ("memcalc estimate --seq-", {"--seq-len"}),
    ],
)
def test_completion(words: str, expected: set[str]) -> None:
    env = {"_MEMCALC_COMPLETE": "complete_bash", "COMP_WORDS": words, "COMP_CWORD": str(len(words.split()) - 1)}
    result = run(env=env, prog_name="memcalc")
    assert set(result.stdout.split()) == expected


def test_precision_is_the_dtype_of_inference() -> None:
    shown = ("estimate", "--params", "1B", "--mode", "inference", "--json")
    assert json.loads(run(*shown, "--precision", "fp32").stdout)["setup"]["dtype"] == "fp32"
    assert json.loads(run(*shown, "--precision", "fp16", "--dtype", "fp16").stdout)["setup"]["dtype"] == "fp16"
    assert "--dtype cannot be 'mixed-bf16'" in refused(2, *shown, "--precision", "mixed-bf16")
    assert "say the same" in refused(2, *shown, "--precision", "fp16", "--dtype", "fp32")


@pytest.mark.parametrize(
    ("option", "word", "meant"),
    [
        ("--quantization", "4bit", "nf4"),
        ("--quantization", "bnb-4bit", "nf4"),
        ("--quantization", "q4_k_m", "give the .gguf"),
        ("--activation-checkpointing", "on", "full"),
        ("--batch", "1" + 40 * "0", "smaller number"),
    ],
)
def test_words_of_other_tools_for_values(option: str, word: str, meant: str) -> None:
    said = run("estimate", "--params", "1B", option, word, code=2).stderr
    assert meant in said
    assert "did you mean" not in said
