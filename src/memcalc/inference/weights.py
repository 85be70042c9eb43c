"""The weights of a model that is served: in which dtype they are loaded, and what they take quantized."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from memcalc.common.assumption import Assumption
from memcalc.common.escaping import quoted
from memcalc.common.sizes import rounded
from memcalc.config.dtypes import declared_dtypes
from memcalc.config.quantization import Quantization, find_quantization, quantized_once
from memcalc.errors import UsageError
from memcalc.models.spec import ModelSpec
from memcalc.models.stored_weights import GGUF
from memcalc.nn.layers.linear import Conv1D, Linear
from memcalc.nn.layers.mixture_of_experts import ExpertWeights
from memcalc.nn.model import Network
from memcalc.nn.module import Buffer, Parameter
from memcalc.nn.state_dict import NamedWeight, every_weight
from memcalc.parallel.device_map import Device
from memcalc.parallel.tensor_parallel import proportional_bytes
from memcalc.setup.setup import InferenceSetup
from memcalc.tables.dtypes import ALIASES, short
from memcalc.tables.engines import Engine
from memcalc.tables.served_formats import does_not_load
from memcalc.tables.stated_formats import ModuleFormat, module_formats, stated_format, unknown_layout
from memcalc.tables.weight_formats import WeightFormat, asked_format

DEFAULT_DTYPE = "bf16"
LOADABLE = ("fp32", "bf16", "fp16")


@dataclass(frozen=True)
class LoadedWeights:
    """How weights are loaded: `dtype` of those that are not quantized, `quantization` of the others.

    `parts` are the bytes of all weights by what they are, None where they are simply the network's in `dtype`.
    `form` is the format that linear layers have while they run, `format_of` that of each by its name;
    `stated` is the key of the config that says so, empty where the user did.
    """

    dtype: str
    quantization: str
    parts: Mapping[str, int] | None
    notes: tuple[Assumption, ...]
    form: WeightFormat | None = None
    format_of: ModuleFormat | None = None
    stated: str = ""


def load_weights(
    spec: ModelSpec, setup: InferenceSetup, engine: Engine, network: Network, whole: Network
) -> LoadedWeights:
    """The weights of `network`, which is one GPU's share of `whole`.

    Raises UsageError where the model is quantized already and another quantization is asked for.
    """
    dtype, notes = dtype_to_load(spec, setup)
    form, more = _format(spec, setup)
    notes = (*notes, *more)
    method = "none" if form is None else form.name
    running = None if form is None else _serving(form)
    stated = _stated(spec, setup)
    where = "" if stated is None else stated.where
    format_of = None if form is None else module_formats(stated, form)
    serving = None if format_of is None else _serving_formats(format_of)
    buffers = {"buffers": _buffers(network, dtype)}
    stored = spec.stored
    if stored is not None and (stored.packed or stored.exact) and (stored.kind != GGUF or engine.reads_gguf):
        here, everywhere = _count(network), _count(whole)
        parts = {name: proportional_bytes(nbytes, here, everywhere) for name, nbytes in stored.packed.items()}
        if stored.unpacked:
            parts[f"{dtype} weights"] = proportional_bytes(stored.unpacked * ALIASES[dtype].itemsize, here, everywhere)
        return LoadedWeights(dtype, stored.kind or method, parts | buffers, notes, running, serving, where)
    if stored is not None and stored.kind == GGUF:
        notes = (*notes, Assumption("gguf_unpacked", f"{engine.name} unpacks GGUF weights to {dtype}"))
    if form is not None or engine.compute is not None:
        return LoadedWeights(
            dtype, method, _by_format(network, format_of, dtype) | buffers, notes, running, serving, where
        )
    return LoadedWeights(dtype, method, None, notes)


_HEAD_IS_AN_EMBEDDING = ("vllm", "sglang")
"""Engines whose head is no linear layer, so that only GPTQ's and auto-round's methods, which ask for it, quantize it.

Source: vLLM, model_executor/layers/quantization: get_quant_method of bitsandbytes, fbgemm_fp8, modelopt (`LinearBase`).
"""

_SERVING_KERNELS = {"gptq": "fp8", "awq": "fp8"}
"""Kernels that serve where others train: Marlin's multiply with packed weights in one step, as that of fp8 does."""


def dtype_to_load(spec: ModelSpec, setup: InferenceSetup) -> tuple[str, tuple[Assumption, ...]]:
    """The dtype of wide weights: what the user says, the config declares, or the files store; and how it was found."""
    if setup.dtype is not None:
        return setup.dtype, ()
    for word in declared_dtypes(spec.config):
        if word in ALIASES and (name := short(ALIASES[word])) in LOADABLE:
            return name, (Assumption("dtype_declared", f"weights in {name}, as config.json declares (--dtype)"),)
    if spec.stored is not None and spec.stored.dtype in LOADABLE:
        return str(spec.stored.dtype), (
            Assumption("dtype_stored", f"weights in {spec.stored.dtype}, as they are stored (--dtype)"),
        )
    words = tuple(declared_dtypes(spec.config))
    why = f"the dtype {quoted(words[0])}, in which nothing is loaded" if words else "no dtype"
    return DEFAULT_DTYPE, (
        Assumption("dtype_default", f"weights in {DEFAULT_DTYPE} (default, as the config declares {why}; --dtype)"),
    )


def _format(spec: ModelSpec, setup: InferenceSetup) -> tuple[WeightFormat | None, tuple[Assumption, ...]]:
    if setup.quantize_moe_experts != "none" and setup.quantization == "none":
        raise UsageError("--quantize-moe-experts goes with --quantization, such as nf4; add it, or leave it out.")
    stated = quantized_once(spec.config, setup.quantization)
    if stated is None and spec.stored is not None and spec.stored.packed:
        if setup.quantization != "none":
            raise UsageError(f"the files are quantized already ({spec.stored.kind}); leave out --quantization.")
        return None, ()
    if stated is None:
        return (
            (None, ())
            if setup.quantization == "none"
            else (asked_format(setup.quantization, setup.quantize_moe_experts), ())
        )
    form = stated_format(stated)
    if form is None and spec.stored is None:
        raise unknown_layout(stated)
    if form is None:
        return None, (
            Assumption(
                "quantization_unknown",
                f"quantization {stated.method!r} is not known: weights are counted as they are stored",
            ),
        )
    if setup.engine in _HEAD_IS_AN_EMBEDDING and stated.method not in ("gptq", "auto-round"):
        form = replace(form, head=False)
    unloaded = does_not_load(setup.engine, stated.method)
    if unloaded is not None and setup.engine not in ("transformers", "transformers-static"):  # nobody chose these
        raise UsageError(f"{unloaded}; change --engine, or take the model that it was made from.")
    lines = [
        Assumption(
            "weights_quantization",
            f"weights quantized as {stated.where} of the config says: {stated}{_bits_note(stated, form)}",
        )
    ]
    if unloaded is not None:
        lines.append(Assumption("engine_does_not_load", f"{unloaded}: these are the weights as they are stored"))
    if form.only_experts:
        lines.append(
            Assumption(
                "mxfp4_kernels",
                "MXFP4 weights stay packed, for which Transformers needs the kernels package on the GPU",
            )
        )
    return form, tuple(lines)


def _bits_note(stated: Quantization, form: WeightFormat) -> str:
    return "" if stated.bits else f", which leaves out the bits: {form.bits} are taken"


def _stated(spec: ModelSpec, setup: InferenceSetup) -> Quantization | None:
    return None if setup.quantization != "none" else find_quantization(spec.config)


def _serving(form: WeightFormat) -> WeightFormat:
    return replace(form, kernel=_SERVING_KERNELS.get(form.kernel, form.kernel))


def _serving_formats(format_of: ModuleFormat) -> ModuleFormat:
    def of(name: str) -> WeightFormat | None:
        form = format_of(name)
        return None if form is None else _serving(form)

    return of


def _count(network: Network) -> int:
    return sum(parameter.numel * parameter.copies for _, parameter in network.parameters())


def _buffers(network: Network, dtype: str) -> int:
    return sum(
        rounded(tensor.numel * (tensor.fixed_dtype or ALIASES[dtype]).itemsize) * tensor.copies
        for _, tensor in network.tensors()
        if isinstance(tensor, Buffer)
    )


def _by_format(network: Network, format_of: ModuleFormat | None, dtype: str) -> dict[str, int]:
    """Bytes of every weight by format and group; what `format_of` has no format for is wide."""
    parts: dict[str, int] = {}
    for weight in every_weight(network):
        name, nbytes = _formatted(weight, format_of, dtype)
        parts[name] = parts.get(name, 0) + nbytes
    return parts


def _formatted(weight: NamedWeight, format_of: ModuleFormat | None, dtype: str) -> tuple[str, int]:
    """What a weight is, and its bytes."""
    parameter = weight.parameter
    form = None if format_of is None else format_of(weight.name.removesuffix(".weight"))
    if form is not None and _is_quantized(weight, form):
        return f"{form.name} {parameter.group}", rounded(form.nbytes(_as_matrix(weight)))
    kind = parameter.fixed_dtype or ALIASES[dtype]
    return f"{short(kind)} {parameter.group}", rounded(parameter.numel * kind.itemsize)


def weights_by_device(
    weights: LoadedWeights, network: Network, device: Callable[[Parameter], Device]
) -> dict[Device, dict[str, int]]:
    """What each device has of the weights of a wide `network`, by what they are; empty where dtypes say it all."""
    if weights.parts is None:
        return {}
    found: dict[Device, dict[str, int]] = {}
    counts: dict[Device, int] = {}
    for weight in every_weight(network):
        where = device(weight.parameter)
        name, nbytes = _formatted(weight, weights.format_of, weights.dtype)
        parts = found.setdefault(where, {})
        parts[name] = parts.get(name, 0) + nbytes
        counts[where] = counts.get(where, 0) + weight.parameter.numel
    for _, tensor in network.tensors():
        if isinstance(tensor, Buffer):
            parts = found.setdefault(device(tensor), {})
            size = rounded(tensor.numel * (tensor.fixed_dtype or ALIASES[weights.dtype]).itemsize)
            parts["buffers"] = parts.get("buffers", 0) + size * tensor.copies
    if sum(map(sum, (parts.values() for parts in found.values()))) == sum(weights.parts.values()):
        return found
    whole = sum(counts.values())  # as they are stored, whose parts are known of the whole model alone
    return {
        where: {name: proportional_bytes(nbytes, count, whole) for name, nbytes in weights.parts.items()}
        for where, count in counts.items()
    }


def _is_quantized(weight: NamedWeight, form: WeightFormat) -> bool:
    """Whether a weight is a matrix of a linear layer or of experts; embeddings, norms and biases stay wide."""
    if isinstance(weight.owner, ExpertWeights):
        return form.experts and len(weight.parameter.shape) == 3
    linear = isinstance(weight.owner, (Linear, Conv1D)) and len(weight.parameter.shape) == 2
    wide = ("head", "embedding") if form.head else ("LM head", "head", "embedding")
    return linear and not form.only_experts and weight.parameter.group not in wide


def _as_matrix(weight: NamedWeight) -> tuple[int, ...]:
    """The shape as [out, in], whichever way the weight lies."""
    shape = weight.parameter.shape
    transposed = isinstance(weight.owner, Conv1D) or (
        isinstance(weight.owner, ExpertWeights) and weight.owner.transposed
    )
    return (*shape[:-2], shape[-1], shape[-2]) if transposed else shape
