"""What a launch line starts: launcher, script or subcommand, options, number of GPUs."""

from __future__ import annotations

import os
import re
from typing import Any

from memcalc.common.escaping import quoted
from memcalc.errors import UsageError
from memcalc.run_configs import diffusers_scripts, kohya, shell
from memcalc.run_configs.framework_lines import Launch, llama_server, trl_command, tune_run, vllm_serve, with_file
from memcalc.run_configs.known_keys import trl_keys
from memcalc.run_configs.llama_factory import is_llama_factory
from memcalc.run_configs.own_scripts import script_of
from memcalc.run_configs.shell import Command

ACCELERATE_FLAGS = frozenset(
    [
        "multi_gpu",
        "cpu",
        "tpu",
        "use_deepspeed",
        "use_fsdp",
        "use_megatron_lm",
        "use_xpu",
        "m",
        "module",
        "no_python",
        "q",
        "quiet",
        "debug",
        "same_network",
        "ipex",
        "mps",
        "enable_cpu_affinity",
        "dynamo_use_fullgraph",
        "dynamo_use_dynamic",
        "tpu_use_cluster",
        "use_parallelism_config",
    ]
)
TORCHRUN_FLAGS = frozenset(["standalone", "m", "module", "no_python", "run_path"])
DEEPSPEED_FLAGS = frozenset(
    ["no_python", "module", "no_local_rank", "save_pid", "enable_each_rank_log", "force_multi", "bind_cores_to_rank"]
)
SUBCOMMANDS = ("sft", "dpo", "grpo", "kto", "reward", "rloo", "orpo", "cpo", "gkd", "ppo")


def launches(commands: list[Command]) -> list[Launch]:
    """The commands that start a run, in order."""
    return [found for command in commands if (found := launch(command)) is not None]


def launch(command: Command) -> Launch | None:
    """What a command starts, or None where it starts no run."""
    words = _unwrapped(list(command.words))
    if not words:
        return None
    name = os.path.basename(words[0])
    made = _direct(name, words)
    if made is None and name in _LAUNCHERS:
        made = _LAUNCHERS[name](words[1:])
    if made is None:
        place = next((i for i, word in enumerate(words) if "vllm-openai" in word or "llama.cpp:server" in word), None)
        if place is None or name not in ("docker", "podman", "nerdctl"):
            return None
        made = vllm_serve(words[place + 1 :]) if "vllm" in words[place] else llama_server(words[place + 1 :])
    made.environment = {**command.environment, **made.environment}
    return made


def _unwrapped(words: list[str]) -> list[str]:
    """Without `uv run`, `nohup`, `srun`, `env` and their like in front."""
    while words:
        name = os.path.basename(words[0])
        if name in ("nohup", "exec", "time", "sudo", "srun", "env", "xvfb-run", "!", "then", "do"):
            words = words[1:]
            while words and (words[0].startswith("-") or re.fullmatch(r"[A-Z_]+=.*", words[0])):
                words = words[1:]
        elif name in ("uv", "pixi", "poetry") and len(words) > 1 and words[1] == "run":
            words = words[2:]
            if words and (words[0].endswith(".py") or words[0].startswith("http")):
                words = ["python", *words]
            while words and words[0].startswith("--"):
                words = words[2:] if words[0] in ("--with", "--python", "--extra") else words[1:]
        elif re.fullmatch(r"[A-Za-z_]+=.*", words[0]):
            words = words[1:]
        else:
            break
    return words


def _direct(name: str, words: list[str]) -> Launch | None:
    rest = words[1:]
    if name == "trl" and rest and rest[0] in SUBCOMMANDS:
        return trl_command(rest[0], rest[1:])
    if name in ("llamafactory-cli", "lmf") and rest and rest[0] == "train":
        return with_file("llamafactory", "train", rest[1:])
    if name == "axolotl" and rest and rest[0] in ("train", "preprocess"):
        return with_file("axolotl", "train", rest[1:]) if rest[0] == "train" else None
    if name == "swift" and rest and rest[0] in ("sft", "rlhf", "pt"):
        return with_file("msswift", rest[0], rest[1:])
    if name == "tune" and rest and rest[0] == "run":
        return tune_run(rest[1:])
    if name == "vllm" and rest and rest[0] == "serve":
        return vllm_serve(rest[1:])
    if name.startswith(("llama-server", "llama-cli", "llama-bench")) or (name == "server" and "-m" in rest):
        return llama_server(rest)
    return None


def _accelerate(words: list[str]) -> Launch | None:
    if not words or words[0] not in ("launch",):
        return None
    flags, script, rest = _script(words[1:], ACCELERATE_FLAGS)
    made = _python(script, rest)
    made.accelerate = flags
    made.accelerate_file = str(flags.pop("config_file", "") or "")
    return made


def _torchrun(words: list[str]) -> Launch | None:
    flags, script, rest = _script(words, TORCHRUN_FLAGS)
    made = _python(script, rest)
    each, nodes = str(flags.get("nproc_per_node", "1")), str(flags.get("nnodes", "1")).split(":")[-1]
    if each.isdigit() and nodes.isdigit():
        made.world, made.world_from = int(each) * int(nodes), "--nproc_per_node"
    return made


def _deepspeed(words: list[str]) -> Launch | None:
    flags, script, rest = _script(words, DEEPSPEED_FLAGS)
    made = _python(script, rest)
    each, nodes = str(flags.get("num_gpus", "")), str(flags.get("num_nodes", "1"))
    include = re.findall(r":([\d,]+)", str(flags.get("include", "")))
    if each.isdigit() and nodes.isdigit():
        made.world, made.world_from = int(each) * int(nodes), "--num_gpus"
    elif include:
        made.world, made.world_from = sum(len(part.split(",")) for part in include), "--include"
    return made


def _script(words: list[str], flags: frozenset[str]) -> tuple[dict[str, Any], str, list[str]]:
    """The launcher's own options, the script (or module), and the script's words."""
    values: dict[str, Any] = {}
    place = 0
    while place < len(words) and words[place].startswith("-"):
        name, equals, value = words[place].partition("=")
        name = name.lstrip("-").replace("-", "_")
        place += 1
        following = words[place] if place < len(words) else "-"
        if equals:
            values[name] = value
        elif name in flags or following.startswith("-") or (following.endswith(".py") and name != "config_file"):
            values[name] = True
        else:
            values[name] = following
            place += 1
    while place < len(words) and words[place].startswith("$"):
        place += 1
    return values, words[place] if place < len(words) else "", words[place + 1 :]


def _plain_python(words: list[str]) -> Launch | None:
    while words and words[0] in ("-u", "-O", "-X", "-W"):
        words = words[1:]
    if len(words) > 1 and words[0] == "-m":
        if words[1] in ("torch.distributed.run", "torch.distributed.launch"):
            return _torchrun(words[2:])
        if words[1] in ("accelerate.commands.launch",):
            return _accelerate(["launch", *words[2:]])
        return _python(words[1], words[2:])
    if not words or not (words[0].endswith(".py") or words[0].startswith("http")):
        return None
    made = _python(words[0], words[1:])
    made.world, made.world_from = 1, "python, one process"
    return made if made.values or made.files else None


def _python(script: str, words: list[str]) -> Launch:
    """A script or module by name, with its options."""
    name = os.path.basename(script)
    if "axolotl" in script:
        return with_file("axolotl", "train", words)
    if "vllm.entrypoints" in script:
        return vllm_serve(words)
    if "sglang" in script:
        raise UsageError("SGLang's launch lines are not read; use from-file or from-hub with --engine sglang.")
    if script.endswith(("launch_server", "api_server")):
        raise UsageError(f"{quoted(script)} starts a server that is not read; vLLM's and llama.cpp's are.")
    if name == "unsloth-cli.py":
        values, _ = shell.options(words)
        return Launch("unsloth", values, name)
    if script.startswith("swift") or "/swift/cli" in script or (name in ("sft.py", "rlhf.py") and "swift" in script):
        return with_file("msswift", "rlhf" if "rlhf" in name else "sft", words)
    of_denoisers = next((kind for kind, pattern in _DENOISER_SCRIPTS if pattern.fullmatch(name)), None)
    if of_denoisers is not None:
        return _of_denoisers(of_denoisers, name, words)
    values, others = shell.options(words)
    for key in [key for key, value in values.items() if key.startswith("no_") and value is True and key != "no_cuda"]:
        values[key.removeprefix("no_")] = values.pop(key) is not True
    files = [word for word in others if word.endswith((".yaml", ".yml", ".json"))]
    config = values.pop("config", None)
    if isinstance(config, str):
        files.append(config)
    example = name.startswith("run_") and not _names_trl(name)
    kind = (
        "script"
        if script_of(script, values)
        else "hf"
        if example or not (trl_keys.is_trl(values) or _names_trl(name))
        else "trl"
    )
    if kind != "script" and (is_llama_factory(values) or "llamafactory" in script):
        kind = "llamafactory"
    return Launch(kind, values, name if kind != "script" else script, files=files)


_DENOISER_SCRIPTS = (("kohya", kohya.SCRIPT), ("diffusers", diffusers_scripts.SCRIPT))


def _of_denoisers(kind: str, name: str, words: list[str]) -> Launch:
    """A training script of diffusion models; sd-scripts names a TOML with the rest of its options."""
    values, _ = shell.options(words)
    files = [str(values[key]) for key in ("config_file", "dataset_config") if isinstance(values.get(key), str)]
    return Launch(kind, values, name, files=files)


def _names_trl(name: str) -> bool:
    base = name.removesuffix(".py")
    return base.startswith(
        ("sft", "dpo", "grpo", "kto", "reward_mod", "rloo", "orpo", "cpo", "run_sft", "run_dpo", "run_orpo", "gkd")
    )


_LAUNCHERS = {
    "accelerate": _accelerate,
    "torchrun": _torchrun,
    "deepspeed": _deepspeed,
    "python": _plain_python,
    "python3": _plain_python,
}
