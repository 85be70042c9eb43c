"""Run files and a launch line, put together: what they say in memcalc's options."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from typing import Any

from memcalc.errors import ConfigError, UsageError
from memcalc.run_configs import (
    accelerate,
    ai_toolkit,
    axolotl,
    deepspeed,
    diffusers_scripts,
    documents,
    hf_trainer,
    kohya,
    llama_cpp,
    llama_factory,
    llama_factory_v1,
    lone_files,
    ms_swift,
    one_trainer,
    own_scripts,
    peft_adapter,
    shell,
    simple_tuner,
    torchtitan,
    torchtune,
    trl,
    unsloth,
    vllm,
)
from memcalc.run_configs.context import Context
from memcalc.run_configs.documents import Document
from memcalc.run_configs.framework_lines import Launch, nest
from memcalc.run_configs.launch import launch, launches
from memcalc.run_configs.mapping import Mapping

READERS = {
    "axolotl": axolotl.read,
    "llamafactory": llama_factory.read,
    "llamafactory-v1": llama_factory_v1.read,
    "trl": trl.read,
    "hf": hf_trainer.read,
    "torchtune": torchtune.read,
    "torchtitan": torchtitan.read,
    "msswift": ms_swift.read,
    "diffusers": diffusers_scripts.read,
    "kohya": kohya.read,
    "aitoolkit": ai_toolkit.read,
    "simpletuner": simple_tuner.read,
    "onetrainer": one_trainer.read,
    "peft": peft_adapter.read,
    "vllm": vllm.read,
    "llamacpp": llama_cpp.read,
}
FRAMEWORKS = (*READERS, "unsloth", "accelerate", "deepspeed")
"""Names of --framework."""

_OF_DENOISERS = ("diffusers", "kohya", "aitoolkit", "simpletuner", "onetrainer")
_TRAINING = (
    "axolotl",
    "llamafactory",
    "llamafactory-v1",
    "trl",
    "hf",
    "torchtune",
    "torchtitan",
    "msswift",
    *_OF_DENOISERS,
)
_SERVING = ("vllm", "llamacpp")


def read(
    paths: Sequence[str],
    command_line: Sequence[str] = (),
    *,
    framework: str = "",
    release: tuple[int, ...] | None = None,
) -> Mapping:
    """What the files at `paths` and a launch line say. Raises ConfigError."""
    found = [documents.read(path, framework) for path in paths]
    return put_together(found, command_line, release)


def put_together(
    found: Sequence[Document], command_line: Sequence[str] = (), release: tuple[int, ...] | None = None
) -> Mapping:
    """The same of documents that are read already. Raises ConfigError."""
    out = Mapping()
    lines: list[Launch] = []
    for document in found:
        if document.kind == "shell":
            started = launches(shell.commands(document.text, document.where))
            if not started:
                raise ConfigError(
                    f"{document.where} has no launch line that memcalc knows: give the line after --, or a config file."
                )
            if len(started) > 1:
                out.assume(f"{document.where} has {len(started)} launch lines: the first is taken")
            lines.append(started[0])
    overrides = _command_line(command_line, lines)
    line = lines[-1] if lines else None
    training = _only(found, out)
    source, where = _source(training, line, found, out)
    context = Context(source, where, out, release=release)
    if line is not None:
        context.command, context.environment = line.command, dict(line.environment)
        context.world, context.world_from = line.world, line.world_from
    merge(context.values, overrides)
    if training is not None and training.kind == "torchtune" and not context.command:
        context.command, needed = torchtune.commented(training.text, out)
        if needed is not None and context.world is None:
            context.world, context.world_from = needed, "a comment of the file"
    kind = training.kind if training is not None else line.kind if line is not None else ""
    if kind == "hf" and line is not None and line.kind in ("trl", "script"):
        kind = line.kind  # TrainingArguments alone fit several trainers: the line says whose they are
    _auxiliary(found, line, context, kind)
    _read(kind, context, training, found)
    lone_files.adapter(found, kind, out)
    return out


def _command_line(words: Sequence[str], lines: list[Launch]) -> dict[str, Any]:
    """A launch line joins `lines`; bare options override the training file's keys."""
    if not words:
        return {}
    command = shell.split(list(words), "the command line")
    first = command.words[0] if command.words else ""
    if first.startswith("--") or re.fullmatch(r"[A-Za-z_][\w.]*=.*", first):
        options, others = shell.options(command.words)
        options.update((key, value) for key, equals, value in (word.partition("=") for word in others) if equals)
        values: dict[str, Any] = {}
        for key, value in options.items():
            nest(values, key, value)
        return values
    started = launch(command)
    if started is None:
        raise UsageError(
            f"{first[:40]!r} starts no run that memcalc knows: give accelerate launch, torchrun, deepspeed, trl, "
            "llamafactory-cli, axolotl, tune run, swift, vllm serve or llama-server, or --key value."
        )
    lines.append(started)
    return {}


def _only(found: Sequence[Document], out: Mapping) -> Document | None:
    main = [document for document in found if document.kind in (*_TRAINING, *_SERVING, "python")]
    if len(main) > 1:
        names = " and ".join(document.where for document in main[:3])
        raise ConfigError(
            f"{names} each describe a run of their own: give one, with its Accelerate, DeepSpeed or adapter file."
        )
    return main[0] if main else None


def _source(
    training: Document | None, line: Launch | None, found: Sequence[Document], out: Mapping
) -> tuple[dict[str, Any], str]:
    """The values of the training file under those of the launch line."""
    values = dict(training.values) if training is not None else {}
    where = training.where if training is not None else "the launch line"
    if line is None:
        return values, where
    if training is not None and line.kind not in (training.kind, "hf", "script", "trl") and training.kind != "python":
        raise ConfigError(
            f"{training.where} is a file of {training.kind}, but the launch line starts {line.kind}: make them agree."
        )
    if training is None and line.files:
        named = ", ".join(os.path.basename(name) for name in line.files)
        if line.kind == "torchtune":
            line.environment["config"] = line.files[0]
        elif line.kind in ("axolotl", "llamafactory", "msswift", "trl", "vllm", "kohya"):
            out.ask(f"the launch line names {named}, which is not among the files: give it too")
    merge(values, line.values)
    return values, where


def merge(values: dict[str, Any], above: dict[str, Any]) -> None:
    """Put `above` over `values`, key by key inside mappings too; a component that is named anew keeps no old keys."""
    for key, value in above.items():
        old = values.get(key)
        if (
            isinstance(value, dict)
            and isinstance(old, dict)
            and value.get("_component_") in (None, old.get("_component_"))
        ):
            values[key] = dict(old)
            merge(values[key], value)
        else:
            values[key] = value


def _auxiliary(found: Sequence[Document], line: Launch | None, context: Context, kind: str) -> None:
    """Accelerate's and DeepSpeed's files, and Accelerate's flags."""
    out = context.out
    kinds = {document.kind: document for document in found}
    given = [document for document in found if document.kind in ("accelerate", "deepspeed")]
    if len(given) != len({document.kind for document in given}):
        raise ConfigError("two files of the same kind (Accelerate or DeepSpeed) are given: keep one of them.")
    values = dict(kinds["accelerate"].values) if "accelerate" in kinds else {}
    where = kinds["accelerate"].where if "accelerate" in kinds else "accelerate launch"
    if line is not None and line.accelerate_file and not values:
        preset = accelerate.named(line.accelerate_file, context.where, out)
        if preset is not None:
            context.sharding, context.mixed_precision = preset
    if line is not None and line.accelerate:
        values.update(_launch_flags(line.accelerate, bool(values)))
    if values and (accelerate.is_accelerate(values) or "num_processes" in values):
        context.sharding, context.mixed_precision = accelerate.read(values, where, out)
    if "deepspeed" in kinds:
        document = kinds["deepspeed"]
        own = deepspeed.read(document.values, document.where, out)
        if context.sharding is not None:
            own.world, own.world_from = context.sharding.world, context.sharding.world_from
        context.sharding = own
    if context.sharding is not None and context.sharding.world is not None and context.world is None:
        context.world, context.world_from = context.sharding.world, context.sharding.world_from
    if "kohya-dataset" in kinds:
        context.values.update(kohya.dataset_values(kinds["kohya-dataset"].values))
    if context.mixed_precision and kind in _OF_DENOISERS:
        context.values.setdefault("mixed_precision", context.mixed_precision)
    elif (
        context.mixed_precision in ("bf16", "fp16")
        and context.values
        and not any(context.values.get(key) for key in ("bf16", "fp16", "pure_bf16", "base_model"))
    ):
        context.values[context.mixed_precision] = True
        out.assume(f"{context.mixed_precision} autocast is from {where}'s mixed_precision")


def _launch_flags(flags: dict[str, Any], has_file: bool) -> dict[str, Any]:
    """Flags of `accelerate launch` as keys of its file."""
    values: dict[str, Any] = {}
    for key in ("num_processes", "num_machines", "mixed_precision"):
        if key in flags:
            values[key] = flags[key]
    if flags.get("use_deepspeed"):
        config = {
            k: flags[k]
            for k in ("zero_stage", "offload_optimizer_device", "offload_param_device", "deepspeed_config_file")
            if k in flags
        }
        values.update(distributed_type="DEEPSPEED", deepspeed_config=config)
    elif flags.get("use_fsdp"):
        values.update(distributed_type="FSDP", fsdp_config={k: v for k, v in flags.items() if k.startswith("fsdp_")})
    elif (flags.get("multi_gpu") and not has_file) or (str(values.get("num_processes", "1")) != "1" and not has_file):
        values["distributed_type"] = "MULTI_GPU"
    return values


def _read(kind: str, context: Context, training: Document | None, found: Sequence[Document]) -> None:
    out = context.out
    if kind == "python":
        assert training is not None
        values, trainer, variables = unsloth.from_python(training.text, training.where)
        context.values = {**values, **context.values}
        out.framework = "unsloth"
        unsloth.read(context, trainer, variables)
    elif kind == "unsloth":
        out.framework = "unsloth"
        unsloth.read(context)
    elif kind == "script":
        script = own_scripts.script_of(context.command, context.values)
        assert script is not None
        out.framework = "hf"
        own_scripts.read(context, script)
    elif kind in READERS:
        out.framework = kind.removesuffix("-v1")
        if kind in ("torchtune", "llamafactory"):
            context.values = lone_files.resolved(context.values)
        READERS[kind](context)
    else:
        lone_files.read(found, context)
