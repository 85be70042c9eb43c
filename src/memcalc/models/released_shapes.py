"""Shapes of models that were released, for a bare parameter count: `--like qwen3` and today's default.

Each row is what the model's config.json says; its exact count, as published, stands in the tests.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from memcalc.common.arguments import check_type
from memcalc.common.assumption import Assumption
from memcalc.common.escaping import quoted
from memcalc.config.reader import DEEPEST
from memcalc.errors import UsageError, close_matches
from memcalc.models.build import build
from memcalc.models.spec import ModelSpec

LONGEST = 10**9
"""Positions of a shape: a count says nothing about the length that the model was made for."""


@dataclass(frozen=True)
class Shape:
    """The sizes of one released model."""

    name: str
    parameters: int
    """As published; the tests count them."""
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    tied: bool = False
    model_type: str = "llama"
    more: Mapping[str, Any] = field(default_factory=dict)
    """Keys of config.json that this family has besides."""

    def config(self, layers: int | None = None) -> dict[str, Any]:
        """Its config.json, with another number of blocks where one is given."""
        return {
            "model_type": self.model_type,
            "hidden_size": self.hidden_size,
            "num_hidden_layers": layers or self.num_hidden_layers,
            "num_attention_heads": self.num_attention_heads,
            "num_key_value_heads": self.num_key_value_heads,
            "head_dim": self.head_dim,
            "intermediate_size": self.intermediate_size,
            "vocab_size": self.vocab_size,
            "tie_word_embeddings": self.tied,
            "max_position_embeddings": LONGEST,
            **self.more,
        }

    def counted(self, layers: int | None = None) -> int:
        """Parameters, read off the model, with another number of blocks where one is given."""
        network = build(ModelSpec.from_config(self.config(layers)))
        return sum(parameter.count * parameter.copies for _, parameter in network.parameters())


def _gpt2(name: str, parameters: int, width: int, depth: int, heads: int) -> Shape:
    more = {"max_position_embeddings": 1024}
    return Shape(name, parameters, width, depth, heads, heads, width // heads, 4 * width, 50257, True, "gpt2", more)


def _mistral(name: str, parameters: int, width: int, depth: int, mlp: int, vocabulary: int) -> Shape:
    more = {"sliding_window": None}
    return Shape(name, parameters, width, depth, 32, 8, 128, mlp, vocabulary, False, "mistral", more)


def _gemma3(
    name: str, parameters: int, sizes: tuple[int, int, int, int, int, int], vocabulary: int, window: int
) -> Shape:
    more = {"sliding_window": window}
    return Shape(name, parameters, *sizes, vocabulary, True, "gemma3_text", more)


_LLAMA_2 = (
    Shape("Llama-2-7B", 6_738_415_616, 4096, 32, 32, 32, 128, 11008, 32000),
    Shape("Llama-2-13B", 13_015_864_320, 5120, 40, 40, 40, 128, 13824, 32000),
    Shape("Llama-2-70B", 68_976_648_192, 8192, 80, 64, 8, 128, 28672, 32000),
)
_LLAMA_3 = (
    Shape("Llama-3.2-1B", 1_235_814_400, 2048, 16, 32, 8, 64, 8192, 128256, True),
    Shape("Llama-3.2-3B", 3_212_749_824, 3072, 28, 24, 8, 128, 8192, 128256, True),
    Shape("Llama-3.1-8B", 8_030_261_248, 4096, 32, 32, 8, 128, 14336, 128256),
    Shape("Llama-3.1-70B", 70_553_706_496, 8192, 80, 64, 8, 128, 28672, 128256),
    Shape("Llama-3.1-405B", 405_853_388_800, 16384, 126, 128, 8, 128, 53248, 128256),
)
_MISTRAL = (
    _mistral("Mistral-7B", 7_248_023_552, 4096, 32, 14336, 32768),
    _mistral("Mistral-Nemo-12B", 12_247_782_400, 5120, 40, 14336, 131072),
    _mistral("Mistral-Small-24B", 23_572_403_200, 5120, 40, 32768, 131072),
)
_SMOLLM2 = (
    Shape("SmolLM2-135M", 134_515_008, 576, 30, 9, 3, 64, 1536, 49152, True),
    Shape("SmolLM2-360M", 361_821_120, 960, 32, 15, 5, 64, 2560, 49152, True),
    Shape("SmolLM2-1.7B", 1_711_376_384, 2048, 24, 32, 32, 64, 8192, 49152, True),
)
_QWEN2 = (
    Shape("Qwen2.5-0.5B", 494_032_768, 896, 24, 14, 2, 64, 4864, 151936, True, "qwen2"),
    Shape("Qwen2.5-1.5B", 1_543_714_304, 1536, 28, 12, 2, 128, 8960, 151936, True, "qwen2"),
    Shape("Qwen2.5-3B", 3_085_938_688, 2048, 36, 16, 2, 128, 11008, 151936, True, "qwen2"),
    Shape("Qwen2.5-7B", 7_615_616_512, 3584, 28, 28, 4, 128, 18944, 152064, False, "qwen2"),
    Shape("Qwen2.5-14B", 14_770_033_664, 5120, 48, 40, 8, 128, 13824, 152064, False, "qwen2"),
    Shape("Qwen2.5-32B", 32_763_876_352, 5120, 64, 40, 8, 128, 27648, 152064, False, "qwen2"),
    Shape("Qwen2.5-72B", 72_706_203_648, 8192, 80, 64, 8, 128, 29568, 152064, False, "qwen2"),
)
_QWEN3 = (
    Shape("Qwen3-0.6B", 596_049_920, 1024, 28, 16, 8, 128, 3072, 151936, True, "qwen3"),
    Shape("Qwen3-1.7B", 1_720_574_976, 2048, 28, 16, 8, 128, 6144, 151936, True, "qwen3"),
    Shape("Qwen3-4B", 4_022_468_096, 2560, 36, 32, 8, 128, 9728, 151936, True, "qwen3"),
    Shape("Qwen3-8B", 8_190_735_360, 4096, 36, 32, 8, 128, 12288, 151936, False, "qwen3"),
    Shape("Qwen3-14B", 14_768_307_200, 5120, 40, 40, 8, 128, 17408, 151936, False, "qwen3"),
    Shape("Qwen3-32B", 32_762_123_264, 5120, 64, 64, 8, 128, 25600, 151936, False, "qwen3"),
)
_GEMMA_3 = (
    _gemma3("Gemma-3-270M", 268_098_176, (640, 18, 4, 1, 256, 2048), 262144, 512),
    _gemma3("Gemma-3-1B", 999_885_952, (1152, 26, 4, 1, 256, 6912), 262144, 512),
    _gemma3("Gemma-3-4B", 3_880_263_168, (2560, 34, 8, 4, 256, 10240), 262208, 1024),
    _gemma3("Gemma-3-12B", 11_766_034_176, (3840, 48, 16, 8, 256, 15360), 262208, 1024),
    _gemma3("Gemma-3-27B", 27_009_346_304, (5376, 62, 32, 16, 128, 21504), 262208, 1024),
)

SHAPES: Mapping[str, tuple[Shape, ...]] = {
    "llama-2": _LLAMA_2,
    "llama-3": _LLAMA_3,
    "mistral": _MISTRAL,
    "qwen2.5": _QWEN2,
    "qwen3": _QWEN3,
    "gemma-3": _GEMMA_3,
    "smollm2": _SMOLLM2,
    "gpt-2": (
        _gpt2("GPT-2", 124_439_808, 768, 12, 12),
        _gpt2("GPT-2-medium", 354_823_168, 1024, 24, 16),
        _gpt2("GPT-2-large", 774_030_080, 1280, 36, 20),
        _gpt2("GPT-2-XL", 1_557_611_200, 1600, 48, 25),
    ),
}
"""Values of `--like`, the smallest model first."""

TODAY = (*_SMOLLM2[:2], *_LLAMA_3[:3], *_MISTRAL[1:], *_LLAMA_3[3:])
"""What models of a size look like today: grouped-query attention, vocabularies of 49,152 to 131,072."""

_NEAR = 0.03
"""A count this near to a released model's is that model: names are rounded."""


def spec_like(parameters: int, like: str | None) -> tuple[ModelSpec, list[Assumption]]:
    """A model of about `parameters` parameters, as wide as the released one that is nearest in size.

    Its number of blocks is the one that comes nearest to the count. The second value is what this takes for granted.

    Args:
        parameters: how many, of all weights.
        like: a key of `SHAPES`; None for what models of that size look like today.

    Raises:
        UsageError: `like` is not known, or no model of that kind has so few or so many parameters.
    """
    check_type("--like", like, (str, type(None)), "the name of a family")
    if like is not None and like not in SHAPES:
        near = close_matches(like, SHAPES) or f": choose from {', '.join(SHAPES)}."
        raise UsageError(f"--like cannot be {quoted(like)}{near}")
    shapes = TODAY if like is None else SHAPES[like]
    shape = min(shapes, key=lambda shape: max(shape.parameters / parameters, parameters / shape.parameters))
    exact, depth = shape.parameters, shape.num_hidden_layers
    if abs(parameters - exact) > _NEAR * exact:
        block = (exact - shape.counted(1)) // (depth - 1)
        depth = max(1, depth + round((parameters - exact) / block))
        if depth > DEEPEST:
            raise UsageError(f"{parameters:,} parameters would take {depth:,} blocks as wide as {shape.name}'s.")
        exact = shape.counted(depth)
    if not parameters <= 2 * exact <= 4 * parameters:
        raise UsageError(
            f"no model like {shape.name} has {parameters:,} parameters: its smallest has {exact:,}; name another with "
            "--like, or give the shape with --hidden-size, --num-layers and --vocab-size."
        )
    spec = ModelSpec.from_config(shape.config(depth), f"{shape.name}-like")
    blocks = (
        f"{depth} blocks" if depth == shape.num_hidden_layers else f"{depth} blocks (it has {shape.num_hidden_layers})"
    )
    said = (
        f"shape: that of {shape.name} (--like): hidden size {shape.hidden_size}, {blocks}, "
        f"{shape.num_attention_heads} heads ({shape.num_key_value_heads} key-value) of {shape.head_dim}, MLP "
        f"{shape.intermediate_size}, vocabulary {shape.vocab_size}"
        f"{', tied' if shape.tied else ''}: {exact:,} parameters"
    )
    return spec, [Assumption("model_shape", said)]
