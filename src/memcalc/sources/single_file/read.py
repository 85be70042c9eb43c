"""A checkpoint of one file as the pipeline that it holds: its denoiser, and what lies beside it."""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from memcalc.errors import MemcalcError
from memcalc.models.build import build
from memcalc.models.spec import ModelSpec
from memcalc.sources.checkpoint.checkpoint import Checkpoint
from memcalc.sources.checkpoint.stored_tensor import Role, StoredTensor
from memcalc.sources.loaded_model import CONFIG, Component, LoadedModel
from memcalc.sources.single_file.beside import Beside, autoencoder, text_encoder
from memcalc.sources.single_file.gguf_modules import packed_modules
from memcalc.sources.single_file.shapes import Shapes, Unfit
from memcalc.sources.single_file.transformers import RECOGNISED, UNKNOWN
from memcalc.sources.single_file.unet import PROOF, unet_config
from memcalc.units import format_count

Tensors = dict[str, StoredTensor]

_DENOISER = ("model.diffusion_model.", "diffusion_model.", "transformer.", "net.", "")
"""What may stand before the names of a denoiser: ComfyUI's and the original trainers' prefixes."""
_AUTOENCODER = ("first_stage_model.", "vae.")
_ENCODER = re.compile(
    r"(?:cond_stage_model|conditioner\.embedders\.\d+)\.(?:transformer|model)\.|text_encoders\.\w+\.transformer\."
)
_AVERAGES = "model_ema."
_BESIDE = (*_AUTOENCODER, _AVERAGES, "cond_stage_model.", "conditioner.", "text_encoders.")
_SCALES = frozenset(
    {"scale_weight", "scale_input", "scaled_fp8", "weight_scale", "weight_scale_2", "input_scale", "comfy_quant"}
)
"""Last names of the scales that ComfyUI stores beside weights in fp8."""
_DIFFUSERS = (
    "down_blocks.0.resnets.0.conv1.weight",
    "transformer_blocks.0.attn.to_q.weight",
    "transformer_blocks.0.attn1.to_q.weight",
    "single_transformer_blocks.0.attn.to_q.weight",
    "blocks.0.attn1.to_q.weight",
    "layers.0.attn.to_q.weight",
    "layers.0.attention.to_q.weight",
)
"""Names that diffusers gives, by which a component is known."""


def as_pipeline(model: LoadedModel) -> LoadedModel:
    """`model`, which has weights and no config, as the pipeline that its names tell; unchanged where they tell none.

    Weights of a family that is not described, or not in this shape, get the reason as `unfit`.
    """
    checkpoint = model.checkpoint
    if checkpoint is None or model.config is not None or model.adapter is not None:
        return model
    tensors = {t.weight: t for t in checkpoint.tensors if t.role in (Role.PARAMETER, Role.QUANTIZED) and t.shape}
    for prefix in _DENOISER:
        own = {name: t for name, t in _under(tensors, prefix).items() if not t.weight.startswith(_BESIDE)}
        known = _recognised(own, Shapes(_shapes(own)))
        if isinstance(known, Beside):
            return _pipeline(model, checkpoint, tensors, own, known)
        if known:
            return replace(model, unfit=known, config_file=CONFIG)
    return model


def _under(tensors: Mapping[str, StoredTensor], prefix: str) -> Tensors:
    """Weights by their names behind a prefix; scales of fp8 are none."""
    return {
        name.removeprefix(prefix): tensor
        for name, tensor in tensors.items()
        if name.startswith(prefix) and name.rpartition(".")[2] not in _SCALES
    }


def _shapes(tensors: Tensors) -> dict[str, tuple[int, ...]]:
    return {name: tensor.shape or () for name, tensor in tensors.items()}


def _recognised(tensors: Tensors, shapes: Shapes) -> Beside | str:
    """The denoiser that the names prove, a reason against it, or "" where they prove none."""
    found = next((row for row in RECOGNISED if all(name in shapes for name in row.proof)), None)
    unknown = next((family for name, family in UNKNOWN.items() if name in shapes), None)
    if found is None and unknown is not None:
        return _not_described(f"holds weights of {unknown}, which memcalc does not describe")
    try:
        if found is not None:
            known = Beside(found.class_name, "diffusers", found.config(shapes), found.dropped)
        elif all(name in shapes for name in PROOF):
            known = Beside("UNet2DConditionModel", "diffusers", unet_config(shapes))
        else:
            return _own_names(shapes)
    except Unfit as problem:
        name = found.class_name if found else "UNet2DConditionModel"
        return _not_described(f"has names of {name} in a shape that memcalc does not know ({problem})")
    try:
        built = _parameters(known)
    except MemcalcError as problem:
        return _not_described(
            f"holds {known.class_name} in a variant that is not described: {str(problem).rstrip('.')}"
        )
    stored = _count(tensors, known)
    if built != stored:
        return _not_described(
            f"has names of {known.class_name}, but {stored:,} parameters where a model of its shapes has {built:,}: a "
            "variant that memcalc does not describe"
        )
    return known


def _own_names(shapes: Shapes) -> str:
    if shapes.has_any(_DIFFUSERS):
        return (
            "holds a component of a diffusion pipeline under diffusers' names, whose config.json is missing; put it "
            "beside the file, or give the pipeline's folder."
        )
    return ""


def _not_described(reason: str) -> str:
    return f"{reason}; `memcalc inspect` counts its weights."


def _parameters(known: Beside) -> int:
    spec = ModelSpec.from_config(_config(known), known.class_name)
    return sum(parameter.numel * parameter.copies for _, parameter in build(spec).parameters())


def _config(known: Beside) -> dict[str, object]:
    own = {"_class_name": known.class_name} if known.library == "diffusers" else {"architectures": [known.class_name]}
    return {**known.config, **own}


def _count(tensors: Tensors, known: Beside) -> int:
    return sum(tensor.parameters for name, tensor in tensors.items() if name not in known.dropped)


def _pipeline(
    model: LoadedModel, checkpoint: Checkpoint, tensors: Tensors, own: Tensors, denoiser: Beside
) -> LoadedModel:
    autoencoders = {prefix: part for prefix in _AUTOENCODER if (part := _under(tensors, prefix))}
    encoders = _encoders(tensors)
    main = "unet" if denoiser.class_name.startswith("UNet") else "transformer"
    parts = [_component(main, own, denoiser, checkpoint)]
    if checkpoint.format == "gguf":
        spec = ModelSpec.from_config(_config(denoiser), denoiser.class_name)
        modules, others = packed_modules(own, spec)
        if others:
            return replace(model, unfit=_not_packed(denoiser, own, others), config_file=CONFIG)
        parts[0] = replace(parts[0], modules=modules)
    for place, part in enumerate(encoders.values(), 1):
        name = "text_encoder" if place == 1 else f"text_encoder_{place}"
        known = text_encoder(Shapes(_shapes(part)), denoiser.class_name, alone=len(encoders) == 1)
        parts.append(_component(name, part, known, checkpoint))
    for part in autoencoders.values():
        parts.append(_component("vae", part, _of_size(autoencoder(Shapes(_shapes(part))), denoiser), checkpoint))
    notes = [*model.notes, *_notes(denoiser, parts)]
    if averages := _under(tensors, _AVERAGES):
        count = format_count(sum(tensor.parameters for tensor in averages.values()))
        notes.append(f"the averaged weights that the file also holds (model_ema, {count} parameters) are not loaded")
    return replace(model, checkpoint=None, components=tuple(parts), notes=tuple(notes))


def _not_packed(denoiser: Beside, tensors: Tensors, others: Sequence[str]) -> str:
    kinds = {tensors[name].dtype for name in others}
    return _not_described(
        f"holds {denoiser.class_name} with {len(others):,} quantized tensors ({', '.join(sorted(kinds))}; {others[0]}) "
        "that memcalc does not know how diffusers keeps"
    )


def _encoders(tensors: Mapping[str, StoredTensor]) -> dict[str, Tensors]:
    """Text encoders by their prefixes, in the order of the pipeline."""
    prefixes = {found[0] for name in tensors if (found := _ENCODER.match(name))}
    return {prefix: _under(tensors, prefix) for prefix in sorted(prefixes, key=_place)}


def _place(prefix: str) -> tuple[int, str]:
    """Where a text encoder comes in its pipeline: those of Stable Diffusion 3 and FLUX.1 by name, others by number."""
    order = ("clip_l", "clip_g", "t5xxl")
    name = prefix.split(".")[1]
    return order.index(name) if name in order else len(order), prefix


def _of_size(vae: Beside | None, denoiser: Beside) -> Beside | None:
    """The autoencoder with the size of pictures of its denoiser, from which tiles are made."""
    side = denoiser.config.get("sample_size")
    if vae is None or not isinstance(side, int) or not denoiser.class_name.startswith("UNet"):
        return vae
    return replace(vae, config={**vae.config, "sample_size": 8 * side})


def _component(name: str, tensors: Tensors, known: Beside | None, checkpoint: Checkpoint) -> Component:
    """A part of the file with its config, where it has as many parameters as that says."""
    held = replace(checkpoint, tensors=tuple(tensors.values()), notes=(), ignored=())
    if known is not None:
        held = replace(held, tensors=tuple(t for own, t in tensors.items() if own not in known.dropped))
        if held.parameters == _parameters(known):
            return Component(name, known.library, known.class_name, known.config, held, counted=True)
    return Component(name, "", "unknown", None, held)


def _notes(denoiser: Beside, parts: Sequence[Component]) -> Iterable[str]:
    main = parts[0]
    assert main.checkpoint is not None
    beside = f" with {', '.join(part.name for part in parts[1:])}" if parts[1:] else ""
    yield (
        f"a single-file checkpoint: {denoiser.class_name} of {main.checkpoint.parameters:,} parameters{beside}, its "
        "config read off names and shapes"
    )
    kind = main.checkpoint.stored_dtype or ""
    if main.checkpoint.format == "gguf":
        types = ", ".join(main.checkpoint.stored_bytes_by_dtype)
        yield f"GGUF ({types}): linear layers stay packed and are unpacked one by one (GGUFQuantizationConfig)"
    elif kind.startswith("F8"):
        yield f"stored in fp8 ({kind}), which diffusers' from_single_file widens to the dtype of the run"
