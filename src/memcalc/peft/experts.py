"""LoRA on weights that belong to no linear layer: the stacked experts of a mixture, and its router.

Source: ParamWrapper in peft/tuners/lora/layer.py of PEFT 0.21. While the wrapped module runs, its weight is replaced by
the sum of weight and adapter, a tensor as large as the whole stack, which is also made once for a check.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from memcalc import ops
from memcalc.autograd.tensor import Tensor
from memcalc.nn.module import Module, Parameter
from memcalc.peft.lora import GROUP, factor
from memcalc.tables.dtypes import DType


class AdaptedWeight(Module):
    """A module with an adapter of `rank` on its parameter `attribute`: [out, in], or a stack [experts, out, in].

    `base_layer` may be such a wrapper itself, of another parameter of the same module.
    """

    def __init__(self, base: Module, attribute: str, rank: int, dtype: DType, *, transposed: bool = False) -> None:
        self.base_layer = base
        self.copies = base.copies
        self.attribute = attribute
        self.transposed = transposed
        *stack, outputs, inputs = getattr(self._wrapped(), attribute).shape
        if transposed:
            outputs, inputs = inputs, outputs
        self.count = stack[0] if stack else 1
        self.lora_A = factor(inputs, rank * self.count, dtype, base.copies)
        self.lora_B = factor(rank * self.count, outputs, dtype, base.copies)

    def _wrapped(self) -> Module:
        module = self.base_layer
        while isinstance(module, AdaptedWeight):
            module = module.base_layer
        return module

    def __call__(self, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Run the module with its adapted weight."""
        module = self._wrapped()
        weight: Parameter = getattr(module, self.attribute)
        with x.tape.scoped(GROUP):
            adapted = self._stacked(weight) if self.count > 1 else self._plain(weight)
            adapted()  # the check
        with _replaced(module, self.attribute, adapted):
            return self.base_layer(x, *args, **kwargs)

    def _plain(self, weight: Parameter) -> Callable[[], Tensor]:
        delta = ops.mul_scalar(ops.matmul(self.lora_B.weight, self.lora_A.weight))
        delta = ops.to(delta, weight.dtype)
        return lambda: ops.add(weight, delta)

    def _stacked(self, weight: Parameter) -> Callable[[], Tensor]:
        first = ops.reshape(self.lora_A.weight, self.count, -1, self.lora_A.weight.shape[1])
        second = ops.permute(ops.reshape(self.lora_B.weight, self.lora_B.weight.shape[0], -1, self.count), 2, 0, 1)
        if self.transposed:
            first, second = ops.transpose(second, 1, 2), ops.transpose(first, 1, 2)
        left, right = ops.to(second, weight.dtype), ops.to(first, weight.dtype)
        del first, second

        def folded() -> Tensor:
            tape = weight.tape
            before, tape.autocast = tape.autocast, None
            try:
                return ops.baddbmm(weight, left, right, scaled=True)
            finally:
                tape.autocast = before

        return folded


@contextmanager
def _replaced(module: Module, attribute: str, adapted: Callable[[], Tensor]) -> Iterator[None]:
    """Let `module.attribute` be what `adapted` makes, once it is asked for; then put everything back in its order."""
    before = dict(vars(module))
    made = module.__dict__.setdefault("_adapted", {})
    made[attribute] = adapted
    del module.__dict__[attribute]
    try:
        yield
    finally:
        made.pop(attribute, None)
        vars(module).clear()
        vars(module).update(before)
