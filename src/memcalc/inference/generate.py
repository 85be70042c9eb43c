"""Generation as memory sees it: prefill of a prompt, then one decoded token, with the cache between them."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from memcalc.autograd.tape import OVERHEAD, Tape
from memcalc.errors import UsageError
from memcalc.inference.cache_sizes import KeptCache
from memcalc.inference.encode import ONE_PASS, check_encoder, encode, encodes
from memcalc.inference.engine_cache import PooledCache, QuantizedCache
from memcalc.inference.engine_defaults import as_released, engine_notes
from memcalc.inference.engine_options import idle_kv_dtype, refuse_llama_cpp_options
from memcalc.inference.loading import loading_bytes
from memcalc.inference.pipeline_options import refuse_pipeline_options
from memcalc.inference.served_model import ServedModel, served_model
from memcalc.models.registry import autoencoders, denoisers
from memcalc.models.spec import ModelSpec
from memcalc.nn.kv_cache import Cache
from memcalc.nn.model import IMAGES, Network, checked_sides
from memcalc.nn.run_context import RunContext, run_context
from memcalc.setup.defaults import DEFAULT_SEQ_LEN
from memcalc.setup.sentences import NO_VIDEO
from memcalc.setup.setup import InferenceSetup
from memcalc.tables.dtypes import INT64
from memcalc.training.input_sizes import with_frames
from memcalc.training.micro_batch import micro_batch
from memcalc.training.traced_step import PLAIN, Step, Tracing

if TYPE_CHECKING:
    from memcalc.nn.recorder import Recorder


def generate(
    spec: ModelSpec,
    setup: InferenceSetup,
    model: ServedModel | None = None,
    recorder: Recorder | None = None,
    *,
    tracing: Tracing = PLAIN,
) -> Step:
    """Run prefill of `seq_len` tokens and decode of one, on shapes.

    With Transformers' dynamic cache, keys and values grow by concatenation; other caches stand from the start. The
    logits are those of the last token, unless all are asked for.

    Args:
        spec: the model.
        setup: what is run.
        model: what `served_model` made of the two, where it was run before; a batch or length may have been another.
        recorder: told where allocations come from.
        tracing: what stands on the tape beside what the job decides.
    """
    if spec.model_type in (*denoisers(), *autoencoders()):
        from memcalc.inference.pipeline import call_pipeline  # language models do not pay for importing it

        return call_pipeline(spec, setup, tracing.device, recorder)
    refuse_pipeline_options(spec, setup)
    model = model or served_model(spec, setup)
    network = model.network
    _check_reads_text(spec, model)
    frames, setup = setup.num_frames, with_frames(network, setup)
    length = _length(network, setup)
    if _is_a_graph_of_llama_cpp(model, setup):
        from memcalc.inference.llama_cpp.run import llama_cpp_step

        return llama_cpp_step(spec, setup, model, length, recorder)
    refuse_llama_cpp_options(setup, spec.model_type)
    model = replace(model, engine=as_released(model.engine, setup, model.gpu, length))
    engine = model.engine
    tape = _new_tape(recorder, tracing)
    tape.run = run = RunContext(
        attention=_attention(model, setup),
        training=False,
        beams=setup.num_beams,
        all_logits=setup.prefill_logits == "all",
    )
    if recorder is not None:
        recorder.watch(network)
    notes = [*model.notes, *engine_notes(setup, engine)]
    if engine.attention is not None and setup.padding_mask:
        setup = setup.model_copy(update={"padding_mask": False})
    cache_bytes, standing, cache_for = 0, dict[str, int](), None
    if encodes(model.row, network):
        check_encoder(spec.model_type, setup)
        model.bind(tape)
        encode(tape, network, setup, engine.batched_tokens, length)
        notes.append(ONE_PASS)
    else:
        run.cache = _new_cache(model, setup, 1 if _reads_a_source(model) else length)
        model.bind(tape)
        _prefill(tape, model, setup, length)
        passed = 0
        for token in (*tracing.decoded, setup.max_new_tokens):
            if token - 1 > passed:
                tape.begin_span("previous tokens", None)
                run.cache.append_tokens(token - 1 - passed)
            kept = KeptCache(model, run.cache, setup.batch * setup.num_beams)
            (cache_bytes, standing), cache_for = kept.nbytes(), kept.pool_for()
            _decode(tape, model, setup)
            passed = token
        notes.extend(idle_kv_dtype(setup, run.cache))
    tape.finish()
    on_card: dict[int, int] = {}
    if model.placement is not None and run.cache is not None:
        on_card = KeptCache(model, run.cache, setup.batch * setup.num_beams).by_card()
    return Step(
        tape,
        network,
        tuple(network.tensors()),
        setup,
        None,
        0,
        length,
        phases=("prefill", "decode"),
        loading_bytes=loading_bytes(setup, model),
        cache_bytes=cache_bytes,
        preallocated_cache=standing,
        cache_for=cache_for,
        stage=model.stage,
        placement=model.placement,
        cache_on_card=on_card,
        weights=model.weights.parts,
        extra_weights=spec.extra_weights,
        resolved_options={
            **model.resolved_options,
            "gpu_memory_utilization": setup.gpu_memory_utilization or engine.utilization,
            "num_frames": frames,
        },
        notes=tuple(notes),
    )


def _new_tape(recorder: Recorder | None, tracing: Tracing) -> Tape:
    """A tape on which no gradient is asked for and nothing is dropped."""
    tape = Tape(phase="prefill") if recorder is None else recorder.new_tape("prefill")
    tape.device = tracing.device
    tape.grad_enabled = tape.dropout_enabled = False
    return tape


def _check_reads_text(spec: ModelSpec, model: ServedModel) -> None:
    """Raise UsageError where a serving engine is asked for a model that reads no text."""
    network, engine = model.network, model.engine.name
    sound = network.main_input in ("input_values", "input_features")
    if engine != "transformers" and (sound or not (network.reads_text and network.source_is_text)):
        raise UsageError(
            f"{engine} serves models that read text, and {spec.model_type} reads none; leave out --engine."
        )


def _is_a_graph_of_llama_cpp(model: ServedModel, setup: InferenceSetup) -> bool:
    """Whether llama.cpp's own graph is described for the model: it reads nothing but a decoder's or encoder's text."""
    return (
        model.engine.name == "llama.cpp"
        and model.network.image_side(setup.image) is None
        and (not _reads_a_source(model) or model.network.encodes_only)
    )


def _reads_a_source(model: ServedModel) -> bool:
    return model.row.blocks == "encoder-decoder"


def _attention(model: ServedModel, setup: InferenceSetup) -> str:
    """The attention implementation: the engine's own where the family has it."""
    asked = model.engine.attention
    if asked == "flash" and "flash" not in model.row.attention.split(", "):
        asked = "sdpa"
    return model.row.attention_used(asked or setup.attention)


def _length(network: Network, setup: InferenceSetup) -> int:
    """Tokens of the prompt. Raises UsageError for a video or sides of images that the model does not take."""
    if setup.num_frames is not None:
        raise UsageError(NO_VIDEO)
    image = checked_sides(network, setup.image)
    usual = network.default_length or DEFAULT_SEQ_LEN
    return setup.seq_len or usual + network.image_tokens(setup.images_per_sequence, image)


def _new_cache(model: ServedModel, setup: InferenceSetup, first: int) -> Cache:
    """The cache that the engine keeps; decoding begins after `first` tokens."""
    engine, form = model.engine, model.form
    if engine.cache == "dynamic":
        return Cache() if form is None else QuantizedCache(form)
    return PooledCache(
        static_length=first + setup.max_new_tokens - 1 if engine.cache == "static" else None,
        absorbs_latent=engine.attention is not None,
    )


def _prefill(tape: Tape, model: ServedModel, setup: InferenceSetup, length: int) -> None:
    """Run the prompt of `length` tokens. In chunks, only the last one counts: the cache is longest then.

    A source is never cut: an encoder reads it, once for all beams. A serving engine batches no more tokens than it has
    configured, so its sequences may be prefilled one after another.
    """
    network, engine, whole = model.network, model.engine, _reads_a_source(model)
    sequences = setup.batch * setup.num_beams
    cache = run_context(tape).cache
    assert cache is not None
    chunk = length if whole else min(setup.prefill_chunk_size or engine.batched_tokens or length, length)
    if engine.batched_tokens is not None:
        sequences = max(1, min(sequences, engine.batched_tokens // chunk))
    earlier = length - chunk
    if earlier:
        tape.begin_span("previous prefill chunks", None)
        network(micro_batch(tape.external_tensor((sequences, earlier), INT64, OVERHEAD, "token ids"), None, setup))
        cache.length = earlier
        tape.inputs.clear()
        tape.begin_span("prefill", None)
    prompt = tape.external_tensor((setup.batch if whole else sequences, chunk), INT64, OVERHEAD, "token ids")
    network(micro_batch(prompt, None, setup))
    cache.length = length


def _decode(tape: Tape, model: ServedModel, setup: InferenceSetup) -> None:
    """Run one token of each sequence after what the cache holds."""
    tape.begin_span("decode", None)
    run = run_context(tape)
    old = run.cache
    if not model.network.accepts_past_key_values and model.engine.cache == "dynamic":
        run.cache = _new_cache(model, setup, 1)
    token = tape.external_tensor((setup.batch * setup.num_beams, 1), INT64, OVERHEAD, "token ids")
    token.storage.allocation.aliased = tape.inputs[0].aliased
    tape.inputs[1:] = [allocation for allocation in tape.inputs[1:] if allocation.name == IMAGES]
    outputs = model.network(micro_batch(token, None, setup))
    del outputs, old
    if setup.num_beams > 1:
        _reorder(tape)


def _reorder(tape: Tape) -> None:
    """Beam search picks the surviving beams' keys and values: a copy of one tensor at a time."""
    cache = run_context(tape).cache
    assert cache is not None
    largest = max((tensor for kept in cache.key_values() for tensor in kept), key=lambda t: t.numel, default=None)
    if largest is not None:
        with tape.scoped("beam reorder copy"):
            tape.empty(largest.shape, largest.dtype)
