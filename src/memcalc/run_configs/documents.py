"""Reading the files that were named, and telling what each is. Nothing else is opened."""

from __future__ import annotations

import os
import re
import stat
import sys
from dataclasses import dataclass
from typing import Any

from memcalc.common.escaping import quoted
from memcalc.errors import ConfigError
from memcalc.run_configs import (
    accelerate,
    ai_toolkit,
    axolotl,
    deepspeed,
    json_text,
    kohya,
    llama_factory,
    llama_factory_v1,
    ms_swift,
    one_trainer,
    peft_adapter,
    simple_tuner,
    torchtitan,
    torchtune,
    unsloth,
    vllm,
    yaml_text,
)
from memcalc.run_configs.known_keys import trl_keys

LARGEST = 1 << 20
"""Bytes of a run file."""

STDIN = "-"

LAUNCHERS = re.compile(
    r"(?:^|[\s/])(accelerate\s+launch|deepspeed\s|torchrun\s|trl\s+\w+|llamafactory-cli\s|axolotl\s+\w+|tune\s+run|swift\s+(?:sft|rlhf|pt)"
    r"|vllm\s+serve|llama-server|llama-cli|python3?\s+\S+|uv\s+run)",
    re.MULTILINE,
)

_HF_MARKS = {
    "per_device_train_batch_size",
    "gradient_accumulation_steps",
    "num_train_epochs",
    "output_dir",
    "learning_rate",
    "gradient_checkpointing",
    "model_name_or_path",
    "optim",
    "bf16",
    "fp16",
    "lr_scheduler_type",
    "max_steps",
}

_TELLS = (
    ("deepspeed", deepspeed.is_deepspeed),
    ("accelerate", accelerate.is_accelerate),
    ("peft", peft_adapter.is_adapter),
    ("aitoolkit", ai_toolkit.is_ai_toolkit),
    ("simpletuner", simple_tuner.is_simple_tuner),
    ("onetrainer", one_trainer.is_one_trainer),
    ("kohya", kohya.is_kohya),
    ("kohya-dataset", kohya.is_dataset),
    ("torchtune", torchtune.is_torchtune),
    ("torchtitan", torchtitan.is_torchtitan),
    ("axolotl", axolotl.is_axolotl),
    ("llamafactory", llama_factory.is_llama_factory),
    ("msswift", ms_swift.is_swift),
    ("llamafactory-v1", llama_factory_v1.is_v1),
    ("vllm", vllm.is_vllm),
)


@dataclass
class Document:
    """A file: its name for messages, its kind, its values (none of shell and Python), and its text."""

    where: str
    kind: str
    values: dict[str, Any]
    text: str = ""


def read(path: str, framework: str = "") -> Document:
    """A file by path, `-` for standard input. Raises ConfigError where it cannot be read or is none of the kinds."""
    where = "standard input" if path == STDIN else os.path.basename(path) or path
    return parse(_text(path, where), where, framework)


def _text(path: str, where: str) -> str:
    try:
        if path == STDIN:
            raw = sys.stdin.buffer.read(LARGEST + 1)
        else:
            kind = os.stat(path)
            if stat.S_ISDIR(kind.st_mode):
                raise ConfigError(f"{quoted(path)} is a folder: give the run file in it.")
            named_pipe = stat.S_ISFIFO(kind.st_mode) and os.path.exists(os.path.realpath(path))  # a shell's <( ) is not
            if not (stat.S_ISREG(kind.st_mode) or stat.S_ISFIFO(kind.st_mode)) or named_pipe:
                what = "a named pipe, which may stay silent" if named_pipe else "no ordinary file"
                raise ConfigError(f"{quoted(path)} is {what}: give a run file, or - for standard input.")
            if kind.st_size > LARGEST:
                raise ConfigError(f"{where} is larger than 1 MiB, so it is no run file: give the training file itself.")
            with open(path, "rb") as file:
                raw = file.read(LARGEST + 1)
    except OSError as problem:
        raise ConfigError(f"{quoted(path)} cannot be read ({problem.strerror}): check the path.") from None
    except ValueError:
        raise ConfigError(f"{quoted(path)} is no path: check it.") from None
    if len(raw) > LARGEST:
        raise ConfigError(f"{where} is larger than 1 MiB, so it is no run file: give the training file itself.")
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError:
        raise ConfigError(f"{where} is no UTF-8 text: give a YAML, JSON, TOML, shell or Python file.") from None


def parse(text: str, where: str, framework: str = "") -> Document:
    """A text as a document, by the ending of its name, else by what it looks like. Raises ConfigError."""
    ending = os.path.splitext(where)[1].lower()
    if not text.strip():
        raise ConfigError(f"{where} is empty: give a run file.")
    if ending in (".sh", ".bash", ".txt", ".md", ".slurm", ".sbatch", ".zsh"):
        return Document(where, "shell", {}, _code_blocks(text) if ending == ".md" else text)
    if ending == ".py":
        return Document(where, "python", {}, text)
    if ending == ".toml":
        values: Any = json_text.load_toml(text, where)
    elif ending in (".json", ".hjson") or (ending not in (".yaml", ".yml") and text.lstrip().startswith("{")):
        values = json_text.load_json(text, where)
    elif ending in (".yaml", ".yml"):
        values = yaml_text.load(text, where)
    elif re.search(r"^\s*\[[\w.]+\]\s*$", text, re.MULTILINE) and re.search(r"^\s*[\w.]+\s*=", text, re.MULTILINE):
        values = json_text.load_toml(text, where)
    elif unsloth.is_unsloth(text):
        return Document(where, "python", {}, text)
    elif LAUNCHERS.search(text) or text.lstrip().startswith("#!"):
        return Document(where, "shell", {}, text)
    else:
        values = yaml_text.load(text, where)
    if not isinstance(values, dict) or not values:
        raise ConfigError(
            f"{where} holds no keys with values, so it is no run file: give a training or serving config."
        )
    values = {str(key): value for key, value in values.items()}
    return Document(where, framework or kind_of(values, where), values, text)


def _code_blocks(text: str) -> str:
    blocks = re.findall(r"^```[a-z]*\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    return "\n\n".join(blocks) if blocks else text


def kind_of(values: dict[str, Any], where: str) -> str:
    """The framework of a mapping. Raises ConfigError, which names the nearest ones."""
    for kind, tells in _TELLS:
        if tells(values):
            return kind
    if "model_name_or_path" in values or "per_device_train_batch_size" in values or len(_HF_MARKS & values.keys()) > 1:
        return "trl" if trl_keys.is_trl(values) else "hf"
    if "base_model" in values:
        return "axolotl"
    raise ConfigError(
        f"{where} is none of the run files that memcalc reads{_nearest(values)} (axolotl, LLaMA-Factory, TRL, "
        "TrainingArguments, PEFT, Accelerate, DeepSpeed, torchtune, torchtitan, ms-swift, Unsloth, sd-scripts, "
        "ai-toolkit, SimpleTuner, OneTrainer, vLLM, llama.cpp): "
        "--framework NAME says which it is."
    )


def _nearest(values: dict[str, Any]) -> str:
    from memcalc.run_configs.known_keys import axolotl_keys, hf_keys, llama_factory_keys, ms_swift_keys, torchtune_keys

    tables = {
        "axolotl": axolotl_keys.KEYS,
        "LLaMA-Factory": llama_factory_keys.KEYS,
        "ms-swift": ms_swift_keys.KEYS,
        "TrainingArguments": hf_keys.KEYS,
        "torchtune": torchtune_keys.KEYS,
        "vLLM": vllm.KEYS,
    }
    shared = {name: len(values.keys() & rows.keys()) for name, rows in tables.items()}
    best = sorted((name for name, number in shared.items() if number), key=lambda name: -shared[name])[:2]
    return f"; nearest by its keys: {' or '.join(best)}" if best else ""
