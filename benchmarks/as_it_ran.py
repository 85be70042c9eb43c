"""What older libraries and LitGPT's own modules keep, where it is not what today's PyTorch and Transformers keep.

memcalc describes today's libraries. A row of `tests/data/published/` that says what it `ran` is computed a second time
with these parts in place of memcalc's own, on the same tape and by the same rules, so that the distance to the
libraries of its time is told apart from memcalc's errors. Each part states a fact of
a source; none has a number to choose.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

from memcalc import ops
from memcalc.autograd.graph import Backward, Grads, Node, record
from memcalc.autograd.tensor import Tensor
from memcalc.common.sizes import Shape
from memcalc.inference import weights as loaded_weights
from memcalc.models.common import lm_losses
from memcalc.models.common.lm_losses import Head, LanguageLoss
from memcalc.nn import quantized_layers
from memcalc.nn.module import Module
from memcalc.nn.state_dict import NamedWeight
from memcalc.ops import quantized, reduction
from memcalc.peft import injection
from memcalc.peft.lora import GROUP, LoraLinear, factor
from memcalc.tables.dtypes import FP16, FP32, DType
from memcalc.tables.weight_formats import WeightFormat
from memcalc.training import step


@contextmanager
def as_it_ran(parts: list[str]) -> Iterator[None]:
    """Replace memcalc's parts by those of these names while the context lasts."""
    with ExitStack() as stack:
        for name in parts:
            for replacement in PARTS[name]():
                stack.enter_context(replacement)
        step._trace.cache_clear()
        try:
            yield
        finally:
            step._trace.cache_clear()


# -- PyTorch before 1.11: derivatives.yaml gave softmax's backward its input too, which is in fp32 under autocast


def _torch_before_1_11() -> list[AbstractContextManager[Any]]:
    today = reduction._softmax

    def softmax(x: Tensor, dtype: DType | None, backward: Backward) -> Tensor:
        if dtype is None and x.tape.autocast is not None and x.dtype.floating:
            dtype = FP32
        if dtype is not None and not (x.dtype is FP16 and dtype is FP32):
            x = ops.to(x, dtype)
        out = today(x, dtype, backward)
        if out.node is not None:
            out.node.save(x)
        return out

    return [patch.object(reduction, "_softmax", softmax)]


# -- bitsandbytes 0.41: autograd/_functions.py, nn/modules.py


def _bitsandbytes_0_41() -> list[AbstractContextManager[Any]]:
    """MatMul4Bit keeps its input, though the backward pass of a frozen weight does not read it.

    Params4bit.cuda() makes a weight fp16 before it is quantized, so that is what it is dequantized to, in forward and
    in backward; a bf16 model casts it once more.
    """
    today = quantized.linear_4bit

    def linear(x: Tensor, shape: Shape, stored: DType, *, nested: bool) -> Tensor:
        both = [x.tape.empty(shape, dtype) for dtype in dict.fromkeys((FP16, x.dtype))]
        both.clear()
        out = today(x, shape, FP16, nested=nested)
        if out.node is not None:
            out.node.save(x)
        return out

    return [patch.object(quantized, "linear_4bit", linear)]


# -- LitGPT of October 2023: lit_gpt/lora.py, lit_gpt/utils.py, finetune/lora.py, and Fabric around the model


class QueryValueAdapter(LoraLinear):
    """LoRA on query and value of one fused projection: two A in one, a grouped convolution as B, and zeros for the key.

    The result goes to its places with `index_copy`, which keeps what it copies for backward.
    """

    def __init__(self, base: Module, inputs: int, outputs: int, rank: int, *, dtype: DType, dropout: float, **_: Any):
        super().__init__(base, inputs, outputs, rank, dtype=dtype, dropout=dropout)
        self.outputs = outputs
        self.adapted = outputs * 2 // 3
        self.lora_A = factor(inputs, 2 * rank, dtype, base.copies)
        self.lora_B = factor(rank, self.adapted, dtype, base.copies)

    def forward(self, x: Tensor) -> Tensor:
        """[b, s, in] to [b, s, out]."""
        out = self.base_layer(x)
        with x.tape.scoped(GROUP):
            channels = ops.contiguous(ops.transpose(self.lora_A(ops.dropout(x, self.dropout)), -2, -1))
            added = _convolved(channels, self.lora_B.weight, self.adapted)
            del channels
            return ops.add(out, ops.mul_scalar(_placed(added, self.outputs)))


def _convolved(x: Tensor, weight: Tensor, outputs: int) -> Tensor:
    """A convolution of width one over x [b, c, s], in the layout of [b, s, out]; it keeps both operands."""
    out = x.tape.empty((x.shape[0], x.shape[2], outputs), x.dtype)
    node = record(x.tape, out, _like, (x, weight), (x.shape, weight.shape))
    if node is not None:
        node.save(x)
        node.save(weight)
    return out


def _placed(x: Tensor, outputs: int) -> Tensor:
    """x [b, s, part] at its places among `outputs` zeros (index_copy): keeps a copy of x."""
    source = x.tape.empty(x.shape, x.dtype)
    zeros = x.tape.empty((*x.shape[:-1], outputs), x.dtype)
    out = x.tape.empty((*x.shape[:-1], outputs), x.dtype)
    del zeros
    node = record(x.tape, out, _like, (x,), (x.shape,))
    if node is not None:
        node.save(source)
    return out


def _like(node: Node, grads: Grads) -> list[Tensor | None]:
    """A gradient of each shape in the node's context."""
    (grad,) = grads
    return [None if grad is None else node.tape.empty(shape, grad.dtype) for shape in node.context]


def _loss_of_pieces(
    self: LanguageLoss, head: Module, logits_of: Head, hidden: Tensor, labels: Tensor
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """The head on pieces of tokens, and the loss of each; Fabric hands the model's outputs on in fp32."""
    pieces = [logits_of(piece) for piece in lm_losses._pieces(hidden, self.chunks)]
    pieces = [ops.to(piece, FP32) for piece in pieces]
    total = None
    for piece, target in zip(pieces, lm_losses._following(labels, self.chunks), strict=True):
        loss = ops.cross_entropy(ops.reshape(piece, -1, piece.shape[-1]), ops.reshape(target, -1))
        total = loss if total is None else ops.add(total, loss)
        del loss
    assert total is not None
    return ops.mul_scalar(total), tuple(pieces)


def _litgpt() -> list[AbstractContextManager[Any]]:
    """The adapters and the loss. Its quantization replaces every linear layer, the head too."""
    today = loaded_weights._is_quantized

    def is_quantized(weight: NamedWeight, form: WeightFormat) -> bool:
        return today(weight, form) or (weight.parameter.group == "LM head" and len(weight.parameter.shape) == 2)

    return [
        patch.object(loaded_weights, "_is_quantized", is_quantized),
        patch.object(injection, "LoraLinear", QueryValueAdapter),
        patch.object(quantized_layers, "output_head", lambda found: None),
        patch.object(LanguageLoss, "__call__", _loss_of_pieces),
    ]


PARTS: dict[str, Callable[[], list[AbstractContextManager[Any]]]] = {
    "torch < 1.11": _torch_before_1_11,
    "bitsandbytes 0.41": _bitsandbytes_0_41,
    "LitGPT": _litgpt,
}
"""Parts by the name that rows use."""
