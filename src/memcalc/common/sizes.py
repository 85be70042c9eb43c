"""Sizes of tensors: shapes, and how the CUDA allocator rounds what it is asked for."""

Shape = tuple[int, ...]

MIB = 2**20

ALIGNMENT = 512
"""PyTorch's CUDA allocator rounds every storage up to a multiple of this (kMinBlockSize)."""


def rounded(nbytes: int) -> int:
    """`nbytes` rounded up to the allocator's alignment."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT
