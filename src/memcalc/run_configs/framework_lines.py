"""Frameworks' own command lines: trl, llamafactory-cli, axolotl, tune run, swift, vllm serve, llama-server."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

from memcalc.run_configs import shell


@dataclass
class Launch:
    """A launch line, understood. `files` are the config files that it names; `accelerate` Accelerate's own flags."""

    kind: str
    values: dict[str, Any] = field(default_factory=dict)
    command: str = ""
    environment: dict[str, str] = field(default_factory=dict)
    files: list[str] = field(default_factory=list)
    world: int | None = None
    world_from: str = ""
    accelerate: dict[str, Any] | None = None
    accelerate_file: str = ""


def trl_command(command: str, words: list[str]) -> Launch:
    values, _ = shell.options(words)
    for key in [key for key, value in values.items() if key.startswith("no_") and value is True]:
        values[key.removeprefix("no_")] = values.pop(key) is not True
    made = Launch("trl", values, command)
    config = values.pop("config", None)
    if isinstance(config, str):
        made.files.append(config)
    processes = values.pop("num_processes", None)
    if str(processes).isdigit():
        made.world, made.world_from = int(str(processes)), "--num_processes"
    accelerate_file = values.pop("accelerate_config", None)
    if isinstance(accelerate_file, str):
        made.accelerate_file = accelerate_file
    return made


def with_file(kind: str, command: str, words: list[str]) -> Launch:
    made = Launch(kind, {}, command)
    rest = []
    for place, word in enumerate(words):
        if re.fullmatch(r"[A-Za-z_][\w.]*=.*", word) and not word.startswith("-"):
            key, _, value = word.partition("=")
            made.values[key] = value
        elif (
            not word.startswith("-")
            and word.endswith((".yaml", ".yml", ".json"))
            and (place == 0 or not words[place - 1].startswith("--"))
        ):
            made.files.append(word)
        else:
            rest.append(word)
    options, _ = shell.options(rest)
    made.values.update(options)
    if kind == "axolotl":
        for key in ("launcher", "num_processes", "main_process_port"):
            value = made.values.pop(key, None)
            if key == "num_processes" and str(value).isdigit():
                made.world, made.world_from = int(str(value)), "--num-processes"
    return made


def tune_run(words: list[str]) -> Launch:
    processes, place = None, 0
    while place < len(words) and words[place].startswith("-"):
        name, equals, value = words[place].partition("=")
        if not equals and place + 1 < len(words):
            value, place = words[place + 1], place + 1
        if name.lstrip("-").replace("-", "_") == "nproc_per_node":
            processes = value
        place += 1
    recipe = words[place] if place < len(words) else ""
    made = Launch("torchtune", {}, recipe)
    rest = words[place + 1 :]
    for at, word in enumerate(rest):
        if word == "--config" and at + 1 < len(rest):
            made.files.append(rest[at + 1])
        elif "=" in word and not word.startswith("-"):
            key, _, value = word.partition("=")
            nest(made.values, key.lstrip("+"), value)
        elif word.startswith("~"):
            made.values[word[1:]] = None
    if processes is not None and processes.isdigit():
        made.world, made.world_from = int(processes), "--nproc_per_node"
    elif "single_device" in recipe:
        made.world, made.world_from = 1, "a recipe for one GPU"
    return made


def nest(values: dict[str, Any], key: str, value: Any) -> None:
    """Set `a.b.c` of nested mappings; a text in the way is a component by name."""
    first, dot, rest = key.partition(".")
    if not dot:
        values[key] = value
        return
    inner = values.setdefault(first, {})
    if not isinstance(inner, dict):
        inner = values[first] = {"_component_": inner}
    nest(inner, rest, value)


def vllm_serve(words: list[str]) -> Launch:
    values: dict[str, Any] = {}
    flat: list[str] = []
    for word in words:
        short = re.fullmatch(r"-(tp|pp|dp|q|tp=\d+|pp=\d+|dp=\d+)", word)
        flat.append(f"-{word}" if short else word)
    options, others = shell.options(flat)
    for key, value in options.items():
        if isinstance(value, list) and key not in ("served_model_name", "lora_modules", "chat_template"):
            others.extend(value[1:])
            value = value[0]
        if key in _VLLM_FLAGS and isinstance(value, str) and value.lower() not in ("true", "false"):
            others.append(value)
            value = True
        nest(values, key, value)
    made = Launch("vllm", values, "serve")
    config = values.pop("config", None)
    if isinstance(config, str):
        made.files.append(config)
    models = [word for word in others if not word.startswith("-")]
    if models and "model" not in values:
        values["model"] = models[0]
    return made


_VLLM_FLAGS = frozenset(
    [
        "trust_remote_code",
        "enable_expert_parallel",
        "enforce_eager",
        "enable_prefix_caching",
        "no_enable_prefix_caching",
        "enable_chunked_prefill",
        "no_enable_chunked_prefill",
        "disable_log_requests",
        "enable_lora",
        "enable_auto_tool_choice",
        "async_scheduling",
        "no_async_scheduling",
        "enable_reasoning",
        "disable_log_stats",
        "language_model_only",
    ]
)


def llama_server(words: list[str]) -> Launch:
    options, _ = shell.options(words, single_dash=True)
    return Launch(
        "llamacpp", {key: value[0] if isinstance(value, list) else value for key, value in options.items()}, "server"
    )
