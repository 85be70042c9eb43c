"""Rotary positions as complex numbers: pairs of a head's channels times numbers of length one.

Source: diffusers 0.42.1, models/embeddings.py (apply_rotary_emb with use_real=False).
"""

from __future__ import annotations

from memcalc import ops
from memcalc.autograd.tensor import Tensor
from memcalc.tables.dtypes import FP32


def complex_rotated(x: Tensor, freqs: Tensor) -> Tensor:
    """x [b, s, heads, d] turned by complex numbers [s, d / 2] or [b, s, d / 2], in fp32 or wider, and cast back."""
    freqs = ops.unsqueeze(freqs, -2)
    rotated = ops.view_as_complex(ops.reshape(ops.to(x, FP32), *x.shape[:-1], -1, 2))
    out = ops.reshape(ops.view_as_real(ops.mul_complex(rotated, freqs)), *x.shape)
    return ops.to(out, x.dtype)
