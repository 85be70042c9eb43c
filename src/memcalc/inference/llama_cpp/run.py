"""A run of llama.cpp as a step."""

from __future__ import annotations

from typing import TYPE_CHECKING

from memcalc.autograd.tape import Tape
from memcalc.inference.encode import ONE_PASS, check_encoder, encodes
from memcalc.inference.engine_defaults import engine_notes
from memcalc.inference.llama_cpp.buffers import buffers
from memcalc.inference.served_model import ServedModel
from memcalc.models.spec import ModelSpec
from memcalc.nn.run_context import RunContext
from memcalc.setup.setup import InferenceSetup
from memcalc.training.traced_step import Step

if TYPE_CHECKING:
    from memcalc.nn.recorder import Recorder


def llama_cpp_step(
    spec: ModelSpec, setup: InferenceSetup, model: ServedModel, length: int, recorder: Recorder | None
) -> Step:
    """llama.cpp's run: everything is allocated before it, so that prefill and decode take the same."""
    encoder = encodes(model.row, model.network)
    if encoder:
        check_encoder(spec.model_type, setup)
    found = buffers(spec, setup, model, length, encoder=encoder)
    tape = Tape(phase="prefill") if recorder is None else recorder.new_tape("prefill")
    tape.run = RunContext(attention="flash" if setup.flash_attn != "off" else "eager", training=False)
    tape.finish()
    standing = {"KV cache": found.cache, "recurrent states": found.states, "compute buffer": found.compute}
    return Step(
        tape,
        model.network,
        tuple(model.network.tensors()),
        setup,
        None,
        0,
        length,
        phases=("prefill", "decode"),
        cache_bytes=found.cache + found.host_cache,
        preallocated_cache={name: nbytes for name, nbytes in standing.items() if nbytes},
        weights=found.weights,
        extra_weights=spec.extra_weights,
        resolved_options={**model.resolved_options, "gpu_memory_utilization": setup.gpu_memory_utilization},
        notes=(*model.notes, *engine_notes(setup, model.engine), *found.notes(setup), *([ONE_PASS] if encoder else [])),
    )
