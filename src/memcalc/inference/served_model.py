"""A model as an engine runs it: one GPU's share, with its weights loaded; the same for every batch and length."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from memcalc.autograd.tape import Tape
from memcalc.common.assumption import Assumption
from memcalc.config.kv_cache_scheme import kv_cache_scheme
from memcalc.config.quantization import find_quantization
from memcalc.config.reader import Config
from memcalc.errors import ConfigError
from memcalc.inference.weights import LoadedWeights, load_weights, weights_by_device
from memcalc.models.build import build
from memcalc.models.family import Family
from memcalc.models.registry import family
from memcalc.models.spec import ModelSpec
from memcalc.nn.model import Network
from memcalc.nn.quantized_layers import quantize, tell_apart
from memcalc.nn.state_space_kernels import use_fla, use_mamba_ssm
from memcalc.parallel.device_map import mapped_modules, weight_sizes
from memcalc.parallel.layout import device_map_of, free_bytes
from memcalc.parallel.placement import Placement, split_stacks
from memcalc.parallel.serving_layout import (
    ONE_GPU,
    ServingLayout,
    has_experts,
    keep_stage,
    serving_layout,
    share_experts,
)
from memcalc.parallel.tensor_parallel import check_divided, tensor_parallel, unknown_division
from memcalc.setup.setup import InferenceSetup
from memcalc.tables.dtypes import ALIASES, DType
from memcalc.tables.engines import AUTO, ENGINES, CacheFormat, Engine
from memcalc.tables.gpus import Gpu


@dataclass(frozen=True)
class ServedModel:
    """A model that is ready to be run.

    weights: how they are loaded.
    kv_dtype: the dtype of the cache, by name.
    form: the format of a quantized cache; None where it is not quantized.
    notes: what is taken for granted about all of this.
    """

    row: Family
    engine: Engine
    network: Network
    weights: LoadedWeights
    kv_dtype: str
    form: CacheFormat | None
    notes: tuple[Assumption, ...]
    gpu: Gpu | None = None
    """The GPU that decides defaults of the engine."""
    placement: Placement | None = None
    """The GPUs of this process that its modules lie on, where they are several."""
    layout: ServingLayout = ONE_GPU
    stage: int = 0
    """Which stage of the pipeline it is."""

    @property
    def dtype(self) -> DType:
        """The dtype that it computes in."""
        return self.engine.compute or ALIASES[self.weights.dtype]

    def bind(self, tape: Tape) -> None:
        """Put the weights on a tape, and what moves inputs between GPUs around the modules."""
        self.network.bind(tape, self.dtype)
        if self.placement is not None:
            self.placement.attach()

    @property
    def resolved_options(self) -> Mapping[str, Any]:
        """Values of options that were not given, by name."""
        return {"dtype": self.weights.dtype, "quantization": self.weights.quantization, "kv_dtype": self.kv_dtype}


def served_model(spec: ModelSpec, setup: InferenceSetup, gpu: Gpu | None = None, stage: int = 0) -> ServedModel:
    """Build the model of `spec` and load its weights, to be served by `gpu` as one of stage `stage`.

    Raises MemcalcError where the setup cannot be served.
    """
    engine = ENGINES[setup.engine]
    whole = build(spec)
    layout = serving_layout(setup, whole)
    network, notes = _divided(spec, whole, layout)
    complete = whole
    if layout.pipeline > 1:
        complete = build(spec)
        for part in (network, complete):
            keep_stage(part, layout.pipeline, stage)
    if layout.expert_ranks * layout.expert_width > 1:
        share_experts(network, complete, layout)
    check_divided(complete, network, layout.tensor if layout.attention == layout.tensor else 1)
    if (setup.enable_expert_parallel or setup.expert_parallel_size > 1) and not has_experts(whole):
        notes = [
            *notes,
            Assumption("expert_parallel_idle", "expert parallel changes nothing: this model has no experts to spread"),
        ]
    elif setup.enable_expert_parallel and layout.expert_ranks == 1:
        notes = [*notes, Assumption("expert_parallel_idle", "--enable-expert-parallel changes nothing on one GPU")]
    if setup.state_space_kernels == "mamba-ssm":
        notes = [*notes, use_mamba_ssm(network)]
    if setup.linear_attention_kernels == "fla":
        notes = [*notes, use_fla(network)]
    weights = load_weights(spec, setup, engine, network, whole)
    spread = _spread(setup, network, weights, gpu)
    if weights.form is not None and engine.attention is None:
        if weights.format_of is not None:
            tell_apart(network, weights.format_of)
        quantize(network, weights.form, ALIASES[weights.dtype], weights.format_of, weights.stated)
    placement = None if spread is None else Placement(network, spread.mapped, spread.ask, spread.weights)
    kv_dtype, scheme = _kv_dtype(spec, setup, engine)
    form = engine.format(kv_dtype, weights.dtype)
    return ServedModel(
        family(spec.model_type),
        engine,
        network,
        weights,
        kv_dtype,
        form,
        (*weights.notes, *notes, *scheme),
        gpu,
        placement,
        layout,
        stage,
    )


def _spread(setup: InferenceSetup, network: Network, weights: LoadedWeights, gpu: Gpu | None) -> Placement | None:
    """Where the modules of a wide network lie that is spread over several GPUs, and the weights of each device."""
    ask = device_map_of(setup, None if gpu is None else free_bytes(setup, gpu))
    if ask is None:
        return None
    form = weights.form
    sizes = weight_sizes(network, ALIASES[weights.dtype], form, weights.format_of)
    quantizes = form is not None and form.kernel.startswith("bnb-")
    mapped = mapped_modules(network, ask, sizes, quantizes=quantizes)
    split_stacks(network, mapped)
    wide = Placement(network, mapped, ask)
    return Placement(network, mapped, ask, weights_by_device(weights, network, wide.device))


def _divided(spec: ModelSpec, whole: Network, layout: ServingLayout) -> tuple[Network, list[Assumption]]:
    """One GPU's share of `whole`, and what to say about it. Raises UsageError where it cannot be divided."""
    size, experts = layout.tensor, layout.expert_ranks * layout.expert_width
    if (size, experts) == (1, 1):
        return (whole if layout.pipeline == 1 else build(spec)), []
    row = family(spec.model_type)
    config, notes = tensor_parallel(Config(spec.config, row.defaults, row.aliases), size, attention=layout.attention)
    try:
        network = build(spec if size == 1 else replace(spec, config=config))
    except ConfigError:  # the family ties one size to another, so its share is no model of the family
        raise unknown_division(size, "attention") from None
    return network, notes


def _kv_dtype(spec: ModelSpec, setup: InferenceSetup, engine: Engine) -> tuple[str, list[Assumption]]:
    """The dtype of the cache: the setup's, or what the repository states where the engine follows it."""
    stated = kv_cache_scheme(find_quantization(spec.config))
    if stated is None or setup.kv_dtype != AUTO:
        return setup.kv_dtype, []
    if engine.follows_scheme and stated.dtype in engine.formats:
        return stated.dtype, [
            Assumption(
                "kv_cache_scheme", f"KV cache in {stated.dtype}, as {stated.where} of the config says (--kv-dtype)"
            )
        ]
    return AUTO, [
        Assumption(
            "kv_cache_scheme_not_followed",
            f"the config asks for a {stated.dtype} KV cache ({stated.where}), which {engine.name} does not follow",
        )
    ]
