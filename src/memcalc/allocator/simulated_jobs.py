"""For which jobs PyTorch's allocator is simulated, and why not for others."""

from __future__ import annotations

from typing import TYPE_CHECKING

from memcalc.nn import parameter_bytes
from memcalc.nn.stack import Stack
from memcalc.setup.setup import InferenceSetup, TrainingSetup
from memcalc.training.traced_step import Step

if TYPE_CHECKING:
    from memcalc.parallel.engine import Engine
    from memcalc.tables.gpus import Gpu


MOST_BLOCKS = 300
"""The simulation takes time for every block; no released model has half as many, and this many take some seconds."""


def not_simulated(step: Step, setup: TrainingSetup | InferenceSetup, gpu: Gpu | None) -> str | None:
    """Why the allocator of a job is not simulated, in words that follow "because"; None where it is."""
    if step.placement is not None:
        return "it is simulated for jobs on one GPU"
    why = _training(step, setup) if isinstance(setup, TrainingSetup) else _inference(step, setup)
    if why is not None:
        return why
    if gpu is not None and gpu.architecture.startswith("gfx"):
        return "it is simulated for NVIDIA GPUs"
    lengths = setup.lengths if isinstance(setup, TrainingSetup) else None
    if gpu is None and setup.alloc_conf is None and lengths is None:
        return "name a --gpu to have it simulated"
    if sum(module.depth for module in step.network.all_modules if isinstance(module, Stack)) > MOST_BLOCKS:
        return f"it is not simulated for more than {MOST_BLOCKS} blocks"
    return None


def _training(step: Step, setup: TrainingSetup) -> str | None:
    if step.engine is not None and (why := _several_gpus(step.engine, setup)) is not None:
        return why
    if step.network.input_kind == "latents" and (step.engine is not None or setup.textual_inversion):
        return "of denoisers it is simulated for training on one GPU, without textual inversion"
    if step.steps_in_backward:
        return "it is not simulated where the optimizer steps in backward"
    if setup.activation_offloading:
        return "it is not simulated where activations are offloaded"
    return None


def _several_gpus(engine: Engine, setup: TrainingSetup) -> str | None:
    layout = engine.layout
    if layout.gpus == 1 and layout.accelerate and layout.engine == "none":
        return "of loops on one GPU it is simulated for --trainer plain, hf and trl"
    if layout.engine not in ("ddp", "fsdp2", "zero1", "zero2", "zero3"):
        return "of several GPUs it is simulated for DDP, FSDP2 and ZeRO"
    for size, name in ((layout.tensor, "tensor"), (layout.context, "context"), (layout.pipeline, "pipeline")):
        if size > 1:
            return f"it is not simulated for {name} parallel"
    if layout.expert > 1:
        return "it is not simulated for expert parallel"
    if setup.lengths is not None:
        return "runs of many lengths are simulated on one GPU"
    views = layout.engine == "ddp" and layout.gradient_as_bucket_view
    if setup.grad_accum > 1 and (layout.engine != "ddp" or views):
        return "it is not simulated where sharded or bucketed gradients are accumulated"
    if layout.zero.hpz_partition_size > 1:
        return "it is not simulated for ZeRO++"
    if layout.replicas > 1:
        return "it is not simulated for copies of the sharded model"
    if layout.engine != "ddp" and setup.objective != "sft":
        return "it is not simulated for models that are sharded beside the trained one"
    if layout.offload:
        return "it is not simulated where weights or states are offloaded"
    return None


def _inference(step: Step, setup: InferenceSetup) -> str | None:
    from memcalc.nn.quantized_layers import QuantizedLinear  # training does not pay for it

    if step.components or step.phases[-1] not in ("prefill", "decode"):
        return "it is not simulated for diffusion pipelines"
    if setup.engine != "transformers":
        return "it is simulated for --engine transformers"
    if setup.tensor_parallel_size > 1:
        return "it is simulated for jobs on one GPU"
    if step.extra_weights:
        return "it is not simulated beside other models' weights"
    if setup.num_beams > 1:
        return "it is not simulated for beam search"
    if setup.prefill_chunk_size is not None:
        return "it is not simulated for a prompt in chunks"
    if setup.kv_dtype not in ("auto", "fp32", "bf16", "fp16"):
        return "it is not simulated for a quantized cache"
    counted = None if step.weights is None else sum(step.weights.values())
    if counted not in (None, parameter_bytes.total(tensor for _, tensor in step.tensors)):
        return "weights are counted as their files hold them"
    if any(isinstance(m, QuantizedLinear) and m.form.kernel.startswith("bnb") for m in step.network.all_modules):
        return "it is not simulated for weights that bitsandbytes quantizes while they are loaded"
    return None
