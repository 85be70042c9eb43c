"""What llama.cpp allocates: weights and caches by layer on the GPU or the host, and the buffer its scheduler reserves.

Nothing is allocated while it runs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from memcalc.common.assumption import Assumption
from memcalc.errors import UsageError
from memcalc.inference.engine_options import idle_llama_cpp_options
from memcalc.inference.llama_cpp.graph import graph_of, most, text_config
from memcalc.inference.llama_cpp.placed_weights import Placement
from memcalc.inference.served_model import ServedModel
from memcalc.models.spec import ModelSpec
from memcalc.parallel.serving_layout import has_experts
from memcalc.setup.setup import InferenceSetup
from memcalc.units import format_bytes

OFFLOADED_FROM = 32
"""Tokens of a ubatch from which a multiplication with weights of the host is done on the GPU (op offload)."""


@dataclass(frozen=True)
class Buffers:
    """Bytes of what llama.cpp allocates, on the GPU and on the host."""

    weights: Mapping[str, int]
    host_weights: int
    cache: int
    states: int
    host_cache: int
    host_states: int
    compute: int
    host_compute: int
    idle: tuple[Assumption, ...] = ()
    """Options that change nothing for the model."""

    def notes(self, setup: InferenceSetup) -> list[Assumption]:
        """What lies in host memory, and what decides the compute buffer."""
        host = f"host memory: {format_bytes(self.host_weights)} of weights, the token embedding among them"
        if self.host_cache + self.host_states:
            host += f", {format_bytes(self.host_cache + self.host_states)} of the cache"
        lines = [
            Assumption("llama_cpp_host", f"{host}, and {format_bytes(self.host_compute)} of buffers (--n-gpu-layers)"),
            Assumption(
                "llama_cpp_compute_buffer",
                f"compute buffer {format_bytes(self.compute)}, reserved for the logits of a whole ubatch; a server "
                "that asks for fewer outputs reserves less (--ubatch-size)",
            ),
        ]
        if setup.n_gpu_layers is None:
            lines.append(Assumption("n_gpu_layers", "all layers are on the GPU (--n-gpu-layers)"))
        if setup.flash_attn is None:
            lines.append(Assumption("flash_attn", "flash attention on, as llama.cpp chooses (--flash-attn)"))
        return [*lines, *self.idle]


def buffers(spec: ModelSpec, setup: InferenceSetup, model: ServedModel, length: int, *, encoder: bool) -> Buffers:
    """The buffers for `setup.batch` sequences of `length` tokens and what they generate.

    Raises UsageError where the input of an encoder is longer than a ubatch.
    """
    ubatch = _ubatch(setup, length, encoder=encoder)
    graph = graph_of(spec, setup, model, ubatch, ubatch if encoder else length + setup.max_new_tokens - 1)
    if encoder:
        graph = replace(graph, vocabulary=0)  # it pools hidden states, and makes no logits
    depth = most(text_config(spec).get("num_hidden_layers")) or 1
    layers = depth + 1 if setup.n_gpu_layers is None else min(setup.n_gpu_layers, depth + 1)
    place = Placement(depth, layers, setup.n_cpu_moe or 0)
    found = place.weights(spec, model)
    cache = 0 if encoder else graph.cache_bytes(setup)
    states = 0 if encoder else graph.state_bytes * setup.batch * setup.num_beams
    on_gpu = place.layers_on_gpu / depth
    away = found.largest_on_host if ubatch >= OFFLOADED_FROM else 0
    return Buffers(
        found.here,
        found.host,
        round(cache * on_gpu),
        round(states * on_gpu),
        round(cache * (1 - on_gpu)),
        round(states * (1 - on_gpu)),
        graph.compute(setup, head=layers > 0, away=away, output_bytes=found.output),
        graph.host(),
        tuple(
            idle_llama_cpp_options(
                setup,
                cached=bool(cache),
                windowed=any(width.window is not None for width, _ in graph.widths),
                experts=has_experts(model.network),
            )
        ),
    )


def _ubatch(setup: InferenceSetup, length: int, *, encoder: bool) -> int:
    ubatch = setup.ubatch_size or setup.prefill_chunk_size or 512
    if encoder and length > ubatch:
        if setup.ubatch_size is not None:
            raise UsageError(
                f"llama.cpp reads the {length} tokens of an encoder's input in one ubatch, and --ubatch-size is "
                f"{setup.ubatch_size}; raise it, or shorten --seq-len."
            )
        return length
    return ubatch
