"""The engine that a layout asks for, put around a bound model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from importlib import import_module

from memcalc.autograd.tape import Tape
from memcalc.config.reader import Config
from memcalc.errors import ConfigError, UsageError
from memcalc.models.registry import family
from memcalc.models.spec import ModelSpec
from memcalc.nn.model import Network
from memcalc.nn.module import Module
from memcalc.parallel.engine import Engine, Job
from memcalc.parallel.setup import Parallel, ParallelSetup
from memcalc.setup.setup import TrainingSetup
from memcalc.tables.dtypes import FP32, short
from memcalc.tables.precisions import PRECISIONS, PrecisionRecipe

ENGINES: dict[Parallel, tuple[str, str]] = {
    "ddp": ("ddp", "DistributedDataParallel"),
    "fsdp2": ("fsdp2", "FSDP2"),
    "fsdp1": ("fsdp1", "FSDP1"),
    "zero1": ("zero12", "ZeroOneTwo"),
    "zero2": ("zero12", "ZeroOneTwo"),
    "zero3": ("zero3", "Zero3"),
    "megatron": ("megatron", "Megatron"),
}
"""Module of this package and class of each engine, which is imported when it is asked for."""

_BUCKETS = ("zero1", "zero2", "zero3")
"""Engines whose buckets span blocks as it comes, so that no two blocks are alike."""
_TRACED_ONE_BY_ONE = 40
"""The deepest stack of which every block is traced for that; in deeper ones a bucket's flush may lie elsewhere."""
_PREFETCHED_ONE_BY_ONE = 160
"""The same for ZeRO-3, where a block gathers weights that later ones free: none can stand for others."""

_CASTING = ("fsdp2", "fsdp1")
"""Engines with a mixed-precision policy of their own: they gather fp32 shards in 16 bits."""


def _class_of(engine: Parallel) -> Callable[[Job], Engine]:
    if engine not in ENGINES:
        return Engine
    module, name = ENGINES[engine]
    made: Callable[[Job], Engine] = getattr(import_module(f"memcalc.parallel.{module}"), name)
    return made


def precision(name: str, layout: ParallelSetup) -> PrecisionRecipe:
    """A precision recipe as the layout carries it out: without autocast where the engine casts weights itself."""
    recipe = PRECISIONS[name]
    if layout.engine in (*_BUCKETS, "megatron") and recipe.autocast is not None:
        source = "DeepSpeed's and Megatron's bf16 and fp16: 16-bit weights, and an fp32 partition of them"
        return PrecisionRecipe(recipe.name, recipe.autocast, None, source)
    if layout.engine in _CASTING and not layout.autocast and recipe.autocast is not None:
        source = "MixedPrecisionPolicy over fp32 shards (torch.distributed.fsdp)"
        return PrecisionRecipe(recipe.name, recipe.weights, None, source, casts_to=recipe.autocast)
    return recipe


def adapter_dtype(setup: TrainingSetup, layout: ParallelSetup) -> dict[str, str]:
    """The dtype that adapters come to have: DeepSpeed casts the whole model, plain FSDP wants one dtype of a group."""
    weights = short(precision(setup.precision, layout).weights)
    plain = setup.trainer_used == "plain" and "lora_dtype" not in setup.model_fields_set
    plain_fsdp = layout.engine in _CASTING and plain
    if setup.lora_rank is None or weights == "fp16" or not (layout.engine in _BUCKETS or plain_fsdp):
        return {}
    return {"lora_dtype": weights}


def prepare(spec: ModelSpec, layout: ParallelSetup, build: Callable[[ModelSpec], Network]) -> Network:
    """The part of a model, unbound, that this rank runs, with as many kinds of blocks as the engine tells apart."""
    network = build(spec)
    if layout.engine == "megatron":
        from memcalc.parallel.megatron_model import megatron_model

        model = megatron_model(network, layout)
        if layout.stage is not None:
            model.keep(layout.stage, layout.pipeline * layout.virtual)
        model.recompute(layout)
        return model
    if layout.tensor > 1:
        network = _divided(spec, layout, build, network)
    if layout.stage is not None:
        from memcalc.parallel.pipeline_stage import stage_of

        network = stage_of(network, layout)
    if layout.engine in _BUCKETS:
        from memcalc.parallel.wrapping import stacks

        deepest = _PREFETCHED_ONE_BY_ONE if layout.engine == "zero3" else _TRACED_ONE_BY_ONE
        for stack in stacks(network):
            if stack.depth <= deepest:
                stack.split(range(stack.depth))
    return network


def _divided(spec: ModelSpec, layout: ParallelSetup, build: Callable[[ModelSpec], Network], whole: Network) -> Network:
    """One tensor-parallel rank's share of a model. Raises UsageError where heads or widths do not divide."""
    from memcalc.parallel.tensor_parallel import check_divided, tensor_parallel, unknown_division

    kin, size = family(spec.model_type), layout.tensor
    config = Config(spec.config, kin.defaults, kin.aliases)
    kv_heads = config.integer("num_key_value_heads", config.integer("num_attention_heads", 1))
    if kv_heads % size:
        raise UsageError(
            f"--tensor-parallel-size {size} does not divide the {kv_heads} key-value heads, which training needs; take "
            "a size that does."
        )
    local, _ = tensor_parallel(config, size, padded=False, experts=layout.expert == 1)
    try:
        network = build(replace(spec, config=local))
    except ConfigError:
        raise unknown_division(size, "attention") from None
    if layout.expert == 1:
        check_divided(whole, network, size)
    return network


def bind(  # noqa: PLR0913 (what an engine is put around)
    tape: Tape,
    trained: Module,
    network: Network,
    layout: ParallelSetup,
    precision_name: str,
    *,
    accumulates: bool,
    words: int = 0,
    before: Engine | None = None,
) -> Engine:
    """Put the weights of `trained`, in which `network` runs, on the tape, and the engine around them.

    `words` is the vocabulary of the whole model, `before` the engine of the step before, where that is known: some
    libraries learn from it.
    """
    recipe = precision(precision_name, layout)
    if layout.tensor > 1 and layout.engine != "megatron":
        from memcalc.parallel.tensor_training import put_collectives

        if layout.sequence:
            from memcalc.parallel.sequence_parallel import put_sequence_collectives

            put_sequence_collectives(network, layout.tensor, words, loss_parallel=layout.loss_parallel)
            tape.shards_logits = layout.loss_parallel
        else:
            put_collectives(network, layout.tensor, words)
    in_leaves = accumulates and layout.engine in ("none", "ddp", "zero1")
    tensors = trained.bind(tape, recipe.weights, accumulated=in_leaves)
    inside = PRECISIONS[precision_name].autocast or (recipe.weights if recipe.weights is not FP32 else None)
    job = Job(network, tensors, layout, recipe.compute, accumulates, words, inside)
    engine = _class_of(layout.engine)(job)
    engine.learn(before)
    tape.casts_outlast_step = layout.pipeline > 1
    tape.casts_precede = tape.casts_outlast_step and accumulates
    engine.attach(tape)
    (tape.after_backward if engine.reduces_afterwards else tape.final_callbacks).append(engine.backward_over)
    return engine
