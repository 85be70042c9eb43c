"""What one GPU of a serving engine holds: shares of layers, stages of blocks, copies of the engine, and its experts.

Sources: vLLM 0.11, vllm/distributed/utils.py (`get_pp_indices`), vllm/model_executor/layers/fused_moe (the ranks of
data parallel copies divide experts too; `determine_expert_map`); SGLang 0.5, python/sglang/srt/distributed/utils.py and
server arguments (`--enable-dp-attention`, `--ep-size`). Read, not measured: no public log of such a run says enough.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from memcalc.autograd.tape import TEMPORARY
from memcalc.autograd.tensor import Tensor, contiguous_stride
from memcalc.errors import UsageError
from memcalc.models.common.causal_lm import CausalLM, DecoderModel
from memcalc.nn.layers.mixture_of_experts import ExpertWeights
from memcalc.nn.model import Network
from memcalc.nn.module import Module
from memcalc.nn.run_context import run_context
from memcalc.parallel.pipeline_stage import Identity
from memcalc.setup.setup import InferenceSetup


@dataclass(frozen=True)
class ServingLayout:
    """Sizes of an engine's axes, and what they divide.

    attention: GPUs that share a layer's attention; with data parallel attention fewer than `tensor`.
    expert_ranks, expert_width: over how many GPUs whole experts are spread, and how many share one expert.
    """

    tensor: int = 1
    pipeline: int = 1
    data: int = 1
    attention: int = 1
    expert_ranks: int = 1
    expert_width: int = 1

    @property
    def gpus(self) -> int:
        """GPUs of all copies."""
        inside = self.tensor * self.pipeline
        return inside if self.attention != self.tensor else inside * self.data


ONE_GPU = ServingLayout()


def serving_layout(setup: InferenceSetup, network: Network) -> ServingLayout:
    """The layout that a setup asks for of a model. Raises UsageError, in one sentence, where there is none."""
    for sentence in _refused(setup, network):
        raise UsageError(sentence)
    tensor, data = setup.tensor_parallel_size, setup.data_parallel_size or 1
    if setup.engine == "sglang":
        ranks = setup.expert_parallel_size
        attention = tensor // data if setup.enable_dp_attention else tensor
        ranks, width = (ranks, tensor // ranks) if has_experts(network) else (1, 1)
        return ServingLayout(tensor, setup.pipeline_parallel_size, data, attention, ranks, width)
    shared = tensor * data if has_experts(network) else 1
    spread = setup.enable_expert_parallel or setup.expert_parallel_size > 1
    ranks, width = (shared, 1) if spread else (1, shared)
    return ServingLayout(tensor, setup.pipeline_parallel_size, data, tensor, ranks, width)


def has_experts(network: Network) -> bool:
    """Whether a model is a mixture."""
    return any(isinstance(module, ExpertWeights) for _, module in network.modules())


def _refused(setup: InferenceSetup, network: Network) -> Iterator[str]:
    tensor, data, ranks = setup.tensor_parallel_size, setup.data_parallel_size or 1, setup.expert_parallel_size
    if setup.enable_dp_attention and tensor % data:
        yield (
            f"--enable-dp-attention divides the {tensor} GPUs of --tensor-parallel-size into {data} groups, which does "
            "not work out; change --data-parallel-size."
        )
    if not has_experts(network):
        return
    if setup.engine == "vllm" and ranks > 1 and ranks != tensor * data:
        yield (
            f"vLLM spreads experts over all {tensor * data} GPUs of --tensor-parallel-size and --data-parallel-size, "
            f"not over {ranks}; leave out --expert-parallel-size, or use --enable-expert-parallel."
        )
    if setup.engine == "sglang" and tensor % ranks:
        yield (
            f"--expert-parallel-size {ranks} does not divide the {tensor} GPUs of --tensor-parallel-size; take a size "
            "that does."
        )
    count = next((module.count for _, module in network.modules() if isinstance(module, ExpertWeights)), ranks)
    if setup.engine == "sglang" and count % ranks:
        yield (f"--expert-parallel-size {ranks} does not divide the {count} experts of a layer; take a size that does.")


def share_experts(network: Network, whole: Network, layout: ServingLayout) -> None:
    """Leave the GPU with most of them its experts of every layer, and its columns of each, unbound.

    Raises UsageError where a width does not divide.
    """
    modules = zip(_experts(network), _experts(whole), strict=True)
    for module, complete in modules:
        module.count = -(-complete.count // layout.expert_ranks)
        for name, parameter in module.direct_tensors():
            shape = list(vars(complete)[name].shape)
            shape[0] = module.count
            dim = _width_dim(name, module.transposed)
            if dim is not None:
                if shape[dim] % layout.expert_width:
                    raise UsageError(
                        f"experts of width {shape[dim]} do not divide over {layout.expert_width} GPUs; use "
                        "--enable-expert-parallel, or other sizes."
                    )
                shape[dim] //= layout.expert_width
            parameter.shape = tuple(shape)
            parameter.stride = contiguous_stride(parameter.shape)


def _experts(network: Network) -> list[ExpertWeights]:
    return [module for _, module in network.modules() if isinstance(module, ExpertWeights)]


def _width_dim(name: str, transposed: bool) -> int | None:
    """Which dimension of an expert's tensor is its own width; None for a bias of the hidden size."""
    if name == "up_proj":
        return 2 if transposed else 1
    if name == "down_proj":
        return 1 if transposed else 2
    return 1 if name == "up_proj_bias" else None


def stage_blocks(depth: int, stages: int, index: int) -> range:
    """The blocks of a stage: evenly many, and the rest one each from the last but one backwards."""
    each, rest = divmod(depth, stages)
    sizes = [each + (stages - 1 - rest <= stage < stages - 1) for stage in range(stages)]
    start = sum(sizes[:index])
    return range(start, start + sizes[index])


class Received(Module):
    """Stands where another stage has the embedding: hidden states that were sent, and the residual beside them."""

    scope = "residual stream"

    def __init__(self, hidden: int) -> None:
        self.hidden = hidden

    def forward(self, ids: Tensor) -> Tensor:
        """Ids [b, s] to hidden states [b, s, h]."""
        shape, dtype = (*ids.shape, self.hidden), run_context(ids).weights_dtype
        storage = ids.tape.allocate(ids.numel * self.hidden * dtype.itemsize, TEMPORARY)
        return Tensor(shape, contiguous_stride(shape), dtype, storage)


def keep_stage(network: Network, stages: int, index: int) -> None:
    """Leave a decoder, unbound, the blocks of one stage, with the embedding on the first and the head on the last.

    Raises UsageError where the model is no plain decoder, or has fewer blocks than there are stages.
    """
    if not (isinstance(network, CausalLM) and isinstance(network.model, DecoderModel)):
        raise UsageError(
            "--pipeline-parallel-size cuts a decoder with one stack of blocks into stages, which this model is not; "
            "leave it out."
        )
    model = network.model
    depth = model.layers.depth
    if stages > depth:
        raise UsageError(
            f"--pipeline-parallel-size makes {stages} stages of {depth} blocks; take no more stages than blocks."
        )
    width = next(p.shape[-1] for _, p in model.embed_tokens.parameters())
    model.layers.keep(stage_blocks(depth, stages, index))
    if index:
        model.embed_tokens = Received(width)
    if index < stages - 1:
        model.norm = Identity()
        vars(network)["lm_head"] = Identity()
        network.logit_transforms, network.cast_to_head_dtype = (), False
