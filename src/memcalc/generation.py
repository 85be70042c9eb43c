"""Generation as memory sees it: prefill of a prompt, then one decoded token, with the cache between them."""

from __future__ import annotations

from memcalc.model.cache import Cache
from memcalc.model.families import family
from memcalc.model.network import Batch
from memcalc.model.spec import ModelSpec
from memcalc.model.tape import OVERHEAD, Tape
from memcalc.setup import DEFAULT_SEQ_LEN, InferenceSetup
from memcalc.step import Step, build
from memcalc.tables.dtypes import ALIASES, INT64


def generate(spec: ModelSpec, setup: InferenceSetup) -> Step:
    """Run prefill of `seq_len` tokens and decode of one, on shapes.

    The cache grows by concatenation, as Transformers' dynamic cache does; the logits are those of the last token.
    """
    network = build(spec)
    length = setup.seq_len or DEFAULT_SEQ_LEN
    tape = Tape(phase="prefill")
    tape.grad_enabled = tape.training = False
    tape.attention = family(spec.model_type).attention_used(setup.attention)
    tape.cache = Cache()
    network.bind(tape, ALIASES[setup.dtype])
    prompt = tape.untracked((setup.batch, length), INT64, OVERHEAD, "token ids")
    outputs = network(Batch(prompt, None, setup.padding_mask))
    del outputs
    tape.cache.length = length
    cached = tape.cache.nbytes()
    copies = {id(module): module.copies for _, module in network.modules()}
    cache_bytes = sum(nbytes * copies[layer] for layer, nbytes in cached.items())
    tape.enter("decode", None)
    token = tape.untracked((setup.batch, 1), INT64, OVERHEAD, "token ids")
    token.storage.allocation.aliased = prompt.storage.allocation.aliased
    tape.inputs.pop()
    outputs = network(Batch(token, None, setup.padding_mask))
    del outputs
    tape.finish()
    return Step(
        tape, network, tuple(network.tensors()), setup, None, 0, length, ("prefill", "decode"), cache_bytes
    )
