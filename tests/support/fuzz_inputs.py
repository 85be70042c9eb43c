"""Mutated inputs: what is written, what is asked about it, and what must hold of an answer."""

import atexit
import json
from collections.abc import Callable
from contextlib import ExitStack
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

from typer.testing import CliRunner

from memcalc.cli import app
from memcalc.cli.options import declared
from memcalc.errors import MemcalcError
from memcalc.sources.hub.load import load_hub
from support.fuzz_answers import asked
from support.fuzz_setups import setups, wrong_types
from support.gguf_files import gguf, llama_gguf
from support.hostile_hub import HostileHub, Way, whole
from support.hub_server import serving
from support.mutations import ODD, mutated, mutated_bytes, mutated_text
from support.paths import DATA
from support.weights import framed, header, layers

Kind = Callable[[Random, Path], str]
"""Writes one mutated input and asks about it; gives "" for an answer, else the refusal. Anything raised is a fault."""


@cache
def _configs() -> list[dict[str, Any]]:
    """One small config of every family that rows were measured of."""
    found = []
    for path in sorted((DATA / "measured").glob("*.jsonl")):
        with path.open() as lines:
            config = json.loads(next(lines))["case"].get("config")
        if isinstance(config, dict) and config.get("model_type"):
            found.append(config)
    return found


def _configs_alone(random: Random, folder: Path) -> str:
    config = mutated(random, random.choice(_configs()))
    (folder / "config.json").write_text(json.dumps(config))
    return asked(random, folder)


_QUANTIZED: list[dict[str, Any]] = [
    {"quant_method": "gptq", "bits": 4, "group_size": 128, "sym": True, "desc_act": False},
    {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True, "modules_to_not_convert": ["lm_head"]},
    {"quant_method": "fp8", "weight_block_size": [128, 128], "ignored_layers": ["lm_head"]},
    {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"},
    {"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 16, "kv_cache_scheme": {"num_bits": 8}},
    {"quant_method": "hqq", "quant_config": {"weight_quant_params": {"nbits": 4, "group_size": 64}}},
    {"quant_method": "torchao", "quant_type": "int4_weight_only"},
    {"quant_method": "mxfp4"},
    {
        "quant_method": "compressed-tensors",
        "config_groups": {"g": {"targets": ["Linear"], "weights": {"num_bits": 4, "group_size": 32, "type": "int"}}},
        "ignore": ["re:.*lm_head", "model.layers.0.mlp.down_proj"],
        "kv_cache_scheme": {"num_bits": 8, "type": "float"},
    },
]


def _quantizations(random: Random, folder: Path) -> str:
    config = random.choice([c for c in _configs() if c["model_type"] in ("llama", "qwen3_moe", "gpt_oss", "mixtral")])
    stated = mutated(random, random.choice(_QUANTIZED))
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": stated}))
    return asked(random, folder)


_LLAMA = {
    "model_type": "llama",
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 192,
    "vocab_size": 1000,
}
_TENSORS = {**layers(3), "model.embed_tokens.weight": ("BF16", (1000, 64)), "model.norm.weight": ("BF16", (64,))}


def _headers(random: Random, folder: Path) -> str:
    text = header(_TENSORS, {"format": "pt"})
    if random.random() < 0.6:
        text = framed(json.dumps(mutated(random, json.loads(text[8:]))).encode("utf-8", "surrogatepass"))
    else:
        text = mutated_bytes(random, text)
    (folder / "model.safetensors").write_bytes(text)
    with (folder / "model.safetensors").open("r+b") as weights:
        weights.truncate(len(text) + random.choice([0, 5, 423_808, 423_808, 423_808]))
    if random.random() < 0.8:
        (folder / "config.json").write_text(json.dumps(_LLAMA))
    return asked(random, folder)


def _indexes(random: Random, folder: Path) -> str:
    for number in (1, 2):
        some = dict(list(_TENSORS.items())[number - 1 :: 2])
        text = header(some)
        with (folder / f"model-0000{number}-of-00002.safetensors").open("wb") as shard:
            shard.write(text)
            shard.truncate(len(text) + 400_000)
    names = {name: f"model-0000{number % 2 + 1}-of-00002.safetensors" for number, name in enumerate(_TENSORS)}
    index = mutated(random, {"metadata": {"total_size": 800_000}, "weight_map": names})
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "config.json").write_text(json.dumps(_LLAMA))
    return asked(random, folder)


def _ggufs(random: Random, folder: Path) -> str:
    tensors, metadata = llama_gguf(depth=2, more={"tokenizer.ggml.tokens": ["a", "b", "c"]})
    for key in random.sample(list(metadata), random.choice([0, 0, 1, 2])):
        metadata[key] = random.choice([0, 1, 7, 2**31, -1.5, "x", [1, 2], ["a"], False])
    start, size = gguf(tensors, metadata)
    if random.random() < 0.7:
        start = mutated_bytes(random, start)
    (folder / "model.gguf").write_bytes(start)
    with (folder / "model.gguf").open("r+b") as file:
        file.truncate(random.choice([size, size + 99, len(start), 10]))
    return asked(random, folder)


_ADAPTER = {
    "peft_type": "LORA",
    "r": 8,
    "target_modules": ["q_proj", "v_proj"],
    "lora_alpha": 16,
    "lora_dropout": 0.1,
    "bias": "none",
    "use_dora": False,
    "modules_to_save": ["lm_head"],
    "init_lora_weights": True,
    "rank_pattern": {},
    "layers_to_transform": None,
    "task_type": "CAUSAL_LM",
}


def _adapters(random: Random, folder: Path) -> str:
    base = folder / "base"
    base.mkdir()
    (base / "config.json").write_text(json.dumps(_LLAMA))
    targets = random.choice([["q_proj"], ".*[qv]_proj", "all-linear"])
    named = random.choice([str(base)] * len(ODD) + ODD)
    stated = mutated(random, {**_ADAPTER, "target_modules": targets, "base_model_name_or_path": named})
    start = "base_model.model.model.layers.0.self_attn.q_proj"
    text = header({f"{start}.lora_A.weight": ("F32", (8, 64)), f"{start}.lora_B.weight": ("F32", (64, 8))})
    weights = mutated_bytes(random, text) if random.random() < 0.3 else text
    (folder / "adapter_model.safetensors").write_bytes(weights + bytes(4096))
    (folder / "adapter_config.json").write_text(json.dumps(stated))
    return asked(random, folder)


_PIPELINE = {
    "_class_name": "FluxPipeline",
    "transformer": ["diffusers", "FluxTransformer2DModel"],
    "text_encoder": ["transformers", "CLIPTextModel"],
    "vae": ["diffusers", "AutoencoderKL"],
    "scheduler": ["diffusers", "FlowMatchEulerDiscreteScheduler"],
}


def _pipelines(random: Random, folder: Path) -> str:
    for part in ("transformer", "text_encoder", "vae"):
        (folder / part).mkdir()
        config = mutated(random, {"_class_name": "X", "in_channels": 64, "dtype": "bfloat16"})
        (folder / part / "config.json").write_text(json.dumps(config))
        text = header({"a.weight": ("F16", (4, 4))})
        text = mutated_bytes(random, text) if random.random() < 0.2 else text
        (folder / part / "model.safetensors").write_bytes(text + bytes(32))
    (folder / "model_index.json").write_text(json.dumps(mutated(random, _PIPELINE)))
    return asked(random, folder)


def _raw_json(random: Random, folder: Path) -> str:
    """Bytes of a config that are damaged as bytes."""
    text = json.dumps({**random.choice(_configs()), "quantization_config": random.choice(_QUANTIZED)}).encode()
    (folder / "config.json").write_bytes(mutated_bytes(random, text))
    return asked(random, folder)


_WORDS = [
    "0",
    "-1",
    "1",
    "1e9",
    "1" * 60,
    "",
    " ",
    "é",
    "\udcff",
    "all",
    "none",
    "16",
    "0.5",
    "nan",
    "24GB",
    "H100",
    "2xA100",
]


def _command_lines(random: Random, folder: Path) -> str:
    """Options with odd values, through the parser."""
    arguments = random.choice([["estimate", "--params", "1B"]] * 9 + [["gpus"], ["schema"], ["bogus"]])
    arguments = [*arguments]
    options = [*declared().values()]
    for _ in range(random.randint(1, 3)):
        option = random.choice(options)
        arguments.append(option.option)
        if option.kind is not bool:
            arguments.append(random.choice(_WORDS))
    arguments += random.choice([[], ["--gpu", random.choice(_WORDS)], ["--json"], ["--mode", "inference"]])
    return _typed(arguments)


def _typed(arguments: list[str]) -> str:
    """What stderr says after `memcalc ARGUMENTS`: one line and the exit code of its kind, or ""."""
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code in (0, 1, 2, 3), (arguments, result.exception)
    assert "fault in memcalc" not in result.stderr, (arguments, result.stderr)
    if result.exit_code in (0, 3):
        return ""
    assert result.stdout == "", (arguments, result.stdout[:200])
    return result.stderr.removeprefix("memcalc: ").rstrip("\n")


@cache
def _run_files_of_tests() -> list[Path]:
    return sorted(path for path in (DATA / "run_configs").rglob("*.*") if path.is_file())


def _run_files(random: Random, folder: Path) -> str:
    """Configs and scripts of training and serving frameworks, damaged as lines or as bytes."""
    original = random.choice(_run_files_of_tests())
    data = original.read_bytes()
    damaged = mutated_text(random, data.decode()).encode("utf-8", "surrogatepass")
    path = folder / original.name
    path.write_bytes(damaged if random.random() < 0.7 else mutated_bytes(random, data))
    return _typed(["from-config", str(path), *random.choice([["--show-setup"], ["--model", "1B"], ["--model", "1B"]])])


@cache
def _hub() -> tuple[HostileHub, str]:
    """A server that lives as long as this process."""
    hub, running = HostileHub(), ExitStack()
    atexit.register(running.close)
    return hub, running.enter_context(serving(hub.serve))


def _hub_answers(random: Random, folder: Path) -> str:
    """A Hub whose answers are damaged as bytes, or as JSON."""
    hub, url = _hub()
    config = json.dumps(_LLAMA).encode()
    rows: Any = [{"rfilename": name, "size": len(config)} for name in ("config.json", "README.md", "pytorch_model.bin")]
    info: Any = {"id": "x/y", "sha": "c" * 40, "siblings": rows}
    if random.random() < 0.5:
        info = mutated(random, info)
    rows = info.get("siblings") if isinstance(info, dict) else info
    answers = {"revision": whole(info), "resolve": whole(config), "tree": whole(rows)}
    if random.random() < 0.5:
        part = random.choice(list(answers))
        answers[part] = mutated_bytes(random, answers[part])
    hub.way = Way(answers)
    try:
        load_hub("x/y", endpoint=url, token="", timeout=0.3, cache_folder=folder)
    except MemcalcError as problem:
        return str(problem)
    return ""


KINDS: dict[str, Kind] = {
    "configs": _configs_alone,
    "quantizations": _quantizations,
    "raw JSON": _raw_json,
    "headers": _headers,
    "indexes": _indexes,
    "GGUF": _ggufs,
    "adapters": _adapters,
    "pipelines": _pipelines,
    "command lines": _command_lines,
    "run files": _run_files,
    "Hub answers": _hub_answers,
    "setups": setups,
    "wrong types": wrong_types,
}
