"""Runs of diffusers' training loop as test data, and how a case reads as options.

Every line of `data/diffusion.jsonl` is one run of three steps of the loop of diffusers' training scripts (diffusers
0.42.1, torch 2.14.1, PEFT 0.21) with PyTorch's CUDA allocator on a GPU whose kernels do nothing: `phase_rounded` is the
most that was alive in a phase of the second step, each tensor rounded to 512 bytes, cuBLAS workspaces and what an
`earlier` run had left behind included.
"""

import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from memcalc.breakdown import standing
from memcalc.models.spec import ModelSpec, PipelineComponent
from memcalc.peak.sweep import Sweep
from memcalc.setup.setup import TrainingSetup
from memcalc.training.step import trace
from memcalc.training.traced_step import Tracing
from support.paths import DATA
from support.tape_events import DEVICES

TYPES = {
    "CLIPTextModel": "clip_text_model",
    "CLIPTextModelWithProjection": "clip_text_model",
    "T5EncoderModel": "t5",
    "UMT5EncoderModel": "umt5",
    "Gemma2Model": "gemma2",
    "LlamaModel": "llama",
    "Qwen2_5_VLForConditionalGeneration": "qwen2_5_vl",
    "Mistral3ForConditionalGeneration": "mistral3",
    "Qwen3Model": "qwen3",
    "Qwen3ForCausalLM": "qwen3",
}
PHASES = ("forward", "backward", "step")
RECIPES: dict[str, dict[str, Any]] = {
    "fp32": {"precision": "fp32"},
    "bf16": {"precision": "bf16"},
    "bf16-mixed": {"precision": "mixed-bf16"},
    "bf16-script": {"precision": "bf16", "autocast": "bf16"},
    "bf16-script-fp32lora": {"precision": "bf16", "autocast": "bf16", "lora_dtype": "fp32"},
    "fp16-script": {"precision": "fp16", "autocast": "fp16"},
}
"""How the scripts' precisions are spelled. `bf16-script` with adapters is what `mixed-bf16` stands for by itself."""


def rows() -> Iterator[tuple[str, dict[str, Any]]]:
    """Every row with its name."""
    for line in (DATA / "diffusion.jsonl").read_text().splitlines():
        row = json.loads(line)
        yield row["case"]["name"], row


def text_encoder(index: int, part: dict[str, Any]) -> PipelineComponent:
    """A text encoder of a case."""
    name = f"text_encoder_{index}"
    config = {**part["config"], "model_type": TYPES[part["model"]], "architectures": [part["model"]]}
    return PipelineComponent(name=name, class_name=part["model"], spec=ModelSpec.from_config(config, name))


def of_diffusers(name: str, config: dict[str, Any]) -> ModelSpec:
    """The spec of a class of diffusers."""
    return ModelSpec.from_config({**config, "_class_name": name}, "vae")


def components(case: dict[str, Any]) -> tuple[PipelineComponent, ...]:
    """What a case has beside its denoiser."""
    encoders = [*case.get("trained_encoders", []), *case.get("encoders", [])]
    parts = [text_encoder(index, part) for index, part in enumerate(encoders)]
    if vae := case.get("vae"):
        spec = of_diffusers(vae["model"], vae.get("config", {}))
        parts.append(PipelineComponent(name="vae", class_name=vae["model"], spec=spec))
    return tuple(parts)


def setup(case: dict[str, Any]) -> TrainingSetup:
    """The options of memcalc that a case stands for."""
    found: dict[str, Any] = {"trainer": "diffusers", "batch": case.get("batch", 1), **RECIPES[case["recipe"]]}
    found |= {
        "height": case.get("height", 512),
        "width": case.get("width", 512),
        "max_sequence_length": case.get("text", 77),
        **({"num_frames": case["frames"]} if "frames" in case else {}),
    }
    if lora := case.get("lora"):
        found |= {"lora_rank": lora["r"], "lora_targets": ",".join(lora["target_modules"])}
        found |= {"dora": True} if lora.get("dora") else {}
        if case["recipe"] == "bf16-script":  # by the words of the scripts: they leave the rest to what is trained
            found |= {"precision": "mixed-bf16"}
            del found["autocast"]
    if case.get("ckpt"):
        found["activation_checkpointing"] = "full"
    if case.get("optimizer") == "adamw8bit":
        found["optimizer"] = "adamw-8bit"
    else:
        found["optimizer_impl"] = (
            "fused" if case.get("fused") else "for-loop" if case.get("foreach") is False else "foreach"
        )
    if "clip" in case:
        found["max_grad_norm"] = case["clip"] or 0.0
    if vae := case.get("vae"):
        found |= {"cache_latents": False, "vae_dtype": vae.get("dtype")}
    if case.get("encoders"):
        found["cache_text_embeddings"] = False
    if case.get("textual_inversion"):
        found["textual_inversion"] = True
    if case.get("controlnet"):
        found["controlnet"] = True
    if case.get("trained_encoders") and not case.get("textual_inversion"):
        found["train_text_encoder"] = True
    found["condition_images"] = case.get("references", 0)
    if case.get("quant"):
        found["quantization"] = "nf4-double"
    return TrainingSetup(**found)


def differences(row: dict[str, Any]) -> tuple[int, ...]:
    """Measured less computed bytes of forward, backward and step, and of encode where inputs are made in the step."""
    case, measured = row["case"], row["measured"]
    spec = replace(of_diffusers(case["model"], case["config"]), components=components(case))
    step = trace(spec, setup(case), tracing=Tracing(DEVICES[case.get("device", "h100")]))
    found, _ = Sweep(step.tape).peaks()
    outside = measured["workspaces"] + measured["earlier"]
    phases = [*PHASES, *(phase for phase in step.phases if phase not in PHASES)]
    computed = {phase: standing(step, phase) + (found[phase][0] if phase in found else 0) for phase in phases}
    return tuple(measured["phase_rounded"][phase] - outside - computed[phase] for phase in phases)
