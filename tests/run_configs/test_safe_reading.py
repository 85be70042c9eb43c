"""Files from strangers: one sentence each, nothing run, nothing opened but what was named."""

import io
import sys
from pathlib import Path
from typing import Any

import pytest

from memcalc.errors import ConfigError, MemcalcError
from memcalc.run_configs import documents, json_text, yaml_text
from memcalc.run_configs.read import read

BOMB = "a: &a [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{name}: &{name} [{', '.join([f'*{before}'] * 9)}]\n" for before, name in zip("abcdefgh", "bcdefghi", strict=True)
)
TRAINING = "model_name_or_path: example/small\nper_device_train_batch_size: 2\nmax_length: 64\n"

REFUSED = {
    "bomb.yaml": (BOMB, "aliases expanded"),
    "loop.yaml": ("a: &a [*a]\n", "alias"),
    "object.yaml": ("base_model: !!python/object/apply:os.system [id]\n", "tag"),
    "own_tag.yaml": ("base_model: !env SECRET\n", "tag"),
    "deep.yaml": ("a: " + "[" * 500 + "]" * 500, "levels deep"),
    "deep.json": ('{"a": ' + "[" * 5000 + "]" * 5000 + "}", "levels deep"),
    "deep.toml": ("a = " + "[" * 5000 + "]" * 5000, "levels deep"),
    "twice.yaml": ("base_model: a/b\nmicro_batch_size: 1\nmicro_batch_size: 2\n", "twice"),
    "twice_inside.yaml": ("fsdp_config:\n  a: 1\n  a: 2\n", "twice"),
    "twice.json": ('{"bf16": {"enabled": true}, "bf16": {"enabled": false}}', "twice"),
    "twice.toml": ("[training]\nseq_len = 1\nseq_len = 2\n", "no valid TOML"),
    "two.yaml": ("a: 1\n---\nb: 2\n", "several YAML documents"),
    "cut.yaml": ("a: [1, 2\n", "no valid YAML"),
    "cut.json": ('{"a": ', "no valid JSON"),
    "nan.json": ('{"zero_optimization": {"stage": NaN}}', "no number"),
    "long.json": ('{"zero_optimization": {"stage": ' + "1" * 5000 + "}}", "cannot be read"),
    "list.yaml": ("- a\n- b\n", "no keys"),
    "word.yaml": ("hello", "no keys"),
    "empty.yaml": ("", "is empty"),
    "cut.py": ("x = = 1", "no valid Python"),
    "nested.py": ("x = " + "(" * 5000 + ")" * 5000, "Python"),
    "calls.py": ("print('hello')\n", "no call"),
    "nothing.sh": ("echo hello\n", "no launch line"),
    "unknown.yaml": ("trainer:\n  devices: 8\nexp_manager: null\n", "none of the run files"),
    "near.yaml": ("micro_batch_size: 2\nsequence_len: 512\n", "axolotl"),
    "number.yaml": (TRAINING + "gradient_accumulation_steps: [1, 2]\n", "a whole number"),
    "negative.yaml": (TRAINING + "gradient_accumulation_steps: -4\n", "a whole number"),
    "half.yaml": (TRAINING + "gradient_accumulation_steps: 1.5\n", "a whole number"),
    "flag.yaml": (TRAINING + "gradient_checkpointing: perhaps\n", "true or false"),
    "auto.yaml": (TRAINING.replace("2", "auto"), "a whole number"),
    "mapping.yaml": (TRAINING + "gradient_checkpointing_kwargs: 3\n", "a mapping"),
    "optimizer.yaml": (TRAINING + "optim: adamm_torch\n", "did you mean"),
    "attention.yaml": (TRAINING + "attn_implementation: fast\n", "no attention implementation"),
    "both.yaml": (TRAINING + "bf16: true\nfp16: true\n", "both"),
    "bits.yaml": (TRAINING + "load_in_4bit: true\nload_in_8bit: true\nuse_peft: true\n", "both"),
    "engines.yaml": (TRAINING + "fsdp: full_shard\ndeepspeed: zero3.json\n", "exclude each other"),
    "stage.json": ('{"zero_optimization": {"stage": 7}}', "no ZeRO stage 7"),
    "kind.yaml": ("distributed_type: SPREAD\nnum_processes: 2\n", "distributed_type"),
    "mesh.yaml": (
        "distributed_type: FSDP\nnum_processes: 8\nparallelism_config: {dp_shard_size: 3}\n",
        "multiply to 3",
    ),
    "adapter.json": ('{"peft_type": "VERA", "r": 4}', "only LORA"),
    "qlora.yaml": ("base_model: a/b\nadapter: qlora\nlora_r: 4\nsequence_len: 8\n", "load_in_4bit"),
}


@pytest.mark.parametrize(("name", "content"), [(name, text) for name, (text, _) in REFUSED.items()], ids=list(REFUSED))
def test_what_is_refused(tmp_path: Path, name: str, content: str) -> None:
    path = tmp_path / name
    path.write_text(content, encoding="utf-8")
    with pytest.raises(ConfigError) as caught:
        read([str(path)])
    sentence = str(caught.value)
    assert REFUSED[name][1] in sentence
    assert len(sentence) < 400
    assert "\n" not in sentence


def test_a_bomb_is_refused_before_it_is_built() -> None:
    with pytest.raises(ConfigError, match="aliases expanded"):
        yaml_text.load(BOMB, "bomb.yaml")


def test_merge_keys_and_anchors_of_ordinary_files_are_read() -> None:
    assert yaml_text.load("a: &x {b: 1}\nc:\n  <<: *x\n  d: 2\n", "a.yaml") == {"a": {"b": 1}, "c": {"b": 1, "d": 2}}


def test_comments_and_trailing_commas_of_hjson() -> None:
    text = '{// one\n"a": "http://x", /* two */ "b": [1, 2,], # three\n}'
    assert json_text.load_json(text, "a.json") == {"a": "http://x", "b": [1, 2]}


def test_a_large_file_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "large.yaml"
    with path.open("wb") as file:
        file.truncate(100 * 1024 * 1024)
    with pytest.raises(ConfigError, match="larger than 1 MiB"):
        read([str(path)])


@pytest.mark.parametrize("path", ["/dev/zero", "/", "/no/such/file.yaml", "\0"])
def test_what_is_no_file(path: str) -> None:
    with pytest.raises(ConfigError):
        read([path])


def test_bytes_that_are_no_text(tmp_path: Path) -> None:
    path = tmp_path / "a.yaml"
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="UTF-8"):
        read([str(path)])


def test_standard_input(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"vllm serve example/small --max-model-len 512\n")))
    found = read(["-"])
    assert (found.framework, found.model, found.setup["seq_len"]) == ("vllm", "example/small", 512)


def test_a_secret_of_the_wrong_type_is_not_echoed(tmp_path: Path) -> None:
    path = tmp_path / "a.yaml"
    path.write_text("base_model: a/b\nsequence_len: 8\ncut: [hf_secret\n", encoding="utf-8")
    with pytest.raises(MemcalcError) as caught:
        read([str(path)])
    assert "hf_secret" not in str(caught.value)


def test_references_are_resolved_in_the_file_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SIZE", "77")
    path = tmp_path / "recipe.yaml"
    path.write_text(
        "model: {_component_: torchtune.models.llama3_2.llama3_2_1b}\nbatch_size: ${oc.env:SIZE}\nsize: 3\n"
        "gradient_accumulation_steps: ${size}\noptimizer: {_component_: torch.optim.AdamW}\n",
        encoding="utf-8",
    )
    found = read([str(path)])
    assert found.setup["grad_accum"] == 3
    assert any("oc.env" in sentence and "--batch" in sentence for sentence in found.asked)


def test_nothing_beside_the_named_file_is_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "zero3.json").write_text('{"zero_optimization": {"stage": 1}}', encoding="utf-8")
    path = tmp_path / "run.yaml"
    path.write_text(TRAINING + "deepspeed: zero3.json\n", encoding="utf-8")
    opened: list[str] = []
    real = open

    def watched(file: str, *args: Any, **kwargs: Any) -> Any:
        opened.append(str(file))
        return real(file, *args, **kwargs)

    monkeypatch.setattr("builtins.open", watched)
    found = read([str(path)])
    assert found.setup["parallel"] == "zero3"
    assert opened == [str(path)]


@pytest.mark.parametrize("text", ["a", "{", "[", "a: b: c", "!!", "&a", "*a", "---", "\t", "a = 1", "[x]\na=", "%TAG"])
def test_any_text_has_an_answer(text: str) -> None:
    with pytest.raises(ConfigError):
        documents.parse(text, "standard input")
