"""Learning a teacher's distribution: DistillationTrainer of TRL 1.16 with its fused loss.

On one GPU its student and teacher run without autocast whatever `bf16` says: the loss is made inside a redirected
forward, which accelerate has not wrapped.
"""

from __future__ import annotations

from memcalc import ops
from memcalc.autograd.tensor import Tensor
from memcalc.models.common.causal_lm import CausalLM
from memcalc.models.common.lm_losses import head_weight
from memcalc.nn.model import Batch, Network, Outputs
from memcalc.nn.run_context import run_context, training_mode
from memcalc.tables.dtypes import BOOL, FP32
from memcalc.training.objectives.distillation import check_vocabulary
from memcalc.training.objectives.rollout import LOSS, Rollout


def distillation(rollout: Rollout) -> Tensor:
    """The divergence of completions, projected through both heads in tiles."""
    assert rollout.frozen is not None
    rows, completion = rollout.sequences, rollout.completion
    prompt, answer = rollout.input_tensor(rows, rollout.length - completion), rollout.input_tensor(rows, completion)
    prompt_mask, mask = rollout.input_tensor(rows, rollout.length - completion), rollout.input_tensor(rows, completion)
    ids, padding = ops.cat([prompt, answer], 1), ops.cat([prompt_mask, mask], 1)
    run_context(rollout.tape).padding = padding
    batch = Batch(ids, None, rollout.setup.padding_mask)
    loss = rollout.policy.redirected(batch, lambda: Outputs(_loss(rollout, batch, mask))).loss
    assert loss is not None
    return loss


def _loss(rollout: Rollout, batch: Batch, mask: Tensor) -> Tensor:
    """The loss of completions with the `mask`, made inside the student's forward."""
    assert rollout.frozen is not None
    rows, completion = rollout.sequences, rollout.completion
    student = _hidden_states(rollout, rollout.policy, batch.ids)
    attention = run_context(rollout.tape).attention_backend(rollout.frozen.attention)
    beside = rollout.frozen.network
    with rollout.tape.no_grad(), training_mode(rollout.tape, False), attention:
        made = beside.redirected(batch, lambda: Outputs(None, (_hidden_states(rollout, beside, batch.ids),)))
        (teacher,) = made.returned
        del made
    run_context(rollout.tape).padding = None
    head, teacher_head = (head_weight(_lm(model).lm_head) for model in (rollout.policy, rollout.frozen.network))
    check_vocabulary(head.shape[0], teacher_head.shape[0])
    with rollout.tape.scoped(LOSS):
        valid = ops.empty_like(ops.reshape(mask, -1), BOOL)
        count = rows * completion
        flat, flat_teacher = _flat(student, completion), _flat(teacher, completion)
        flat, flat_teacher = ops.index_mask(flat, valid, count), ops.index_mask(flat_teacher, valid, count)
        divergence = ops.chunked_divergence(flat, head, flat_teacher, teacher_head)
        del flat, flat_teacher
        return ops.div(ops.sum(divergence, 0), rollout.tape.empty((), FP32))


def _hidden_states(rollout: Rollout, network: Network, ids: Tensor) -> Tensor:
    """Hidden states [b, s, h] of the backbone."""
    hidden: Tensor = _lm(network).model(ids, rollout.setup.padding_mask)
    return hidden


def _flat(hidden: Tensor, completion: int) -> Tensor:
    """The states [b · c, h] that predict completions, a copy."""
    return ops.reshape(ops.narrow(hidden, 1, completion), -1, hidden.shape[-1])


def _lm(network: Network) -> CausalLM:
    """The language model in a network."""
    return next(module for _, module in network.modules() if isinstance(module, CausalLM))
