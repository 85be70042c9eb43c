"""Parameter counts that are read off a network."""

from __future__ import annotations

from memcalc.model.module import Module
from memcalc.model.sublayers.experts import Experts


def active_parameters(network: Module) -> int:
    """Parameters that one token meets: all of them, but of a mixture's experts only as many as it is sent to."""
    total = sum(parameter.numel * parameter.copies for _, parameter in network.parameters())
    return total - sum(_idle(module) for _, module in network.modules() if isinstance(module, Experts))


def _idle(experts: Experts) -> int:
    """Parameters of the experts that a token is not sent to."""
    held = sum(parameter.numel * parameter.copies for _, parameter in experts.own())
    return held - held * experts.per_token // experts.count
