"""The hooks that ZeRO stage 3 puts around every module, so that its weights are there when it runs.

Source: deepspeed/runtime/zero/parameter_offload.py of DeepSpeed 0.19.6.
"""

from __future__ import annotations

from typing import Any

from memcalc.autograd.graph import Grads, Node, record
from memcalc.autograd.tensor import Tensor
from memcalc.nn.model import Outputs
from memcalc.parallel.engine import replaced, tensors_of
from memcalc.parallel.zero3_coordinator import Coordinator
from memcalc.parallel.zero3_shards import Sharded


class Submodule:
    """A module with the weights that it has itself, if any, and the hooks around it."""

    def __init__(self, coordinator: Coordinator, name: str, params: tuple[Sharded, ...]) -> None:
        self.coordinator = coordinator
        self.name = name
        self.params = params
        self.waiting = 0
        """Gradients of inputs that backward still has to bring (`ds_grads_remaining`)."""

    def __call__(self, module: Any, *args: Any, **kwargs: Any) -> Any:
        """Fetch the weights, run the module, release them; what passes in and out leads to the hooks of backward."""
        coordinator = self.coordinator
        if not self.name:
            coordinator.begin()
        coordinator.fetch(self, self.params)
        passed = self._passed(args, self._post_backward)
        self.waiting = sum(x.node is not None for x in tensors_of(passed))
        out = module.call(*passed, **kwargs)
        del passed
        coordinator.release(self, self.params, self.params)
        coordinator.runs = coordinator.runs and bool(self.name)
        return self._passed(out, self._pre_backward)

    def _passed(self, value: Any, backward: Any) -> Any:
        """Tensors that need a gradient, each behind a node whose backward runs a hook."""

        def behind(x: Tensor) -> Tensor:
            view = Tensor(x.shape, x.stride, x.dtype, x.storage, is_view=True)
            record(self.coordinator.tape, view, backward, (x,))
            return view

        if isinstance(value, Outputs):
            value.replace(lambda x: x if x.node is None else behind(x))
            return value
        return replaced(value, {id(x): behind(x) for x in tensors_of(value) if x.node is not None})

    def _pre_backward(self, node: Node, grads: Grads) -> list[Tensor | None]:
        self.coordinator.fetch(self, self.params, backward=True)
        return list(grads)

    def _post_backward(self, node: Node, grads: Grads) -> list[Tensor | None]:
        self.waiting -= 1
        if self.waiting == 0:
            self.coordinator.release(self, self.params, self.params, backward=True)
        return list(grads)
