"""The operations of the tape, in the documentation page's three kinds and fused attention.

Each says what it makes, what it saves for backward, and what its backward allocates, in order.
"""

from memcalc.model.ops.attention import scaled_dot_product_attention
from memcalc.model.ops.complex import as_complex, as_real, polar, turn
from memcalc.model.ops.convolution import average_pool, conv1d, convolution, interpolate, max_pool, unfold
from memcalc.model.ops.einsum import einsum
from memcalc.model.ops.elementwise import (
    add,
    add_,
    compare,
    divide,
    dropout,
    like,
    masked_fill,
    masked_fill_,
    minimum,
    multiply,
    negative,
    power,
    scale,
    shift,
    subtract,
    to,
    where,
)
from memcalc.model.ops.function import function, routed_multiplier
from memcalc.model.ops.fused_kernels import fused_gate, fused_rms_norm, fused_rotary
from memcalc.model.ops.fused_losses import cut_cross_entropy, fused_linear_cross_entropy
from memcalc.model.ops.indexing import (
    fill_where_,
    gather,
    index_add_,
    masked_scatter,
    max_over,
    put_where_,
    repeat_rows,
    scatter,
    scatter_,
    sort,
    take,
    take_one,
    take_where,
    topk,
)
from memcalc.model.ops.inplace import copy_into, divide_, scale_, scale_slice_
from memcalc.model.ops.matmul import (
    addmm,
    baddbmm,
    bmm,
    grouped_mm,
    linear,
    lower,
    matmul,
    mm,
    solve_triangular,
    weight_times,
)
from memcalc.model.ops.norms import batch_norm, ctc, group_norm, weight_norm
from memcalc.model.ops.pieces import cat, chunk, split, stack, unbind
from memcalc.model.ops.piecewise import (
    at_least,
    at_most,
    check_finite,
    choose,
    clamp,
    clamp_,
    clamp_between,
    clamp_within,
    expm1,
    finite_bound,
    larger,
    log_sigmoid,
    smaller,
)
from memcalc.model.ops.reduction import (
    binary_cross_entropy,
    cross_entropy,
    embedding,
    embedding_bag,
    layer_norm,
    log_softmax,
    logsumexp,
    mean,
    mse_loss,
    nll_loss,
    rms_norm_fused,
    softmax,
    sum_over,
    vector_norm,
)
from memcalc.model.ops.sequence import cumsum, pad, roll, triangle
from memcalc.model.ops.unary import (
    cos,
    erf,
    exp,
    gelu,
    glu,
    log,
    relu,
    rsqrt,
    sigmoid,
    silu,
    sin,
    softplus,
    sqrt,
    tanh,
)
from memcalc.model.ops.views import (
    clone,
    contiguous,
    expand,
    narrow,
    permute,
    pick,
    repeat,
    reshape,
    select,
    squeeze,
    step_slice,
    transpose,
    unsqueeze,
    view,
)

__all__ = [
    "add", "add_", "addmm", "as_complex", "as_real", "at_least", "at_most", "average_pool", "baddbmm", "batch_norm",
    "binary_cross_entropy", "bmm", "cat", "check_finite", "choose", "chunk", "clamp", "clamp_", "clamp_between",
    "clamp_within", "clone", "compare", "contiguous", "conv1d", "convolution", "copy_into", "cos",
    "cross_entropy", "ctc", "cumsum", "cut_cross_entropy", "divide", "divide_", "dropout", "einsum", "embedding",
    "embedding_bag", "erf", "exp", "expand", "expm1", "fill_where_", "finite_bound", "function", "fused_gate",
    "fused_linear_cross_entropy", "fused_rms_norm", "fused_rotary", "gather", "gelu", "glu", "group_norm",
    "grouped_mm", "index_add_", "interpolate", "larger", "layer_norm", "like", "linear", "log", "log_sigmoid",
    "log_softmax", "logsumexp", "lower", "masked_fill", "masked_fill_", "masked_scatter", "matmul", "max_over",
    "max_pool", "mean", "minimum", "mm", "mse_loss", "multiply", "narrow", "negative", "nll_loss", "pad", "permute",
    "pick", "polar", "power", "put_where_", "relu", "repeat", "repeat_rows", "reshape", "rms_norm_fused", "roll",
    "routed_multiplier", "rsqrt", "scale", "scale_", "scale_slice_", "scaled_dot_product_attention", "scatter",
    "scatter_", "select", "shift", "sigmoid", "silu", "sin", "smaller", "softmax", "softplus", "solve_triangular",
    "sort", "split", "sqrt", "squeeze", "stack", "step_slice", "subtract", "sum_over", "take", "take_one",
    "take_where", "tanh", "to", "topk", "transpose", "triangle", "turn", "unbind", "unfold", "unsqueeze",
    "vector_norm", "view", "weight_norm", "weight_times", "where",
]  # fmt: skip
