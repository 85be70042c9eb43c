"""The frozen model of an objective (a reference, a teacher), and PPO's value model.

TRL runs the frozen model under no_grad without `requires_grad_(False)`. In its forward pass autocast therefore keeps
the casts of all its weights until the pass is over, as it does for trained ones.
"""

from __future__ import annotations

from dataclasses import dataclass

from memcalc.autograd.tape import Tape
from memcalc.errors import UsageError
from memcalc.models.common.causal_lm import CausalLM
from memcalc.models.common.heads import SequenceClassifier
from memcalc.models.spec import ModelSpec
from memcalc.nn import parameter_bytes
from memcalc.nn.model import Network
from memcalc.nn.module import Module
from memcalc.nn.run_context import run_context
from memcalc.nn.stack import Stack
from memcalc.setup.setup import TrainingSetup
from memcalc.tables.dtypes import DType
from memcalc.training.liger import use_liger
from memcalc.training.prepare_model import load


@dataclass(frozen=True, slots=True)
class FrozenModel:
    """A model that is run under no_grad.

    name: its part of the box.
    nbytes: bytes of weights that it does not share with the trained model.
    attention: its attention implementation.
    trains: it is the trained model itself with its adapters off, and so in training mode.
    """

    name: str
    network: Network
    nbytes: int
    attention: str
    trains: bool = False


def reference(spec: ModelSpec, network: Network, setup: TrainingSetup, tape: Tape, dtype: DType) -> FrozenModel | None:
    """The reference model of a setup around `network`, unbound; None where there is none."""
    kind = setup.reference_used
    if kind not in ("shared", "copy"):
        return None
    shared = kind == "shared"
    as_loaded = shared or setup.lora_rank is None  # a copy is not prepared for training
    load(network, spec, setup if as_loaded else setup.model_copy(update={"prepare_kbit_training": False}))
    return _bound("reference model", network, tape, dtype, run_context(tape).attention, shared=shared)


class PolicyAndValue(Module):
    """What PPO trains: the policy and a value model."""

    def __init__(self, policy: Network, value_model: SequenceClassifier) -> None:
        self.policy = policy
        self.value_model = value_model


def value_model(network: Network, spec: ModelSpec, setup: TrainingSetup) -> SequenceClassifier:
    """The value model that PPO trains around `network`, unbound. Raises UsageError where it is no decoder."""
    if not isinstance(network, SequenceClassifier):
        raise UsageError("--objective ppo needs a decoder, whose like with one score a token is its value model.")
    if setup.kernels == "liger":
        use_liger(network, spec.model_type)
    _rename(network, "value model")
    return network


def teacher(network: Network, tape: Tape, dtype: DType, attention: str) -> FrozenModel:
    """The teacher `network`, unbound."""
    return _bound("teacher", network, tape, dtype, attention, shared=False)


def _bound(name: str, network: Network, tape: Tape, dtype: DType, attention: str, *, shared: bool) -> FrozenModel:
    """Bind a frozen model to the tape. A shared one has no weights of its own."""
    _rename(network, name.removesuffix(" model"))
    if shared:
        for _, parameter in network.tensors():
            parameter.trainable = False
    network.bind(tape, dtype)
    return FrozenModel(name, network, 0 if shared else size(network), attention, shared)


def _rename(network: Network, owner: str) -> None:
    for _, module in network.modules():
        if isinstance(module, Stack):
            module.rename(f"{owner}'s {module.name}")


def size(network: Network) -> int:
    """Bytes of the weights and buffers of a bound network."""
    return parameter_bytes.total(value for _, value in network.tensors())


def check_head(network: Network, setup: TrainingSetup) -> None:
    """Raise UsageError where an objective about tokens meets a model without a language-model head."""
    if setup.objective == "reward" or any(isinstance(module, CausalLM) for _, module in network.modules()):
        return
    raise UsageError(
        f"--objective {setup.objective} needs the logits of a decoder with a language-model head, which this model "
        "does not have as its config describes it; choose another model, or --objective sft."
    )
