"""The components of a diffusion pipeline, as they are loaded."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from memcalc.inference.weights import LoadedWeights, load_weights
from memcalc.models.build import build
from memcalc.models.common.autoencoder import Autoencoder
from memcalc.models.common.denoiser import Denoiser
from memcalc.models.registry import autoencoders
from memcalc.models.spec import ModelSpec, PipelineComponent
from memcalc.models.stored_weights import StoredWeights
from memcalc.nn.model import Network
from memcalc.nn.quantized_layers import quantize, tell_apart
from memcalc.nn.stack import Stack
from memcalc.peft.injection import add_lora
from memcalc.peft.targets import Lora
from memcalc.setup.setup import InferenceSetup
from memcalc.tables.dtypes import ALIASES, FP32, DType
from memcalc.tables.engines import ENGINES


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

    @property
    def nbytes(self) -> int:
        """Bytes of its weights."""
        return sum(tensor.storage.allocation.nbytes * tensor.copies for _, tensor in self.network.tensors())


def names(text: str) -> list[str]:
    """The names in a list with commas."""
    return [name.strip() for name in text.split(",") if name.strip()]


def own_name(spec: ModelSpec) -> str:
    """The name of the component that was asked about itself."""
    if spec.component:
        return spec.component
    if spec.model_type in autoencoders():
        return "vae"
    return "unet" if spec.model_type.startswith("UNet") else "transformer"


def described(spec: ModelSpec) -> Iterator[tuple[str, ModelSpec]]:
    """Every component with a spec in the order of running: text encoders, the denoiser, the autoencoder."""
    others = [(part.name, part.spec) for part in sorted(spec.components, key=_name) if part.spec is not None]
    yield from ((name, other) for name, other in others if other.model_type not in autoencoders())
    yield own_name(spec), spec
    yield from ((name, other) for name, other in others if other.model_type in autoencoders())


def _name(part: PipelineComponent) -> str:
    return part.name


def load_component(name: str, spec: ModelSpec, setup: InferenceSetup) -> Loaded:
    """Build a component with the weights that it is loaded with."""
    network = build(spec)
    chosen = names(setup.components_to_quantize or "") or ([name] if isinstance(network, Denoiser) else [])
    changes: dict[str, object] = {} if name in chosen else {"quantization": "none"}
    if isinstance(network, Autoencoder):
        network.tiling, network.slicing = setup.vae_tiling, setup.vae_slicing
        if setup.vae_dtype is not None:
            changes["dtype"] = setup.vae_dtype
    weights = load_weights(spec, setup.model_copy(update=changes), ENGINES["transformers"], network, network)
    if spec.stored is not None and spec.stored.modules:
        weights = _as_stored(weights, spec.stored)
    if weights.form is not None:
        if weights.format_of is not None:
            tell_apart(network, weights.format_of)
        quantize(network, weights.form, ALIASES[weights.dtype], weights.format_of, weights.stated)
    if spec.adapter is not None:
        kept = spec.adapter
        lora = Lora(kept.rank, kept.targets, ALIASES[weights.dtype], ranks=kept.ranks)
        add_lora(network, spec.model_type, lora)
    for _, module in network.modules():
        if isinstance(module, Stack):
            module.rename(f"{name} {module.name}")
    return Loaded(name, spec, network, weights)


def _as_stored(weights: LoadedWeights, stored: StoredWeights) -> LoadedWeights:
    """Weights of a GGUF file as diffusers keeps them (GGUFQuantizationConfig): each layer in its own type."""
    kinds = list(dict.fromkeys(form.name for form in stored.modules.values()))
    name = f"GGUF {kinds[0]}" if len(kinds) == 1 else "GGUF"
    first = next(iter(stored.modules.values()))
    return replace(weights, quantization=name, form=first, format_of=stored.modules.get)


def upcast_vae(part: Loaded, denoiser: Network) -> Loaded:
    """The component as the pipeline of `denoiser` runs it: SDXL's decode in fp32 where the autoencoder is in fp16."""
    vae = part.network
    upcast = isinstance(denoiser, Denoiser) and denoiser.upcasts_vae and part.weights.dtype == "fp16"
    return replace(part, widened=upcast and isinstance(vae, Autoencoder) and vae.force_upcast)


def undescribed_bytes(other: PipelineComponent, setup: InferenceSetup) -> int:
    """Bytes of a component that no family describes: as they are stored, or in the dtype that is asked for."""
    return other.nbytes if setup.dtype is None else other.parameters * ALIASES[setup.dtype].itemsize
