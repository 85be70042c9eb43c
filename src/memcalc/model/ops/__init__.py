"""The operations of the tape, in the documentation page's three kinds and fused attention.

Each says what it makes, what it saves for backward, and what its backward allocates, in order.
"""

from memcalc.model.ops.attention import scaled_dot_product_attention
from memcalc.model.ops.elementwise import (
    add,
    add_,
    compare,
    cos,
    divide,
    dropout,
    exp,
    gelu,
    like,
    log,
    masked_fill,
    multiply,
    negative,
    power,
    relu,
    rsqrt,
    scale,
    shift,
    sigmoid,
    silu,
    sin,
    softplus,
    sqrt,
    subtract,
    tanh,
    to,
    where,
)
from memcalc.model.ops.matmul import addmm, baddbmm, bmm, linear, lower, matmul, mm
from memcalc.model.ops.reduction import (
    binary_cross_entropy,
    cross_entropy,
    embedding,
    layer_norm,
    log_softmax,
    mean,
    mse_loss,
    nll_loss,
    rms_norm_fused,
    softmax,
    sum_over,
)
from memcalc.model.ops.views import (
    cat,
    chunk,
    clone,
    contiguous,
    expand,
    narrow,
    permute,
    pick,
    reshape,
    select,
    split,
    squeeze,
    stack,
    step_slice,
    transpose,
    unbind,
    unsqueeze,
    view,
)

__all__ = [
    "add", "add_", "addmm", "baddbmm", "binary_cross_entropy", "bmm", "cat", "chunk", "clone", "compare",
    "contiguous", "cos", "cross_entropy", "divide", "dropout", "embedding", "exp", "expand", "gelu", "layer_norm",
    "like", "linear", "log", "log_softmax", "lower", "masked_fill", "matmul", "mean", "mm", "mse_loss", "multiply",
    "narrow", "negative", "nll_loss", "permute", "pick", "power", "relu", "reshape", "rms_norm_fused", "rsqrt",
    "scale", "scaled_dot_product_attention", "select", "shift", "sigmoid", "silu", "sin", "softmax", "softplus",
    "split", "sqrt", "squeeze", "stack", "step_slice", "subtract", "sum_over", "tanh", "to", "transpose", "unbind",
    "unsqueeze", "view", "where",
]  # fmt: skip
