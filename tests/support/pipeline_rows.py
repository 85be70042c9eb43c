"""Calls of diffusers' pipelines as test data, and how a case reads as a spec and options.

Every line of `data/pipelines.jsonl` is one call (the prompt encoded, one denoising step, the picture decoded) of
diffusers 0.42.1 and Transformers 5.24 with PyTorch's CUDA allocator on a GPU whose kernels do nothing. `rounded` is the
most that was alive in a stage of the second call, each tensor rounded to 512 bytes, without cuBLAS workspaces.
"""

import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from memcalc.autograd.tape import Tape
from memcalc.inference.component_offload import Placement
from memcalc.inference.pipeline import call_pipeline
from memcalc.inference.pipeline_stages import Prompted, encode_prompts
from memcalc.models.build import build
from memcalc.models.common.autoencoder import Autoencoder
from memcalc.models.common.denoiser import Picture, PromptCall
from memcalc.models.registry import family
from memcalc.models.spec import KeptAdapter, ModelSpec
from memcalc.models.stored_weights import GGUF, StoredWeights
from memcalc.nn.run_context import RunContext, run_context
from memcalc.peak.sweep import Sweep
from memcalc.setup.setup import InferenceSetup
from memcalc.sources.adapter_options import linear_modules
from memcalc.sources.single_file.gguf_modules import FORMATS
from memcalc.tables.dtypes import ALIASES
from memcalc.tables.weight_formats import WeightFormat
from support.diffusion_rows import components, of_diffusers, text_encoder
from support.paths import DATA
from support.tape_events import DEVICES

OFFLOADS = {"group-block": "group"}


def rows() -> Iterator[tuple[str, dict[str, Any]]]:
    """Every row with its name."""
    for line in (DATA / "pipelines.jsonl").read_text().splitlines():
        row = json.loads(line)
        yield row["case"]["name"], row


def _packed(spec: ModelSpec, form: WeightFormat) -> StoredWeights:
    """Every linear layer of the blocks in one of GGUF's types."""
    names = [name for _, found in linear_modules(spec) for name in found if "blocks." in name]
    return StoredWeights(GGUF, {form.name: 1}, modules=dict.fromkeys(names, form))


def pipeline(case: dict[str, Any]) -> tuple[ModelSpec, InferenceSetup]:
    """The pipeline of a case and the options that it stands for."""
    vae: Any = case.get("vae")
    options: dict[str, Any] = {
        "dtype": case.get("dtype", "bf16"),
        "batch": case.get("batch", 1),
        "height": case.get("height", 512),
        "width": case.get("width", 512),
        "num_frames": case.get("frames", 1),
        "cpu_offload": OFFLOADS.get(case.get("offload", ""), case.get("offload")),
        "vae_tiling": case.get("tiling", False),
        "vae_slicing": case.get("slicing", False),
        "vae_dtype": (vae or {}).get("dtype"),
    }
    if not case.get("model"):
        return of_diffusers(vae["model"], vae.get("config", {})), InferenceSetup(**options)
    spec = of_diffusers(case["model"], case["config"])
    lora = case.get("adapter")
    adapter = KeptAdapter(rank=lora["r"], targets=",".join(lora["targets"])) if lora else None
    spec = replace(spec, component="denoiser", components=components(case), adapter=adapter)
    if case.get("gguf"):
        spec = replace(spec, stored=_packed(spec, FORMATS[case["gguf"]]))
    options["condition_images"] = case.get("references", 0)
    options["num_images_per_prompt"] = case.get("per_prompt", 1)
    options["batch"] //= case.get("per_prompt", 1)
    if case.get("guidance") == "none":
        options["guidance_scale"] = 1.0
    if quantized := case.get("quant_parts"):
        options |= {"quantization": next(iter(quantized.values())), "components_to_quantize": ",".join(quantized)}
    return spec, InferenceSetup(**options, max_sequence_length=case.get("text", 77))


def computed(case: dict[str, Any]) -> dict[str, int]:
    """Bytes of every stage that memcalc computes."""
    device = DEVICES[case.get("device", "h100")]
    if not case.get("model") and not case.get("vae"):
        return {"encode": _encoded(case)}
    step = call_pipeline(*pipeline(case), device=device)
    found, _ = Sweep(step.tape).peaks()
    standing = sum(allocation.nbytes for allocation in step.tape.inputs) + sum((step.weights or {}).values())
    peaks = {phase.removeprefix("vae_"): peak + standing for phase, (peak, _) in found.items()}
    return peaks | ({"vae_encode": _made_latents(case)} if "vae_encode" in case.get("stages", ()) else {})


def _tape(case: dict[str, Any], phase: str) -> Tape:
    tape = Tape(phase=phase)
    tape.grad_enabled = tape.dropout_enabled = False
    tape.device = DEVICES[case.get("device", "h100")]
    tape.run = RunContext(training=False, all_logits=True)
    return tape


def _peak(tape: Tape, standing: int) -> int:
    tape.finish()
    found, _ = Sweep(tape).peaks()
    return standing + max(peak for peak, _ in found.values())


def _encoded(case: dict[str, Any]) -> int:
    """Text encoders alone, called as the row says."""
    tape, dtype = _tape(case, "encode"), ALIASES[case.get("dtype", "bf16")]
    encoders = []
    for index, part in enumerate(case["encoders"]):
        spec = text_encoder(index, part).spec
        assert spec is not None
        network, row = build(spec), family(spec.model_type)
        network.bind(tape, dtype)
        call = PromptCall(tuple(part.get("hidden", ())), bool(part.get("mask")), part.get("cache", True))
        kind = row.attention_used("sdpa")
        encoders.append(Prompted(str(index), network, call, part["tokens"], dtype, row.blocks == "decoder", kind))
    placement = Placement(tape, "none", {part.name: part.network for part in encoders}, {p.name: "" for p in encoders})
    prompts = 1 if case.get("guidance") == "none" else 2
    encode_prompts(tape, encoders, prompts, case.get("batch", 1), placement)
    return _peak(tape, sum(placement.standing.values()))


def _made_latents(case: dict[str, Any]) -> int:
    """The autoencoder's other half, as training makes latents."""
    spec, setup = pipeline(case)
    vae = build(spec)
    assert isinstance(vae, Autoencoder)
    vae.tiling, vae.slicing = setup.vae_tiling, setup.vae_slicing
    tape, dtype = _tape(case, "encode"), ALIASES[str(setup.dtype)]
    vae.bind(tape, dtype)
    run_context(tape).weights_dtype = dtype
    picture = Picture(setup.batch, setup.height or 512, setup.width or 512, setup.num_frames or 1)
    vae.encode(tape.empty(vae.pixel_shape(picture), dtype))
    return _peak(tape, sum(Placement(tape, "none", {"vae": vae}, {"vae": ""}).standing.values()))
