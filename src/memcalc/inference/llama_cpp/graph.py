"""The sizes of llama.cpp's graph, and the buffer that its scheduler reserves for it.

The buffer of intermediate results is reserved once, for a whole ubatch: the largest of what the graph's stages need
(llama-context.cpp, graph_reserve; ggml-alloc.c). The stages were read off a build of 2026 that prints its buffers, for
models of many shapes (tests/data/llama_cpp_buffers.jsonl).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod

from memcalc.autograd.tape import OVERHEAD, Tape
from memcalc.config.reader import Config
from memcalc.errors import UsageError
from memcalc.inference.engine_cache import LayerWidth, PooledCache
from memcalc.inference.served_model import ServedModel
from memcalc.models.registry import family
from memcalc.models.spec import ModelSpec
from memcalc.nn.layers.mixture_of_experts import Experts
from memcalc.nn.layers.mlp import FusedGatedMLP, GatedMLP, PlainMLP
from memcalc.nn.model import Network
from memcalc.nn.module import Module
from memcalc.nn.run_context import RunContext
from memcalc.setup.setup import InferenceSetup
from memcalc.tables.dtypes import INT64
from memcalc.tables.engines import AUTO, GGML_TYPES, CacheFormat
from memcalc.training.micro_batch import micro_batch

CELLS = 256
"""The cache has a multiple of so many cells (llama-context.cpp pads n_ctx_seq)."""

FP32 = 4
"""Bytes of an element of intermediate results."""


@dataclass(frozen=True)
class Graph:
    """The sizes that decide how large intermediate results are; elements for each token where nothing else is said."""

    ubatch: int
    cells: int
    hidden: int
    vocabulary: int
    heads: int
    query: int
    inner: int
    """What the MLP, or the experts that a token meets, holds at its own peak."""
    beside: int
    """Tensors of the hidden size beside it."""
    widths: tuple[tuple[LayerWidth, int], ...] = ()
    """Of each kind of layer what it caches, and how many such layers there are."""
    state_bytes: int = 0
    swa_full: bool = False

    @property
    def keys(self) -> int:
        """Elements of key and value of the widest layer."""
        return max((width.elements for width, _ in self.widths), default=2 * self.query)

    @property
    def window_cells(self) -> int:
        """Cells of layers with a window; 0 where there are none."""
        windows = [width.window for width, _ in self.widths if width.window is not None]
        if not windows or self.swa_full:
            return self.cells if windows else 0
        return min(self.cells, _padded(max(windows) + self.ubatch))

    def cache_bytes(self, setup: InferenceSetup) -> int:
        """Bytes of keys and values, each in its own type; layers with a window keep it and one ubatch."""
        total = 0
        keys, values = cache_types(setup)
        for width, layers in self.widths:
            capped = width.window is not None and not setup.swa_full
            cells = min(self.cells, _padded((width.window or 0) + self.ubatch)) if capped else self.cells
            elements = setup.batch * setup.num_beams * cells * layers
            total += keys.nbytes(elements * width.keys) + values.nbytes(elements * (width.elements - width.keys))
        return total

    def _masks(self, flash: bool) -> int:
        """Elements for each token of the masks, in fp32: one for all cells, one for those of windows.

        Flash attention has 16-bit copies, of which the later takes the place of the earlier's source if it fits.
        """
        masks, halves = self.cells + self.window_cells, (self.cells + self.window_cells) // 2
        if 0 < self.cells // 2 <= self.window_cells:
            halves -= self.cells // 2
        return masks + (halves if flash else 0)

    def compute(self, setup: InferenceSetup, *, head: bool, away: int, output_bytes: int) -> int:
        """Bytes of the buffer on the GPU; `away` is the largest matrix that is copied there when it is needed."""
        flash = setup.flash_attn != "off" and setup.attention != "eager"
        row = self.ubatch * FP32
        masks, projected = self._masks(flash), self.query + self.keys
        attention = masks + projected + self.hidden + (self.hidden if flash else self.heads * self.cells)
        mlp = self.inner + self.beside * self.hidden
        piece = max(1, self.inner // 3)
        freed = max(0, self.cells - 2 * self.hidden) if flash else 0  # the fp32 mask, less what has moved in
        reused = min(3, max(0, freed - 1) // piece) * piece
        logits = row * (self.vocabulary + self.hidden) + (0 if head else output_bytes)
        copied = away + row * (mlp + self.hidden) if away else 0
        return max(logits, row * attention, row * (masks + mlp - reused), copied)

    def host(self) -> int:
        """Bytes of the pinned buffer on the host: embeddings twice, and the masks."""
        return self.ubatch * FP32 * (2 * self.hidden + self.cells + self.window_cells)


def _padded(cells: int) -> int:
    return -(-cells // CELLS) * CELLS


def cache_types(setup: InferenceSetup) -> tuple[CacheFormat, CacheFormat]:
    """How keys and values are stored."""
    both = GGML_TYPES["f16"] if setup.kv_dtype == AUTO else GGML_TYPES[_SAME[setup.kv_dtype]]
    keys, values = (None if name is None else GGML_TYPES[name] for name in (setup.cache_type_k, setup.cache_type_v))
    return keys or both, values or both


_SAME = {"fp32": "f32", "bf16": "bf16", "fp16": "f16", "int8": "q8_0", "int4": "q4_0"}
"""Types of --kv-dtype under llama.cpp's names."""


def graph_of(spec: ModelSpec, setup: InferenceSetup, model: ServedModel, ubatch: int, tokens: int) -> Graph:
    """The sizes for sequences of `tokens` tokens, with what each layer of the model caches.

    Raises UsageError for a model without an embedding of tokens.
    """
    network = model.network
    tables = [p.shape for _, p in network.parameters() if p.group == "embedding" and len(p.shape) == 2]
    if not tables:
        raise UsageError(f"llama.cpp runs models with an embedding of tokens, which {spec.model_type} lacks.")
    vocabulary, hidden = max(tables, key=prod)
    config = text_config(spec)
    heads = most(config.get("num_attention_heads")) or 1
    per_head = most(config.get("head_dim")) or -(-hidden // heads)
    query = heads * per_head
    inner, beside = max((_inner(module, hidden) for module in network.all_modules), default=(0, 1))
    widths, states = _cached(network, model)
    return Graph(
        ubatch, _padded(tokens), hidden, vocabulary, heads, query, inner, beside, widths, states, setup.swa_full
    )


def most(value: object) -> int:
    """A whole number of the config, the largest where each layer has its own; 0 where there is none."""
    numbers = value if isinstance(value, list) else [value]
    return max((number for number in numbers if isinstance(number, int)), default=0)


def text_config(spec: ModelSpec) -> Config:
    """The config of the decoder: its own section, where a model has one."""
    row = family(spec.model_type)
    section = spec.config.get("text_config")
    values = section if isinstance(section, Mapping) and "num_attention_heads" not in spec.config else spec.config
    return Config(values, row.defaults, row.aliases)


def _inner(module: Module, hidden: int) -> tuple[int, int]:
    """Elements for each token that an MLP or experts hold at their peak, and tensors of the hidden size beside them."""
    if isinstance(module, GatedMLP):
        return 3 * module.gate_proj.weight.shape[0], 1
    if isinstance(module, FusedGatedMLP):
        return 3 * int(vars(module)[module.names[0]].weight.shape[0]) // 2, 1
    if isinstance(module, PlainMLP):
        return 2 * int(max(vars(module)[module.names[0]].weight.shape)), 1
    if isinstance(module, Experts):
        width = module.down_proj.numel // module.count // hidden
        return module.per_token * max(3 * width, width + hidden), 3
    return 0, 1


def _cached(network: Network, model: ServedModel) -> tuple[tuple[tuple[LayerWidth, int], ...], int]:
    """What each kind of layer caches, with their number, and bytes of the states of one sequence.

    A pass of two tokens tells; nothing of it is counted.
    """
    tape = Tape(phase="prefill")
    tape.grad_enabled = tape.dropout_enabled = False
    cache = PooledCache(absorbs_latent=True)
    tape.run = RunContext(attention=model.row.attention_used("sdpa"), training=False)
    tape.run.cache = cache
    network.bind(tape, model.dtype)
    network(micro_batch(tape.external_tensor((1, 2), INT64, OVERHEAD, "token ids"), None, InferenceSetup()))
    copies = {id(module): module.copies for _, module in network.modules()}
    states = sum(sum(sizes.values()) * copies[layer] for layer, sizes in cache.state_bytes.items())
    return tuple((width, copies[layer]) for layer, width in cache.widths.items()), states
