"""Parameter counts that are read off a network."""

from __future__ import annotations

from memcalc.model.module import Buffer, Module
from memcalc.model.sublayers.experts import ExpertWeights


def active_parameters(network: Module) -> int:
    """Parameters that one token meets: all of them, but of a mixture's experts only as many as it is sent to."""
    total = sum(parameter.count * parameter.copies for _, parameter in network.parameters())
    return total - sum(_idle(module) for _, module in network.modules() if isinstance(module, ExpertWeights))


def _idle(experts: ExpertWeights) -> int:
    """Parameters of the experts that a token is not sent to."""
    held = sum(
        parameter.count * parameter.copies for _, parameter in experts.own() if not isinstance(parameter, Buffer)
    )
    return held - held * experts.per_token // experts.count
