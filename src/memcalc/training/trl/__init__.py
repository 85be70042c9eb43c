"""The loops of TRL 1.16, whose trainers score labels with one fused head and make no full logits."""

from __future__ import annotations

from collections.abc import Callable

from memcalc.autograd.tensor import Tensor
from memcalc.training.objectives.dpo_and_reward import reward
from memcalc.training.objectives.rollout import Rollout
from memcalc.training.trl.distillation import distillation
from memcalc.training.trl.full_logits import cpo, gkd, orpo
from memcalc.training.trl.policy import grpo, rloo
from memcalc.training.trl.preferences import dpo, kto

FUSED: dict[str, Callable[[Rollout], Tensor]] = {
    "dpo": dpo,
    "kto": kto,
    "grpo": grpo,
    "rloo": rloo,
    "distillation": distillation,
    "orpo": orpo,
    "cpo": cpo,
    "gkd": gkd,
    "reward": reward,
}
"""The loss of one micro-batch by objective."""
