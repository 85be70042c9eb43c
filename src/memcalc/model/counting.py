"""Parameter counts that are read off a network."""

from __future__ import annotations

from memcalc.model.module import Module


def active_parameters(network: Module) -> int:
    """Parameters that one token meets: all of them, but for mixtures of experts."""
    return sum(parameter.numel * parameter.copies for _, parameter in network.parameters())
