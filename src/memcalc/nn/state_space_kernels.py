"""Kernels of mamba-ssm and flash-linear-attention put into a built model."""

from __future__ import annotations

from memcalc.common.assumption import Assumption
from memcalc.errors import UsageError
from memcalc.nn.module import Module

NOTE = Assumption(
    "state_space_kernels",
    "state-space layers run in mamba-ssm's kernels, as its source has them (--state-space-kernels)",
)


class StateSpaceMixer(Module):
    """A layer of Mamba 1 or 2, for which mamba-ssm has kernels."""

    fused_kernels = False
    """Whether they run it."""


def has_mixers(network: Module) -> bool:
    """Whether a model has layers of Mamba 1 or 2."""
    return any(isinstance(module, StateSpaceMixer) for _, module in network.modules())


def use_mamba_ssm(network: Module) -> Assumption:
    """Let mamba-ssm's kernels run every mixer of Mamba 1 and 2; returns what to say of it.

    Raises UsageError where there is none.
    """
    mixers = [module for _, module in network.modules() if isinstance(module, StateSpaceMixer)]
    if not mixers:
        raise UsageError(
            "--state-space-kernels mamba-ssm is for models with Mamba layers, of which this one has none; leave it out."
        )
    for mixer in mixers:
        mixer.fused_kernels = True
        mixer.assumption = None
    return NOTE


FLA_NOTE = Assumption(
    "linear_attention_kernels",
    "linear attention runs in flash-linear-attention's kernels, its convolutions in PyTorch "
    "(--linear-attention-kernels)",
)


class LinearAttentionMixer(Module):
    """A layer of linear attention, for which flash-linear-attention has kernels."""

    fused_kernels = False
    """Whether they run it."""


def has_linear_attention(network: Module) -> bool:
    """Whether a model has layers that flash-linear-attention has kernels for."""
    return any(isinstance(module, LinearAttentionMixer) for _, module in network.modules())


def use_fla(network: Module) -> Assumption:
    """Let flash-linear-attention's kernels run every layer that they are for; returns what to say of it.

    Raises UsageError where there is none.
    """
    mixers = [module for _, module in network.modules() if isinstance(module, LinearAttentionMixer)]
    if not mixers:
        raise UsageError(
            "--linear-attention-kernels fla is for models with gated delta nets or Kimi's delta attention, which this "
            "one has not; leave it out."
        )
    for mixer in mixers:
        mixer.fused_kernels = True
        mixer.assumption = None
    return FLA_NOTE
