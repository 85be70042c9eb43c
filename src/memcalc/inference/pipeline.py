"""A diffusion pipeline in inference: its components are loaded, and the prompt becomes a picture."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from memcalc.autograd.tape import Tape
from memcalc.common.assumption import Assumption
from memcalc.errors import UsageError
from memcalc.inference.component_offload import Placement
from memcalc.inference.pipeline_components import (
    Loaded,
    described,
    load_component,
    own_name,
    undescribed_bytes,
    upcast_vae,
)
from memcalc.inference.pipeline_options import check_pipeline
from memcalc.inference.pipeline_stages import Prompted, decode_latents, denoise_once, encode_image, encode_prompts
from memcalc.models.common.autoencoder import Autoencoder
from memcalc.models.common.denoiser import Denoiser, Picture, PromptCall
from memcalc.models.registry import family
from memcalc.models.spec import ModelSpec
from memcalc.nn.model import Network
from memcalc.nn.module import Module
from memcalc.nn.recorder import Recorder
from memcalc.nn.run_context import RunContext, run_context
from memcalc.setup.setup import InferenceSetup
from memcalc.tables.cuda_devices import CudaDevice
from memcalc.training.denoising import convolutions
from memcalc.training.input_sizes import check_sizes
from memcalc.training.traced_step import Step

PHASES = ("encode", "denoise", "vae_decode")
H100 = CudaDevice((9, 0), 132)
"""The GPU whose kernels are taken where none is named."""


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
    check_pipeline(spec, setup)
    parts = [load_component(name, part, setup) for name, part in described(spec)]
    main = next(part for part in parts if part.spec is spec or part.name == own_name(spec))
    parts = [upcast_vae(part, main.network) for part in parts]
    tape = Tape(phase="loading") if recorder is None else recorder.new_tape("loading")
    tape.grad_enabled = tape.dropout_enabled = False
    tape.device = device or H100
    tape.run = RunContext(training=False, all_logits=True)
    for part in parts:
        part.network.bind(tape, part.dtype)
    network = Pipeline({part.name: part.network for part in parts})
    if recorder is not None:
        recorder.watch(network)
    undescribed = {other.name: undescribed_bytes(other, setup) for other in spec.components if other.spec is None}
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
        components={part.label: part.nbytes for part in parts},
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
            longest, text = model.longest_text, setup.max_sequence_length
            if longest is not None and text is not None and text > longest:
                raise UsageError(
                    f"--max-sequence-length of {text:,} is more than the {longest:,} that this model's pipeline takes; "
                    "give less."
                )
            asked = model.picture(batch, height, width, frames, setup.max_sequence_length)
            return model.with_images(asked, setup.condition_images)
        if setup.condition_images:
            raise UsageError("--condition-images is for denoisers, and this is an autoencoder; leave it out.")
        assert self.vae is not None
        assert isinstance(self.vae.network, Autoencoder)
        side = self.vae.network.default_side
        return Picture(batch, height or side, width or side, setup.num_frames or 1)

    def run(self) -> None:
        """Every phase that the pipeline has components for."""
        tape, placing = self.tape, self.placement
        encoders = list(self._encoders())
        images = self.picture.images and self.vae is not None
        if (encoders or images) and self.denoiser is not None:
            tape.begin_span("encode", None)
            prompts = 1 if self.guidance == "none" else 2
            encode_prompts(tape, encoders, prompts, self.setup.batch, placing)
        if images and self.vae is not None and isinstance(self.vae.network, Autoencoder):
            encode_image(tape, self.vae.network, self.picture, self.vae.dtype, self.vae.name, placing)
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
            if picture.images:
                text = "the pictures beside the noisy one are of its size; a text encoder that reads them too is not"
                yield Assumption("condition_images", f"{text} counted for it (--condition-images)")
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
