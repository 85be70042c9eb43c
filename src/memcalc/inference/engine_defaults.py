"""What a serving engine does where nothing was asked: the defaults of its release and GPU, and what is said of them."""

from __future__ import annotations

from dataclasses import replace

from memcalc.common.assumption import Assumption
from memcalc.setup.setup import InferenceSetup
from memcalc.tables import sglang
from memcalc.tables.engines import Engine
from memcalc.tables.gpus import Gpu


def as_released(engine: Engine, setup: InferenceSetup, gpu: Gpu | None, length: int) -> Engine:
    """vLLM with the defaults of its version for `gpu` and sequences of `length` tokens; SGLang with its own."""
    if engine.name == "sglang" and gpu is not None:
        found = sglang.defaults(gpu, setup.tensor_parallel_size)
        return replace(engine, batched_tokens=found.chunked_prefill_size, utilization=found.mem_fraction_static)
    if engine.name != "vllm":
        return engine
    from memcalc.tables import vllm

    rules = vllm.release(setup.engine_version, gpu)
    tokens = vllm.batched_tokens(rules, gpu, length + setup.max_new_tokens)
    return replace(
        engine, batched_tokens=setup.max_num_batched_tokens or tokens, utilization=rules.utilization, page=vllm.BLOCK
    )


def engine_notes(setup: InferenceSetup, engine: Engine) -> list[Assumption]:
    """What the engine takes for granted."""
    lines = list(engine.notes)
    if engine.attention is not None and "attention" in setup.model_fields_set:
        lines.append(
            Assumption(
                "attention_of_engine",
                f"--attention {setup.attention} is not used: {engine.name} has kernels of its own",
            )
        )
    if engine.attention is not None and setup.padding_mask:
        lines.append(
            Assumption(
                "padding_of_engine", f"--padding-mask is not used: {engine.name} packs sequences without padding"
            )
        )
    share = setup.gpu_memory_utilization or engine.utilization
    if share is not None:
        lines.append(
            Assumption(
                "gpu_memory_utilization",
                f"{engine.name} fills at most {share:.0%} of the GPU (--gpu-memory-utilization)",
            )
        )
    if engine.batched_tokens is not None and (setup.prefill_chunk_size, setup.max_num_batched_tokens) == (None, None):
        option = "max_num_batched_tokens" if engine.name == "vllm" else "prefill_chunk_size"
        text = f"{engine.name} prefills at most {engine.batched_tokens:,} tokens at once (--{option.replace('_', '-')})"
        lines.append(Assumption(option, text))
    return lines
