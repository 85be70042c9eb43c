"""What a model is trained for besides the next token of given text: preferences, rewards, a teacher's distribution.

Each objective is written as the trainer of TRL 1.12 is: the same forward passes, the same local variables, and the
statistics of the logits that it logs. accelerate runs each model in an autocast context of its own and gives out its
logits in fp32; the losses stand outside of it.
"""

from __future__ import annotations

from collections.abc import Callable

from memcalc.autograd.tensor import Tensor
from memcalc.training.objectives.distillation import distillation
from memcalc.training.objectives.dpo_and_reward import dpo, reward
from memcalc.training.objectives.grpo import grpo
from memcalc.training.objectives.ppo import ppo
from memcalc.training.objectives.rollout import Rollout

OBJECTIVES: dict[str, Callable[[Rollout], Tensor]] = {
    "dpo": dpo,
    "reward": reward,
    "grpo": grpo,
    "ppo": ppo,
    "distillation": distillation,
}
"""The loss of one micro-batch by objective, but for sft, whose loss the model computes itself."""

__all__ = ["OBJECTIVES", "Rollout"]
