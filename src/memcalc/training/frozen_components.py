"""Frozen models of a pipeline that make a denoiser's inputs on the GPU in every step: autoencoder and text encoders.

Source: examples/{text_to_image,dreambooth} of diffusers 0.42.1, without --cache_latents and without prompts that were
encoded before training.
"""

from __future__ import annotations

from collections.abc import Iterator

from memcalc import ops
from memcalc.autograd.tape import OVERHEAD, Tape
from memcalc.autograd.tensor import Tensor
from memcalc.common.sizes import Shape, rounded
from memcalc.errors import UsageError
from memcalc.inference.pipeline_stages import Prompted, embed
from memcalc.models.build import build
from memcalc.models.common.autoencoder import Autoencoder
from memcalc.models.common.denoiser import Denoiser, Picture, PromptCall
from memcalc.models.registry import family
from memcalc.models.spec import ModelSpec, PipelineComponent
from memcalc.nn.model import Network
from memcalc.nn.run_context import run_context
from memcalc.nn.stack import Stack
from memcalc.setup.setup import TrainingSetup
from memcalc.tables.dtypes import ALIASES, FP32, DType, short
from memcalc.training.trainer_loop import autocast_of

PHASE = "encode"


def runs_in_step(setup: TrainingSetup) -> bool:
    """Whether a frozen component runs in every step."""
    return not (setup.cache_latents and setup.cache_text_embeddings)


class FrozenComponents:
    """The components that a setup has on the GPU beside the denoiser, bound to a tape."""

    def __init__(self, tape: Tape, model: Denoiser, spec: ModelSpec, setup: TrainingSetup) -> None:
        self.tape, self.model = tape, model
        self.narrow = autocast_of(setup) or ALIASES[setup.precision.removeprefix("mixed-")]
        self.weights: dict[str, int] = {}
        self.networks: list[Network] = []
        self.vae: tuple[Autoencoder, DType] | None = None
        self.encoders: list[tuple[str, ModelSpec, Network]] = []
        self.trained = {encoder.name for encoder in model.learning}
        run = run_context(tape)
        before = run.weights_dtype
        with tape.no_grad():
            for part in sorted(spec.components, key=lambda part: part.name):
                self._load(part, setup)
        run.weights_dtype = before
        self._check(setup)

    def _check(self, setup: TrainingSetup) -> None:
        if not setup.cache_latents and self.vae is None:
            raise UsageError(
                "--no-cache-latents needs the pipeline's autoencoder, which memcalc does not have here; give the "
                "pipeline's folder, or leave it out."
            )
        if not setup.cache_text_embeddings and not self.encoders:
            raise UsageError(
                "--no-cache-text-embeddings needs the pipeline's text encoders, which memcalc does not have here; give "
                "the pipeline's folder, or leave it out."
            )

    def _load(self, part: PipelineComponent, setup: TrainingSetup) -> None:
        if part.spec is None:
            return
        network = build(part.spec)
        if isinstance(network, Autoencoder):
            if setup.cache_latents:
                return
            wide = FP32 if self.model.trains_with_fp32_vae else self.narrow
            dtype = wide if setup.vae_dtype is None else ALIASES[setup.vae_dtype]
            self.vae = network, dtype
        elif setup.cache_text_embeddings or not network.reads_text or part.name in self.trained:
            return
        else:
            dtype = self.narrow
            self.encoders.append((part.name, part.spec, network))
        for _, module in network.modules():
            if isinstance(module, Stack):
                module.rename(f"{part.name} {module.name}")
        network.bind(self.tape, dtype)
        self.networks.append(network)
        nbytes = sum(rounded(t.numel * t.dtype.itemsize) * t.copies for _, t in network.tensors())
        self.weights[f"{part.name} {short(dtype)}"] = nbytes

    def encode(self, picture: Picture, sigmas: Shape) -> list[Tensor]:
        """Latents and text embeddings of a micro-batch, which the loop holds until the optimizer has stepped.

        The loop still holds the sigmas of the step before.
        """
        tape, run = self.tape, run_context(self.tape)
        before, attention, training = run.weights_dtype, run.attention, run.training
        kept = []
        tape.begin_span(PHASE, None)
        last_sigmas = tape.empty(sigmas, before)
        with tape.no_grad():
            if self.vae is not None:
                vae, run.weights_dtype = self.vae
                pixels = tape.external_tensor(vae.pixel_shape(picture), run.weights_dtype, OVERHEAD, "pixels")
                pixels.storage.allocation.aliased = True
                kept.append(ops.to(vae.encode(pixels), before))
            kept += [embed(tape, encoder, picture.batch) for encoder in self._prompted(picture)]
        run.weights_dtype, run.attention, run.training = before, attention, training
        tape.begin_span("forward", None)
        del last_sigmas
        return kept

    def _prompted(self, picture: Picture) -> Iterator[Prompted]:
        for name, spec, network in self.encoders:
            row = family(spec.model_type)
            call = self.model.prompt_calls.get(spec.architecture or "", PromptCall())
            yield Prompted(
                name,
                network,
                call,
                call.length(picture.text),
                self.narrow,
                row.blocks == "decoder",
                row.attention_used("sdpa"),
            )
