"""Encoders in inference: one forward pass over all tokens, without a cache and with nothing to decode."""

from __future__ import annotations

from typing import TYPE_CHECKING

from memcalc.autograd.tape import OVERHEAD, Tape
from memcalc.common.assumption import Assumption
from memcalc.errors import UsageError
from memcalc.tables.dtypes import INT64
from memcalc.training.micro_batch import micro_batch

if TYPE_CHECKING:
    from memcalc.models.family import Family
    from memcalc.nn.model import Network
    from memcalc.setup.setup import InferenceSetup

ONE_PASS = Assumption(
    "encoder_one_pass",
    "an encoder reads everything in one forward pass, shown as prefill: it has no cache and decodes nothing",
)

_DECODING = {"max_new_tokens": 1, "num_beams": 1, "kv_dtype": "auto", "prefill_chunk_size": None}
"""Options that say how tokens are decoded or cached, with the values at which they say nothing."""


def encodes(row: Family, network: Network) -> bool:
    """Whether the model is an encoder without a causal head: Transformers gives such a model no cache."""
    return network.encodes_only or (row.blocks == "encoder" and not getattr(network, "causal", False))


def check_encoder(model_type: str, setup: InferenceSetup) -> None:
    """Raise UsageError for an option that an encoder has no use for."""
    for name, silent in _DECODING.items():
        if getattr(setup, name) != silent:
            raise UsageError(
                f"--{name.replace('_', '-')} says how tokens are decoded, but {model_type} is an encoder, which reads "
                "everything in one pass; leave it out."
            )


def encode(tape: Tape, network: Network, setup: InferenceSetup, batched_tokens: int | None, length: int) -> None:
    """Run the pass. An engine that batches no more than `batched_tokens` runs its sequences one after another."""
    sequences = setup.batch if batched_tokens is None else max(1, min(setup.batch, batched_tokens // length))
    network(micro_batch(tape.external_tensor((sequences, length), INT64, OVERHEAD, "token ids"), None, setup))
