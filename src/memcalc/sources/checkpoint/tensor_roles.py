"""What each stored tensor is: a parameter, a packed weight, a constant of the quantization, or a buffer.

Only parameters and packed weights count as parameters; all four take bytes.
"""

from collections.abc import Iterable, Iterator, Mapping
from math import prod

from memcalc.config.quantization import Quantization
from memcalc.sources.checkpoint.module_tensors import ModuleTensors, by_module
from memcalc.sources.checkpoint.packing import PACKINGS, Packing
from memcalc.sources.checkpoint.safetensors import HeaderTensor
from memcalc.sources.checkpoint.stored_tensor import Role, StoredTensor

# What a leaf of a module is, and by which row: found once for modules that hold the same names and dtypes.
_Plan = tuple[tuple[str, Role, Packing | None, str], ...]

# Floating-point tensors that Transformers registers as buffers, by their own name.
# Source: register_buffer calls of Transformers' modeling files; BatchNorm's are PyTorch's.
_BUFFERS = frozenset(
    {
        "inv_freq",
        "masked_bias",
        "running_mean",
        "running_var",
        "num_batches_tracked",
        "e_score_correction_bias",
        "cos_cached",
        "sin_cached",
        "attn_mask",
        "relative_position_index",
    }
)

# Calibration constants that stand alone in a module of a quantized model (attention's own scales, activation scales).
_LONE_CONSTANTS = (
    "k_scale",
    "v_scale",
    "q_scale",
    "kv_scale",
    "prob_output_scale",
    "input_scale",
    "output_scale",
    "activation_scale",
    "input_scale_ub",
    "weight_scale",
    "weight_scale_inv",
    "weight_scale_2",
    "weight_zero_point",
    "input_zero_point",
    "weight_shape",
    "weight_g_idx",
    "input_global_scale",
    "weight_global_scale",
    "g_idx",
    "smooth_scale",
    "pre_quant_scale",
)

# The same behind the name of a fused weight: `gate_up_proj_input_scale`.
_JOINED_CONSTANTS = tuple(f"_{name}" for name in _LONE_CONSTANTS)

_NOT_FLOATING = frozenset({"BOOL", "U8", "I8", "U16", "I16", "U32", "I32", "U64", "I64"})


def understand(
    tensors: Iterable[HeaderTensor],
    quantization: Quantization | None,
    metadata: Mapping[str, str],
    files: Mapping[str, str],
) -> Iterator[StoredTensor]:
    """Every tensor with its role and the parameters it stands for; `files` says where each lies."""
    plans: dict[tuple[tuple[str, str], ...], _Plan] = {}
    for module in by_module(tensors, quantization, metadata):
        signature = tuple([(leaf, tensor.dtype) for leaf, tensor in module.leaves.items()])
        plan = plans.get(signature)
        if plan is None:
            plan = plans[signature] = tuple(_planned(module))
        for leaf, role, packing, stem in plan:
            yield _understood(module, module.leaves[leaf], files, role, packing, stem)


def _understood(
    module: ModuleTensors,
    tensor: HeaderTensor,
    files: Mapping[str, str],
    role: Role,
    packing: Packing | None,
    stem: str,
) -> StoredTensor:
    weight, label = tensor.name, ""
    shape: tuple[int, ...] | None = tensor.shape
    count = 0
    if role is Role.PARAMETER and _is_mask(tensor):
        role = Role.BUFFER
    elif role is Role.PARAMETER:
        count = prod(tensor.shape)
    elif packing is not None:
        logical = packing.unpack(module, tensor, stem)
        shape, count = (None, logical) if isinstance(logical, int) else (logical, prod(logical))
        weight, label = f"{module.path}.{stem}" if module.path else stem, packing.label
    return StoredTensor(tensor.name, tensor.dtype, tensor.nbytes, files[tensor.name], role, weight, shape, count, label)


def _is_mask(tensor: HeaderTensor) -> bool:
    """Old GPT-2 and GPT-Neo checkpoints keep the causal mask as `attn.bias` of shape (1, 1, positions, positions)."""
    shape = tensor.shape
    return len(shape) == 4 and shape[:2] == (1, 1) and shape[2] == shape[3] > 1 and tensor.name.endswith(".bias")


def _planned(module: ModuleTensors) -> Iterator[tuple[str, Role, Packing | None, str]]:
    packed: dict[str, tuple[Packing, str]] = {}
    constants: set[str] = set()
    for leaf, tensor in module.leaves.items():
        found = _packing(module, leaf, tensor)
        if found is not None:
            packed[leaf] = found
            constants.update(name.replace("*", found[1]) for name in found[0].constants)
    for leaf, tensor in module.leaves.items():
        if leaf in packed:
            packing, stem = packed[leaf]
            yield leaf, Role.QUANTIZED, packing, _weight_name(packing, stem)
        elif leaf in constants or ((packed or module.quantization) and _stands_alone(leaf)):
            yield leaf, Role.CONSTANT, None, leaf
        elif leaf in _BUFFERS or tensor.dtype in _NOT_FLOATING:
            yield leaf, Role.BUFFER, None, leaf
        else:
            yield leaf, Role.PARAMETER, None, leaf


def _stands_alone(leaf: str) -> bool:
    return leaf in _LONE_CONSTANTS or leaf.endswith(_JOINED_CONSTANTS)


def _weight_name(packing: Packing, stem: str) -> str:
    """What the unpacked tensor is called in the model: `qweight` stands for `weight`."""
    return stem if "*" in packing.packed else "weight"


def _packing(module: ModuleTensors, leaf: str, tensor: HeaderTensor) -> tuple[Packing, str] | None:
    for packing in PACKINGS:
        if packing.dtypes and tensor.dtype not in packing.dtypes:
            continue
        if packing.methods and module.method not in packing.methods:
            continue
        stem = _stem(packing.packed, leaf)
        if stem is None:
            continue
        if packing.proof and not any(name.replace("*", stem) in module.leaves for name in packing.proof):
            continue
        return packing, stem
    return None


def _stem(pattern: str, leaf: str) -> str | None:
    """What `*` stands for when `leaf` matches `pattern`; the leaf itself for a pattern without one."""
    before, star, after = pattern.partition("*")
    if not star:
        return leaf if leaf == pattern else None
    if len(leaf) <= len(before) + len(after) or not (leaf.startswith(before) and leaf.endswith(after)):
        return None
    return leaf[len(before) : len(leaf) - len(after)]
