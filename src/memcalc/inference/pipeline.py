"""A diffusion pipeline in inference: its components are loaded, and the prompt becomes a picture."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from memcalc.autograd.tape import Tape
from memcalc.common.assumption import Assumption
from memcalc.errors import UsageError, option_name
from memcalc.inference.component_offload import MOVED_BY_BLOCK, Placement
from memcalc.inference.pipeline_stages import Prompted, decode_latents, denoise_once, encode_prompts
from memcalc.inference.weights import LoadedWeights, load_weights
from memcalc.models.build import build
from memcalc.models.common.autoencoder import Autoencoder
from memcalc.models.common.denoiser import Denoiser, Picture, PromptCall
from memcalc.models.registry import autoencoders, family
from memcalc.models.spec import ModelSpec, PipelineComponent
from memcalc.nn.model import Network
from memcalc.nn.module import Module
from memcalc.nn.quantized_layers import quantize, tell_apart
from memcalc.nn.recorder import Recorder
from memcalc.nn.run_context import RunContext, run_context
from memcalc.nn.stack import Stack
from memcalc.setup.setup import InferenceSetup
from memcalc.tables.cuda_devices import CudaDevice
from memcalc.tables.dtypes import ALIASES, FP32, DType
from memcalc.tables.engines import ENGINES
from memcalc.training.denoising import convolutions
from memcalc.training.input_sizes import check_sizes
from memcalc.training.traced_step import Step

PHASES = ("encode", "denoise", "vae_decode")
H100 = CudaDevice((9, 0), 132)
"""The GPU whose kernels are taken where none is named."""

_OF_TEXT_MODELS = {
    "engine": "transformers",
    "kv_dtype": "auto",
    "max_new_tokens": 1,
    "num_beams": 1,
    "prefill_logits": "last",
    "prefill_chunk_size": None,
    "gpu_memory_utilization": None,
    "tensor_parallel_size": 1,
    "gpus": None,
    "device_map": None,
    "max_memory": None,
    "quantize_moe_experts": "none",
    "load_on": None,
}
"""Options that say how a language model generates, with the values at which they say nothing."""


@dataclass(frozen=True)
class Loaded:
    """A component as it is loaded."""

    name: str
    spec: ModelSpec
    network: Network
    weights: LoadedWeights
    widened: bool = False
    """It is loaded in fp16 and widened to fp32 while it decodes (`upcast_vae`)."""

    @property
    def dtype(self) -> DType:
        """The dtype that it computes in."""
        return FP32 if self.widened else ALIASES[self.weights.dtype]

    @property
    def label(self) -> str:
        """Its part of MODEL WEIGHTS."""
        form = self.weights.quantization
        return f"{self.name} {self.weights.dtype if form == 'none' else form}{', fp32 to decode' * self.widened}"


class Pipeline(Network):
    """All components of a pipeline, as parts of one model."""

    reads_text = False
    input_kind = "latents"

    def __init__(self, parts: Mapping[str, Module]) -> None:
        for name, part in parts.items():
            setattr(self, name, part)


def call_pipeline(
    spec: ModelSpec, setup: InferenceSetup, device: CudaDevice | None = None, recorder: Recorder | None = None
) -> Step:
    """Run a pipeline's call on shapes. `spec` is its denoiser, or an autoencoder by itself.

    Raises UsageError for options of language models, and for sizes that the denoiser cannot be given.
    """
    _check(spec, setup)
    parts = [_load(name, part, setup) for name, part in _described(spec)]
    main = next(part for part in parts if part.spec is spec or part.name == _own_name(spec))
    parts = [_widened(part, main.network) for part in parts]
    tape = Tape(phase="loading") if recorder is None else recorder.new_tape("loading")
    tape.grad_enabled = tape.dropout_enabled = False
    tape.device = device or H100
    tape.run = RunContext(training=False, all_logits=True)
    for part in parts:
        part.network.bind(tape, part.dtype)
    network = Pipeline({part.name: part.network for part in parts})
    if recorder is not None:
        recorder.watch(network)
    undescribed = {other.name: _undescribed(other, setup) for other in spec.components if other.spec is None}
    placement = Placement(
        tape,
        setup.cpu_offload or "none",
        {part.name: part.network for part in parts},
        {part.name: part.label for part in parts},
        next((part.name for part in parts if part.widened), ""),
    )
    call = _Call(tape, parts, main, setup, placement)
    call.run()
    placement.finish()
    tape.finish()
    return Step(
        tape,
        network,
        tuple(network.tensors()),
        setup,
        None,
        0,
        0,
        phases=PHASES,
        weights={**placement.standing, **undescribed},
        components={part.label: sum(_sizes(part)) for part in parts},
        running=call.running,
        extra_weights=spec.extra_weights,
        resolved_options={
            "dtype": main.weights.dtype,
            "quantization": main.weights.quantization,
            "attention": "sdpa",
            "height": call.picture.height,
            "width": call.picture.width,
            "num_frames": call.picture.frames,
            "max_sequence_length": call.picture.text if isinstance(main.network, Denoiser) else None,
        },
        notes=tuple(call.notes()),
    )


def _check(spec: ModelSpec, setup: InferenceSetup) -> None:
    for name, silent in _OF_TEXT_MODELS.items():
        if getattr(setup, name) != silent:
            raise UsageError(
                f"{option_name(name)} says how a language model generates, but {spec.model_type} is part of a "
                "diffusion pipeline; leave it out."
            )
    if not any(part.model_type in autoencoders() for _, part in _described(spec)):
        for name, silent in (("vae_tiling", False), ("vae_slicing", False), ("vae_dtype", None)):
            if getattr(setup, name) != silent:
                raise UsageError(
                    f"{option_name(name)} is for a pipeline's autoencoder, and memcalc counts none here; leave it out."
                )
    if setup.components_to_quantize is not None and setup.quantization == "none":
        raise UsageError("--components-to-quantize goes with --quantization, such as nf4; add it, or leave it out.")
    if setup.cpu_offload == "sequential" and setup.quantization != "none":
        raise UsageError(
            "--cpu-offload sequential moves single layers, which diffusers does not do with quantized ones; use model, "
            "or leave out --quantization."
        )
    unmoved = [part.model_type for _, part in _described(spec) if part.model_type in autoencoders()]
    if setup.cpu_offload == "group" and not set(unmoved) <= set(MOVED_BY_BLOCK):
        raise UsageError(
            f"--cpu-offload group moves blocks, but diffusers cannot move those of {unmoved[0]}: its decode fails; "
            "use group-leaf or model."
        )
    if setup.components_to_quantize is not None:
        known = [name for name, _ in _described(spec)]
        for name in _names(setup.components_to_quantize):
            if name not in known:
                raise UsageError(
                    f"--components-to-quantize names {name!r}, which this pipeline does not have; it has "
                    f"{', '.join(known)}."
                )


def _names(text: str) -> list[str]:
    return [name.strip() for name in text.split(",") if name.strip()]


def _own_name(spec: ModelSpec) -> str:
    if spec.component:
        return spec.component
    if spec.model_type in autoencoders():
        return "vae"
    return "unet" if spec.model_type.startswith("UNet") else "transformer"


def _described(spec: ModelSpec) -> Iterator[tuple[str, ModelSpec]]:
    """Every component with a spec in the order of running: text encoders, the denoiser, the autoencoder."""
    others = [(part.name, part.spec) for part in sorted(spec.components, key=_name) if part.spec is not None]
    yield from ((name, other) for name, other in others if other.model_type not in autoencoders())
    yield _own_name(spec), spec
    yield from ((name, other) for name, other in others if other.model_type in autoencoders())


def _name(part: PipelineComponent) -> str:
    return part.name


def _load(name: str, spec: ModelSpec, setup: InferenceSetup) -> Loaded:
    """Build a component with the weights that it is loaded with."""
    network = build(spec)
    chosen = _names(setup.components_to_quantize or "") or ([name] if isinstance(network, Denoiser) else [])
    changes: dict[str, object] = {} if name in chosen else {"quantization": "none"}
    if isinstance(network, Autoencoder):
        network.tiling, network.slicing = setup.vae_tiling, setup.vae_slicing
        if setup.vae_dtype is not None:
            changes["dtype"] = setup.vae_dtype
    weights = load_weights(spec, setup.model_copy(update=changes), ENGINES["transformers"], network, network)
    if weights.form is not None:
        if weights.format_of is not None:
            tell_apart(network, weights.format_of)
        quantize(network, weights.form, ALIASES[weights.dtype], weights.format_of, weights.stated)
    for _, module in network.modules():
        if isinstance(module, Stack):
            module.rename(f"{name} {module.name}")
    return Loaded(name, spec, network, weights)


def _widened(part: Loaded, denoiser: Network) -> Loaded:
    """The component as the pipeline of `denoiser` runs it: SDXL's decode in fp32 where the autoencoder is in fp16."""
    vae = part.network
    upcast = isinstance(denoiser, Denoiser) and denoiser.upcasts_vae and part.weights.dtype == "fp16"
    return replace(part, widened=upcast and isinstance(vae, Autoencoder) and vae.force_upcast)


def _sizes(part: Loaded) -> Iterator[int]:
    for _, tensor in part.network.tensors():
        yield tensor.storage.allocation.nbytes * tensor.copies


class _Call:
    """One call of a pipeline: who runs in which phase, on what."""

    def __init__(
        self, tape: Tape, parts: list[Loaded], main: Loaded, setup: InferenceSetup, placement: Placement
    ) -> None:
        self.tape, self.parts, self.main, self.setup, self.placement = tape, parts, main, setup, placement
        self.vae = next((part for part in parts if isinstance(part.network, Autoencoder)), None)
        self.denoiser = main.network if isinstance(main.network, Denoiser) else None
        check_sizes(main.network, setup)
        self.guidance = "none" if self.denoiser is None else self._guidance(self.denoiser)
        self.picture = self._picture()
        self.running: dict[str, str] = {}

    def _guidance(self, model: Denoiser) -> str:
        off = self.setup.guidance_scale is not None and self.setup.guidance_scale <= 1
        return "none" if off else model.guidance_in

    def _picture(self) -> Picture:
        setup, model = self.setup, self.denoiser
        batch = setup.batch * setup.num_images_per_prompt
        height, width = setup.height or setup.resolution, setup.width or setup.resolution
        if model is not None:
            frames = model.frames_of_call(setup.num_frames)
            return model.picture(batch, height, width, frames, setup.max_sequence_length)
        assert self.vae is not None
        assert isinstance(self.vae.network, Autoencoder)
        side = self.vae.network.default_side
        return Picture(batch, height or side, width or side, setup.num_frames or 1)

    def run(self) -> None:
        """Every phase that the pipeline has components for."""
        tape, placing = self.tape, self.placement
        encoders = list(self._encoders())
        if encoders and self.denoiser is not None:
            tape.begin_span("encode", None)
            prompts = 1 if self.guidance == "none" else 2
            encode_prompts(tape, encoders, prompts, self.setup.batch, placing)
        if self.denoiser is not None:
            tape.begin_span("denoise", None)
            self.running["denoise"] = self.main.name
            denoise_once(tape, self.denoiser, self.picture, self.main.dtype, self.guidance, self.main.name, placing)
        if self.vae is not None and isinstance(self.vae.network, Autoencoder):
            tape.begin_span("vae_decode", None)
            self.running["vae_decode"] = self.vae.name
            dtype = self.vae.dtype
            decode_latents(tape, self.vae.network, self.picture, dtype, self.vae.name, placing)
        run_context(tape).weights_dtype = self.main.dtype
        tape.begin_span("after", None)

    def _encoders(self) -> Iterator[Prompted]:
        calls = {} if self.denoiser is None else self.denoiser.prompt_calls
        for part in self.parts:
            network = part.network
            if isinstance(network, (Denoiser, Autoencoder)) or not network.reads_text:
                continue
            row = family(part.spec.model_type)
            call = calls.get(part.spec.architecture or "", PromptCall())
            caches = row.blocks == "decoder"
            yield Prompted(
                part.name,
                network,
                call,
                call.length(self.picture.text),
                part.dtype,
                caches,
                row.attention_used(self.setup.attention),
            )

    def notes(self) -> Iterator[Assumption]:
        """What is taken for granted of the call."""
        picture, setup = self.picture, self.setup
        frames = f", {picture.frames} frames (--num-frames)" if picture.frames > 1 else ""
        size = f"{picture.width} x {picture.height} pixels (--height, --width, --resolution){frames}"
        yield Assumption("picture_size", size)
        if setup.num_frames not in (None, picture.frames):
            text = f"--num-frames {setup.num_frames} is rounded to {picture.frames}, as the pipeline does"
            yield Assumption("frames_rounded", text)
        if self.denoiser is not None:
            yield Assumption("text_length", f"{picture.text} tokens of text for the denoiser (--max-sequence-length)")
            yield Assumption("guidance", _GUIDED[self.guidance])
        labels = dict.fromkeys(part.label for part in self.parts)
        yield Assumption("component_dtypes", f"weights: {', '.join(labels)} (--dtype, --vae-dtype, --quantization)")
        known = {"text encoder": next(self._encoders(), None), "VAE": self.vae}
        missing = [name for name, part in known.items() if part is None]
        if missing and self.denoiser is not None:
            text = f"the pipeline's {' and '.join(missing)} are not known: what they take is not counted"
            yield Assumption("components_not_known", text)
        if setup.cpu_offload in (None, "none"):
            yield Assumption("components_resident", "all components stay on the GPU (--cpu-offload)")
        if self.vae is not None:
            yield from convolutions(setup)
        if self.vae is not None and not setup.vae_tiling:
            text = "the autoencoder decodes whole pictures (--vae-tiling, --vae-slicing)"
            yield Assumption("vae_whole", text)


_GUIDED = {
    "batch": "guidance in one forward: the denoiser gets every picture twice (--guidance-scale)",
    "two": "guidance in two forwards, one after the other (--guidance-scale)",
    "none": "no guidance by a second prediction",
}


def _undescribed(other: PipelineComponent, setup: InferenceSetup) -> int:
    """Bytes of a component that no family describes: as they are stored, or in the dtype that is asked for."""
    return other.nbytes if setup.dtype is None else other.parameters * ALIASES[setup.dtype].itemsize
