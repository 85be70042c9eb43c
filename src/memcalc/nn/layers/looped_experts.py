"""Experts that run one after another, each over the tokens that are routed to it.

Source: the loops over experts of models that have no grouped kernel in Transformers 5.24 (DBRX, JetMoE). How many
tokens an expert gets is data; here every expert gets the same share.
"""

from __future__ import annotations

from collections.abc import Callable

from memcalc import ops
from memcalc.autograd.tensor import Tensor
from memcalc.common.assumption import Assumption
from memcalc.nn.layers.mixture_of_experts import ExpertWeights
from memcalc.tables.dtypes import BOOL, INT64

EVEN_SHARES = Assumption(
    "experts_even_shares", "experts run one after another, and every one of them gets the same share of the tokens"
)


Expert = Callable[[Tensor, Tensor], Tensor]
"""What one expert makes of the tokens [n, h] that an index [m] picks: [m, h]."""


class LoopedExperts(ExpertWeights):
    """Looks for the experts that were hit, and adds to the sum what each makes of its tokens."""

    assumption = EVEN_SHARES

    def looped(self, hidden: Tensor, weights: Tensor, indices: Tensor, expert: Expert) -> Tensor:
        """Tokens [n, h], weights and indices of their experts [n, k], to [n, h]."""
        tape, (tokens, per_token) = hidden.tape, indices.shape
        total = ops.empty_like(hidden.detach())
        with tape.no_grad():
            mask = tape.empty((tokens, per_token, self.count + 1), INT64)
            counts = tape.empty((self.count + 1,), INT64)
            some = ops.empty_like(counts, BOOL)
            del counts
            hit = tape.empty((self.count, 1), INT64)
            del some
        share = -(-tokens * per_token // self.count)
        for _ in range(min(self.count, tokens * per_token)):
            places = tape.empty((2, share), INT64)
            token, slot = ops.select(places, 0), ops.select(places, 0)
            del places
            made = ops.view(expert(hidden, token), -1, hidden.shape[-1])
            made = ops.mul(made, ops.index(ops.unsqueeze(weights, 2), token, slot))
            total = ops.index_add_(total, token, made)
        del mask, hit
        return total
