"""Linear layers and embeddings: the weights that a checkpoint holds most of."""

from __future__ import annotations

from memcalc import ops
from memcalc.autograd.tensor import Tensor
from memcalc.errors import TooLongError
from memcalc.nn.module import Buffer, Module, Parameter
from memcalc.nn.run_context import run_context
from memcalc.tables.dtypes import DType


class Linear(Module):
    """y = x W^T + b, with W of shape [out, in] (torch.nn.Linear)."""

    def __init__(self, inputs: int, outputs: int, *, bias: bool = False, group: str = "other") -> None:
        self.weight = Parameter(outputs, inputs, group=group)
        self.bias = Parameter(outputs, group=group) if bias else None

    @property
    def inputs(self) -> int:
        """Width of the input."""
        return self.weight.shape[1]

    @property
    def outputs(self) -> int:
        """Width of the output."""
        return self.weight.shape[0]

    float8 = False
    """Whether torchao's float8 layer takes its place."""

    def forward(self, x: Tensor) -> Tensor:
        """[..., in] to [..., out]."""
        if self.float8:
            return ops.linear_float8(x, self.weight, self.bias)
        return ops.linear(x, self.weight, self.bias)


class Conv1D(Module):
    """GPT-2's linear layer: y = x W + b over flattened rows, with W of shape [in, out]."""

    def __init__(self, inputs: int, outputs: int, *, group: str = "other") -> None:
        self.weight = Parameter(inputs, outputs, group=group)
        self.bias = Parameter(outputs, group=group)

    def forward(self, x: Tensor) -> Tensor:
        """[..., in] to [..., out]."""
        flat = ops.view(x, -1, x.shape[-1])
        if x.tape.autocast is None:
            out = ops.addmm(self.bias, flat, self.weight)
        else:
            weight = ops.cached_cast(self.weight)
            flat = ops.cached_cast(flat)
            out = ops.addmm(ops.cached_cast(self.bias), flat, weight)
        return ops.view(out, *x.shape[:-1], self.weight.shape[1])


class Embedding(Module):
    """A table of `count` vectors of `width` (torch.nn.Embedding)."""

    scope = "embedding"

    def __init__(self, count: int, width: int, *, group: str = "embedding") -> None:
        self.weight = Parameter(count, width, group=group)

    def forward(self, ids: Tensor) -> Tensor:
        """Ids [...] to vectors [..., width]."""
        return ops.embedding(ids, self.weight)


class PositionTable(Embedding):
    """A table of learned positions, of which the first `offset` rows are never a token's. It cannot be outgrown."""

    def __init__(self, count: int, width: int, *, offset: int = 0) -> None:
        super().__init__(count, width)
        self.longest = count - offset

    def forward(self, ids: Tensor) -> Tensor:
        """Position ids [..., s] to vectors [..., s, width]."""
        check_length(ids, self.longest)
        return super().forward(ids)


def check_length(ids: Tensor, longest: int, option: str = "--seq-len") -> None:
    """Raise TooLongError where `ids` [..., s], after what a cache has seen, are more than `longest` tokens.

    `option` is the one that says how long they are. The token that stands for all of decoding may lie one past the end:
    what is counted is the tokens kept.
    """
    tape = ids.tape
    seen = run_context(tape).past_length
    tokens = seen if tape.phase == "decode" else seen + ids.shape[-1]
    if tokens > longest:
        raise TooLongError(
            f"the model has {longest:,} learned positions, which {tokens:,} tokens exceed; lower {option}"
            f"{' or --max-new-tokens' if tape.phase == 'decode' else ''}, or take a model made for longer sequences.",
            longest,
        )


class ScaledEmbedding(Embedding):
    """An embedding times a number that is kept as a buffer (Gemma), in the weights' dtype unless `scale_dtype` says."""

    def __init__(self, count: int, width: int, *, scale_dtype: DType | None = None) -> None:
        super().__init__(count, width)
        self.embed_scale = Buffer(dtype=scale_dtype)

    def forward(self, ids: Tensor) -> Tensor:
        """Ids [...] to vectors [..., width]."""
        return ops.mul(super().forward(ids), ops.to(self.embed_scale, self.weight.dtype))
