"""The pool of pages that vLLM makes: what it profiles first, and what is left of its share of the GPU."""

from __future__ import annotations

from dataclasses import dataclass

from memcalc.config.reader import Config
from memcalc.models.registry import family
from memcalc.models.spec import ModelSpec
from memcalc.nn.layers.mixture_of_experts import Experts
from memcalc.nn.layers.mlp import FusedGatedMLP, GatedMLP, PlainMLP
from memcalc.nn.layers.recurrent.gated_delta_net import GatedDeltaNet
from memcalc.nn.layers.recurrent.mamba1 import MambaMixer
from memcalc.nn.layers.recurrent.mamba2 import Mamba2Mixer
from memcalc.nn.module import Module
from memcalc.parallel.pipeline_stage import Identity
from memcalc.parallel.serving_layout import Received
from memcalc.setup.setup import InferenceSetup
from memcalc.tables import vllm
from memcalc.tables.dtypes import ALIASES
from memcalc.tables.gpus import Gpu
from memcalc.tables.overheads import workspace_of
from memcalc.training.traced_step import Step


@dataclass(frozen=True)
class Pool:
    """What vLLM's startup log says: bytes of each thing that its share of the GPU goes to, and the pool left."""

    budget: int
    weights: int
    activations: int
    non_torch: int
    graphs: int
    """CUDA graphs; taken off the budget if `graphs_in_budget`, else on top of it."""
    graphs_in_budget: bool
    profiled_tokens: int
    profiled_sequences: int

    @property
    def taken(self) -> int:
        """Bytes of the budget that are no pool."""
        return self.weights + self.activations + self.non_torch + (self.graphs if self.graphs_in_budget else 0)

    @property
    def nbytes(self) -> int:
        """Bytes of the pool ("Available KV cache memory"); negative where vLLM does not start."""
        return self.budget - self.taken


@dataclass(frozen=True)
class Served:
    """A model that vLLM serves: its traced step, bytes of its weights, and of the activations of a prompt."""

    spec: ModelSpec
    step: Step
    weights: int
    prefill: int


def kv_pool(served: Served, setup: InferenceSetup, gpu: Gpu, length: int) -> Pool:
    """The pool on `gpu` for sequences of up to `length` tokens (max_model_len)."""
    rules = vllm.release(setup.engine_version, gpu)
    tokens = setup.max_num_batched_tokens or setup.prefill_chunk_size or vllm.batched_tokens(rules, gpu, length)
    sequences = min(setup.max_num_seqs or vllm.sequences(rules, gpu), tokens)
    gpus = setup.tensor_parallel_size * setup.pipeline_parallel_size * (setup.data_parallel_size or 1)
    run = _ProfileRun(rules, tokens, sequences, setup.tensor_parallel_size)
    return Pool(
        budget=int(gpu.usable_bytes * (setup.gpu_memory_utilization or rules.utilization)),
        weights=served.weights + _rotary_table(served.spec, _itemsize(served.step)),
        activations=run.peak(served) + workspace_of(gpu).nbytes,
        non_torch=vllm.non_torch(rules, gpu, gpus),
        graphs=0 if setup.enforce_eager else vllm.CUDA_GRAPHS,
        graphs_in_budget=rules.graphs_in_budget,
        profiled_tokens=tokens,
        profiled_sequences=sequences,
    )


@dataclass(frozen=True)
class _ProfileRun:
    """A pass of `tokens` through the model, then sampling for `sequences` beside its hidden states."""

    rules: vllm.Release
    tokens: int
    sequences: int
    gpus: int

    def peak(self, served: Served) -> int:
        """Bytes of the activations at their peak; where kernels are not described here, those of Transformers too."""
        step = served.step
        tables = [p for _, p in step.parameters if p.group in ("embedding", "LM head") and len(p.shape) == 2]
        received = [module.hidden for module in step.network.all_modules if isinstance(module, Received)]
        widths = [_live(module) for module in step.network.all_modules]
        if not tables and not received:
            return served.prefill
        table = max(tables, key=lambda p: p.numel, default=None)
        hidden = received[0] if table is None else table.shape[1]
        samples = table is not None and not isinstance(vars(step.network).get("lm_head"), Identity)
        vocabulary = table.shape[0] * self.gpus if table is not None and samples else 0
        beside = self.rules.hidden_tensors + (self.rules.all_reduce_tensors if self.gpus > 1 else 0)
        forward = self.tokens * (max(widths) + beside * hidden) * _itemsize(step)
        sampler = (
            self.tokens * hidden * _itemsize(step) * samples + self.sequences * vocabulary * self.rules.sampler_bytes
        )
        return max(forward, sampler, 0 if any(widths) and not _has_other_kernels(step) else served.prefill)


def _itemsize(step: Step) -> int:
    return ALIASES[str(step.resolved()["dtype"])].itemsize


def _live(module: Module) -> int:
    """Elements for each token that a module of vLLM's holds at its own peak, besides tensors of the hidden size."""
    if isinstance(module, GatedMLP):
        return 3 * module.gate_proj.weight.shape[0]  # gate and up in one, and their product
    if isinstance(module, FusedGatedMLP):
        return 3 * int(vars(module)[module.names[0]].weight.shape[0]) // 2
    if isinstance(module, PlainMLP):
        return 2 * int(max(vars(module)[module.names[0]].weight.shape))
    if isinstance(module, Experts):
        both, hidden = module.up_proj.shape[1:][:: -1 if module.transposed else 1]
        width = module.down_proj.numel // module.count // hidden
        return module.per_token * (max(both, hidden) + width)  # both products share one buffer (fused_experts)
    return 0


def _has_other_kernels(step: Step) -> bool:
    """Whether the model has parts whose kernels in vLLM are not described here, so that Transformers' are counted."""
    if step.network.image_side(None) is not None:
        return True
    return any(isinstance(module, (MambaMixer, Mamba2Mixer, GatedDeltaNet)) for module in step.network.all_modules)


def _rotary_table(spec: ModelSpec, itemsize: int) -> int:
    """vLLM keeps cosine and sine of every position with the weights: `max_position_embeddings` x rotary dimension."""
    config = Config(spec.config, family(spec.model_type).defaults, family(spec.model_type).aliases)
    if spec.positions is None or not (config.has("rope_theta") or config.has("rope_parameters")):
        return 0
    return int(spec.positions * config.head_dim() * config.number("partial_rotary_factor", 1.0) * itemsize)
