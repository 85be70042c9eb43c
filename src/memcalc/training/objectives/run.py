"""An objective's step from the models that it needs to its loss, and what it adds to the report."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from memcalc.autograd.tape import Tape
from memcalc.autograd.tensor import Tensor
from memcalc.errors import UsageError
from memcalc.models.build import build
from memcalc.models.registry import family
from memcalc.models.spec import ModelSpec
from memcalc.nn.model import Network
from memcalc.nn.module import Module
from memcalc.parallel import engines
from memcalc.parallel.engine import Engine
from memcalc.setup.setup import TrainingSetup
from memcalc.tables.dtypes import DType
from memcalc.training.objectives import OBJECTIVES, Rollout, frozen_models
from memcalc.training.objectives.assumptions import notes
from memcalc.training.traced_step import ObjectiveExtras
from memcalc.training.trl import FUSED


def trained_spec(spec: ModelSpec, setup: TrainingSetup) -> ModelSpec:
    """The spec of the model that is trained: a reward model has a head of its own."""
    return _scoring(spec) if setup.objective == "reward" else spec


def _scoring(spec: ModelSpec) -> ModelSpec:
    """The spec with a head of one score for a sequence, as reward and value models are loaded."""
    scored = spec.with_head("sequence-classification", 1)
    padding = 0 if scored.config.get("pad_token_id") is None else scored.config["pad_token_id"]
    return replace(scored, config={**scored.config, "pad_token_id": padding})


def trained(network: Network, spec: ModelSpec, setup: TrainingSetup) -> Module:
    """All that is trained with `network`: PPO has a policy and a value model."""
    if setup.objective != "ppo":
        return network
    value = _scoring(spec)
    return frozen_models.PolicyAndValue(network, frozen_models.value_model(build(value), value, setup))


def run_objective(  # noqa: PLR0913 (what a step is made of)
    tape: Tape,
    trained: Module,
    spec: ModelSpec,
    setup: TrainingSetup,
    length: int,
    teacher: ModelSpec | None,
    *,
    engine: Engine,
    autocast: DType | None,
) -> tuple[Tensor, tuple[Tensor, ...], ObjectiveExtras]:
    """The loss of the objective, what the trainer holds through backward, and what the objective adds to the step.

    Raises UsageError where the model or the teacher does not suit it.
    """
    value = trained.value_model if isinstance(trained, frozen_models.PolicyAndValue) else None
    policy = trained.policy if isinstance(trained, frozen_models.PolicyAndValue) else trained
    assert isinstance(policy, Network)
    frozen_models.check_head(policy, setup)
    frozen = _frozen_model(tape, spec, setup, teacher, engines.precision(setup.precision, engine.layout).weights)
    share = None
    if frozen is not None and (teacher is None or engine.prepares_teachers):
        share = engine.hold_frozen(frozen.network, shared=not frozen.nbytes)
    if frozen is not None and frozen.nbytes and share is not None:
        frozen = replace(frozen, nbytes=share)
    tape.dropout_enabled = setup.objective not in ("dpo", "kto", "reward", "orpo", "cpo")
    rollout = Rollout(tape, policy, frozen, setup, autocast, length, value)
    objectives = FUSED if setup.trainer_used == "trl" else OBJECTIVES
    loss = objectives[setup.objective](rollout)
    weights = {} if frozen is None or not frozen.nbytes else {frozen.name: frozen.nbytes}
    if value is not None:
        weights["reward model"] = frozen_models.size(value)
    used: dict[str, Any] = {"reference_model": setup.reference_used, "sequences": rollout.sequences}
    if teacher is not None:
        used["teacher"] = teacher.name
    held = {id(x.storage): (x.storage.allocation, copies) for x, copies in rollout.kept_until_step}
    companions = () if frozen is None or not frozen.nbytes else (frozen.network,)
    aims = ObjectiveExtras(
        weights,
        sum(allocation.nbytes * copies for allocation, copies in held.values()),
        used,
        tuple(notes(setup, rollout.completion, length)),
        companions if value is None else (*companions, value, value),  # the reward model is one like the value model
        tuple(allocation for allocation, _ in held.values()),
    )
    return loss, tuple(x for x, _ in rollout.kept_until_step), aims


def _frozen_model(
    tape: Tape, spec: ModelSpec, setup: TrainingSetup, teacher: ModelSpec | None, dtype: DType
) -> frozen_models.FrozenModel | None:
    """The reference model or the teacher, in the dtype that the trained model is kept in."""
    if setup.objective not in ("distillation", "gkd"):
        return frozen_models.reference(spec, build(spec), setup, tape, dtype)
    if teacher is None:
        raise UsageError(
            f"--objective {setup.objective} learns from a teacher: name it with --teacher, a path, a model of the Hub "
            "or a size (in the library, estimate's `teacher`)."
        )
    attention = family(teacher.model_type).attention_used(setup.attention)
    return frozen_models.teacher(build(teacher), tape, dtype, attention)
