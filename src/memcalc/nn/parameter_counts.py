"""Parameter counts that are read off a network."""

from __future__ import annotations

from memcalc.nn.layers.mixture_of_experts import ExpertWeights
from memcalc.nn.model import Network
from memcalc.nn.module import Buffer


def active_parameters(network: Network) -> int:
    """Parameters that one token meets: all of them, but of a mixture's experts only as many as it is sent to."""
    total = sum(parameter.count * parameter.copies for _, parameter in network.parameters())
    return total - inactive_parameters(network)


def inactive_parameters(network: Network) -> int:
    """Parameters of the experts that one token is not sent to."""
    return sum(_idle(module) for module in network.all_modules if isinstance(module, ExpertWeights))


def _idle(experts: ExpertWeights) -> int:
    """Parameters of the experts that a token is not sent to."""
    total = sum(
        parameter.count * parameter.copies
        for _, parameter in experts.direct_tensors()
        if not isinstance(parameter, Buffer)
    )
    return total - total * experts.per_token // experts.count
