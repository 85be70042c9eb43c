"""Kernels of mamba-ssm and flash-linear-attention put into a built model."""

from __future__ import annotations

from memcalc.common.assumption import Assumption
from memcalc.errors import UsageError
from memcalc.nn.module import Module

NOTE = Assumption(
    "state_space_kernels",
    "state-space layers run in mamba-ssm's kernels, as its source has them (--state-space-kernels)",
)


FLA_NOTE = Assumption(
    "linear_attention_kernels",
    "linear attention runs in flash-linear-attention's kernels, its convolutions in PyTorch "
    "(--linear-attention-kernels)",
)


class FusedMixer(Module):
    """A layer for which a library has kernels."""

    fused_kernels = False
    """Whether they run it."""


class StateSpaceMixer(FusedMixer):
    """A layer of Mamba 1 or 2, for which mamba-ssm has kernels."""


class LinearAttentionMixer(FusedMixer):
    """A layer of linear attention, for which flash-linear-attention has kernels."""


def has_mixers(network: Module, kind: type[FusedMixer]) -> bool:
    """Whether a model has layers of this kind."""
    return any(isinstance(module, kind) for _, module in network.modules())


def use_mamba_ssm(network: Module) -> Assumption:
    """Let mamba-ssm's kernels run every mixer of Mamba 1 and 2; returns what to say of it.

    Raises UsageError where there is none.
    """
    if not _fused(network, StateSpaceMixer):
        raise UsageError(
            "--state-space-kernels mamba-ssm is for models with Mamba layers, of which this one has none; leave it out."
        )
    return NOTE


def use_fla(network: Module) -> Assumption:
    """Let flash-linear-attention's kernels run every layer that they are for; returns what to say of it.

    Raises UsageError where there is none.
    """
    if not _fused(network, LinearAttentionMixer):
        raise UsageError(
            "--linear-attention-kernels fla is for models with gated delta nets or Kimi's delta attention, which this "
            "one has not; leave it out."
        )
    return FLA_NOTE


def _fused(network: Module, kind: type[FusedMixer]) -> bool:
    """Let the kernels run every layer of this kind; whether there is one."""
    for _, module in network.modules():
        if isinstance(module, kind):
            module.fused_kernels = True
            module.assumption = None
    return has_mixers(network, kind)
