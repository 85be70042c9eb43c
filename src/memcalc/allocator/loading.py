"""How a model comes onto the GPU: its weights and buffers in order, and what is made and dropped on the way.

Sources: torch/nn/modules/module.py (`_apply`) of PyTorch 2.14, transformers/modeling_utils.py 5.24 (`_from_config`,
`tie_weights`), peft/mapping_func.py and tuners_utils.py of PEFT 0.21.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from memcalc.allocator.events import Events
from memcalc.nn.layers.mixture_of_experts import Experts
from memcalc.nn.module import Buffer, Module, Parameter
from memcalc.nn.stack import Stack
from memcalc.peft.lora import GROUP as ADAPTERS
from memcalc.tables.dtypes import DType


def whole_bytes(tensor: Parameter) -> int:
    """Bytes of a weight or buffer."""
    return tensor.numel * tensor.dtype.itemsize


def moved(model: Module, kept_bytes: Callable[[Parameter], int] = whole_bytes) -> Events:
    """The model was loaded in host memory and moved (`model.to("cuda")`): each tensor once, what is kept of it."""
    events = Events()
    for tensor, again in every_tensor(model):
        if not again and (nbytes := kept_bytes(tensor)):
            events.malloc(nbytes)
    return events


def built(model: Module, dtype: DType) -> Events:
    """The model was built on the GPU from its config, without a checkpoint.

    Weights that are tied are made for each of their modules, and dropped when all are there; adapters come last, first
    in the weights' `dtype`.
    """
    events = Events()
    spare: list[int] = []
    adapters: list[Parameter] = []
    for tensor, again in every_tensor(model):
        if not tensor.numel:
            continue
        if tensor.group == ADAPTERS:
            adapters.append(tensor)
            continue
        number = events.malloc(tensor.numel * tensor.dtype.itemsize)
        if again:
            spare.append(number)
    for number in spare:
        events.free(number)
    first = [events.malloc(tensor.numel * dtype.itemsize) for tensor in adapters if tensor.dtype is not dtype]
    wide = [tensor for tensor in adapters if tensor.dtype is not dtype]
    for tensor in adapters:
        if tensor.dtype is dtype:
            events.malloc(tensor.numel * dtype.itemsize)
    for number, tensor in zip(first, wide, strict=True):
        events.malloc(tensor.numel * tensor.dtype.itemsize)
        events.free(number)
    return events


def loaded_on_gpu(model: Module) -> Events:
    """The checkpoint was loaded onto the GPU (`from_pretrained` with a device_map).

    Transformers first asks for the bytes of all weights at once and gives them back, so that the weights come out of
    one segment (`caching_allocator_warmup`). Experts that files hold apart lie beside the tensor that they become.
    """
    events = Events()
    tensors = [tensor for tensor, again in every_tensor(model) if not again and tensor.numel]
    weights = sum(tensor.numel * tensor.dtype.itemsize for tensor in tensors if not isinstance(tensor, Buffer))
    if weights:
        events.free(events.malloc(weights))
    apart = _apart(model)
    for tensor in tensors:
        nbytes = tensor.numel * tensor.dtype.itemsize
        pieces = [events.malloc(nbytes // apart[id(tensor)]) for _ in range(apart.get(id(tensor), 0))]
        events.malloc(nbytes)
        for number in pieces:
            events.free(number)
    return events


def _apart(model: Module) -> dict[int, int]:
    """In how many tensors files hold the weights of experts, by identity; those of [in, out] are stored as used."""
    found: dict[int, int] = {}
    for _, module in model.modules():
        if isinstance(module, Experts) and not module.transposed and len(module.up_proj.shape) == 3:
            gated = module.up_proj.shape[-2] == 2 * module.down_proj.shape[-1]
            found[id(module.up_proj)] = module.count * (2 if gated else 1)
            found[id(module.down_proj)] = module.count
    return found


def every_tensor(module: Module, seen: set[int] | None = None) -> Iterator[tuple[Parameter, bool]]:
    """Every tensor of every module, all blocks of stacks included, and whether another module had it already.

    `seen` holds the identities of those that came before.
    """
    seen = set() if seen is None else seen
    direct = [value for _, value in module.direct_tensors()]
    for value in direct:
        if not isinstance(value, Buffer):
            yield value, id(value) in seen
            seen.add(id(value))
    if isinstance(module, Stack) and not module.shared:
        before = set(seen)
        walked: dict[int, list[tuple[Parameter, bool]]] = {}
        for _, block in module.positions:
            if id(block) not in walked:
                mine = set(before)
                walked[id(block)] = list(every_tensor(block, mine))
                seen |= mine
            yield from walked[id(block)]
    else:
        for _, child in module.children():
            yield from every_tensor(child, seen)
    for value in direct:
        if isinstance(value, Buffer):
            yield value, id(value) in seen
            seen.add(id(value))
