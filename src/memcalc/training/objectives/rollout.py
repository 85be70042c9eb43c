"""The models that an objective runs, and the tensors that the step is given."""

from __future__ import annotations

from dataclasses import dataclass, field

from memcalc import ops
from memcalc.autograd.tape import OVERHEAD, Tape
from memcalc.autograd.tensor import Tensor
from memcalc.models.common.heads import SequenceClassifier
from memcalc.nn.model import Batch, Network, Outputs
from memcalc.nn.run_context import run_context, training_mode
from memcalc.setup.setup import TrainingSetup
from memcalc.tables.dtypes import FP32, INT64, DType
from memcalc.training.objectives.frozen_models import FrozenModel

LOSS = "head and loss"
"""The part of the box for logits and what is computed of them."""


@dataclass(slots=True)
class Rollout:
    """The trained model and a frozen one (reference, teacher) if there is one, and how an objective runs them.

    `length` is that of prompt and completion together, in tokens.
    """

    tape: Tape
    policy: Network
    frozen: FrozenModel | None
    setup: TrainingSetup
    autocast: DType | None
    length: int
    value: SequenceClassifier | None = None
    """The value model that PPO trains together with the policy."""
    kept_until_step: list[tuple[Tensor, int]] = field(default_factory=list)
    """Tensors that the trainer holds until the optimizer has stepped, each with its copies."""

    @property
    def completion(self) -> int:
        """Tokens of a completion: no token stands before the first, so that one is never learnt from."""
        return min(self.setup.max_completion_length or self.length, self.length - 1)

    @property
    def sequences(self) -> int:
        """Sequences of the micro-batch."""
        return self.setup.sequences

    @property
    def logits_dtype(self) -> DType:
        """The dtype of the logits, as accelerate gives them out."""
        return run_context(self.tape).weights_dtype

    def input_tensor(self, *shape: int, dtype: DType = INT64, name: str = "token ids and masks") -> Tensor:
        """An input of the step."""
        return self.tape.external_tensor(shape, dtype, OVERHEAD, name)

    def run(self, ids: Tensor, logits_to_keep: int | None = None) -> Outputs:
        """Outputs of the trained model for ids [b, s], logits of all tokens or the last `logits_to_keep` first."""
        return self._run(self.policy, ids, logits_to_keep)

    def run_frozen(self, ids: Tensor, logits_to_keep: int | None = None) -> Outputs:
        """Outputs of the frozen model. The caller switches gradients off."""
        assert self.frozen is not None
        attention = run_context(self.tape).attention_backend(self.frozen.attention)
        with attention, training_mode(self.tape, self.frozen.trains):
            return self._run(self.frozen.network, ids, logits_to_keep)

    def run_policy_and_value(self, ids: Tensor) -> tuple[Outputs, Tensor]:
        """Outputs of the policy for ids [b, s], whose hidden states are `held`, and values [b, s, 1].

        The value model runs first; its hidden states stand until the policy is through.
        """
        self.mark_padding(ids)
        with self.tape.autocasting(self.autocast):
            outputs, values = self._forward_both(ids)
        _narrow = outputs.returned  # stands until all is in fp32
        outputs.logits_as_fp32()
        return outputs, ops.to(values, FP32) if run_context(self.tape).weights_dtype is FP32 else values

    def _forward_both(self, ids: Tensor) -> tuple[Outputs, Tensor]:
        assert self.value is not None
        padded, run = self.setup.padding_mask, run_context(self.tape)
        try:
            _of_values: list[tuple[Tensor, int]] = []
            run.hidden_states = _of_values
            states = self.value.model(ids, padded)
            values = self.value.score(states)
            run.hidden_states = self.kept_until_step
            return self.policy(Batch(ids, None, padded)), values
        finally:
            run.hidden_states = None

    def _run(self, network: Network, ids: Tensor, logits_to_keep: int | None) -> Outputs:
        setup = self.setup
        self.mark_padding(ids)
        batch = Batch(
            ids, None, setup.padding_mask, setup.target_len, setup.images_per_sequence, setup.image, logits_to_keep
        )
        with self.tape.autocasting(self.autocast):
            outputs = network(batch)
        outputs.logits_as_fp32()
        return outputs

    def mark_padding(self, ids: Tensor) -> None:
        """Give the models one padding mask, an input of the step, unless the trainer made one."""
        run = run_context(self.tape)
        if self.setup.padding_mask and run.padding is None:
            run.padding = self.input_tensor(*ids.shape, name="padding mask")
