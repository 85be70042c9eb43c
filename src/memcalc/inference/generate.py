"""Generation as memory sees it: prefill of a prompt, then one decoded token, with the cache between them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from memcalc.autograd.tape import OVERHEAD, Tape
from memcalc.common.assumption import Assumption
from memcalc.errors import UsageError, option_name
from memcalc.inference.encode import ONE_PASS, check_encoder, encode, encodes
from memcalc.inference.engine_cache import PooledCache, QuantizedCache, pool_bytes
from memcalc.inference.engine_options import idle_kv_dtype, refuse_llama_cpp_options
from memcalc.inference.loading import loading_bytes
from memcalc.inference.served_model import ServedModel, served_model
from memcalc.models.registry import autoencoders, denoisers
from memcalc.models.spec import ModelSpec
from memcalc.nn.kv_cache import Cache
from memcalc.nn.model import IMAGES, Network, checked_sides
from memcalc.nn.run_context import RunContext, run_context
from memcalc.setup.defaults import DEFAULT_SEQ_LEN
from memcalc.setup.sentences import NO_VIDEO
from memcalc.setup.setup import InferenceSetup
from memcalc.tables import sglang
from memcalc.tables.dtypes import INT64
from memcalc.tables.engines import CacheFormat, Engine
from memcalc.tables.gpus import Gpu
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
    _refuse_pipeline_options(spec, setup)
    model = model or served_model(spec, setup)
    row, engine, network, form = model.row, model.engine, model.network, model.form
    sound = network.main_input in ("input_values", "input_features")
    if engine.name != "transformers" and (sound or not (network.reads_text and network.source_is_text)):
        raise UsageError(
            f"{engine.name} serves models that read text, and {spec.model_type} reads none; leave out --engine."
        )
    frames, setup = setup.num_frames, with_frames(network, setup)
    length = _length(network, setup)
    if (
        engine.name == "llama.cpp"
        and network.image_side(setup.image) is None
        and (row.blocks != "encoder-decoder" or network.encodes_only)
    ):
        return _llama_cpp(spec, setup, model, length, recorder)
    refuse_llama_cpp_options(setup, spec.model_type)
    engine = _as_released(engine, setup, model.gpu, length)
    tape = Tape(phase="prefill") if recorder is None else recorder.new_tape("prefill")
    tape.device = tracing.device
    tape.grad_enabled = tape.dropout_enabled = False
    fused = "sdpa" if engine.attention == "flash" and "flash" not in row.attention.split(", ") else engine.attention
    tape.run = run = RunContext(
        attention=row.attention_used(fused or setup.attention),
        training=False,
        beams=setup.num_beams,
        all_logits=setup.prefill_logits == "all",
    )
    if recorder is not None:
        recorder.watch(network)
    sequences = setup.batch * setup.num_beams
    notes = [*model.notes, *_said(setup, engine)]
    if engine.attention is not None and setup.padding_mask:
        setup = setup.model_copy(update={"padding_mask": False})
    if encodes(row, network):
        check_encoder(spec.model_type, setup)
        model.bind(tape)
        encode(tape, network, setup, engine.batched_tokens, length)
        cache_bytes, standing, cache_for = 0, dict[str, int](), None
        notes.append(ONE_PASS)
    else:
        run.cache = _cache(engine, form, setup, length if row.blocks != "encoder-decoder" else 1)
        model.bind(tape)
        _prefill(tape, network, setup, engine, sequences, length, whole=row.blocks == "encoder-decoder")
        passed = 0
        for token in (*tracing.decoded, setup.max_new_tokens):
            if token - 1 > passed:
                tape.begin_span("previous tokens", None)
                run.cache.append_tokens(token - 1 - passed)
            cache_bytes, standing = _cache_bytes(network, run.cache, engine, form, sequences)
            cache_for = _cache_for(network, run.cache, engine, form)
            _decode(tape, network, setup, engine, form, sequences)
            passed = token
        notes.extend(idle_kv_dtype(setup, run.cache))
    tape.finish()
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
        cache_on_card=_cache_by_card(network, run.cache, engine, form, sequences) if model.placement else {},
        weights=model.weights.parts,
        extra_weights=spec.extra_weights,
        resolved_options={
            **model.resolved_options,
            "gpu_memory_utilization": setup.gpu_memory_utilization or engine.utilization,
            "num_frames": frames,
        },
        notes=tuple(notes),
    )


def _length(network: Network, setup: InferenceSetup) -> int:
    """Tokens of the prompt. Raises UsageError for a video or sides of images that the model does not take."""
    if setup.num_frames is not None:
        raise UsageError(NO_VIDEO)
    image = checked_sides(network, setup.image)
    usual = network.default_length or DEFAULT_SEQ_LEN
    return setup.seq_len or usual + network.image_tokens(setup.images_per_sequence, image)


def _refuse_pipeline_options(spec: ModelSpec, setup: InferenceSetup) -> None:
    """Raise UsageError for options of diffusion pipelines."""
    for name in OF_PIPELINES:
        value = getattr(setup, name)
        # True equals 1; and guidance of 1 is a choice too: it switches guidance off
        silent = value is not True and name != "guidance_scale" and value in (None, False, 1, "none")
        if name in setup.model_fields_set and value is not None and not silent:
            if name == "num_frames" and "vision_config" in spec.config:
                continue  # the model says whether it reads videos
            raise UsageError(f"{option_name(name)} is for diffusion pipelines, which this model is not; leave it out.")


OF_PIPELINES = (
    "resolution",
    "height",
    "width",
    "num_frames",
    "max_sequence_length",
    "num_images_per_prompt",
    "guidance_scale",
    "cpu_offload",
    "vae_tiling",
    "vae_slicing",
    "vae_dtype",
    "components_to_quantize",
)
"""Options that a language model has no use for."""


def _llama_cpp(
    spec: ModelSpec, setup: InferenceSetup, model: ServedModel, length: int, recorder: Recorder | None
) -> Step:
    """llama.cpp's run: everything is allocated before it, so that prefill and decode take the same."""
    from memcalc.inference.llama_cpp import buffers

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
        notes=(*model.notes, *_said(setup, model.engine), *found.notes(setup), *([ONE_PASS] if encoder else [])),
    )


def _decode(
    tape: Tape, network: Network, setup: InferenceSetup, engine: Engine, form: CacheFormat | None, sequences: int
) -> None:
    """Run one token of each sequence after what the cache holds."""
    tape.begin_span("decode", None)
    run = run_context(tape)
    old = run.cache
    if not network.accepts_past_key_values and engine.cache == "dynamic":
        run.cache = _cache(engine, form, setup, 1)
    token = tape.external_tensor((sequences, 1), INT64, OVERHEAD, "token ids")
    token.storage.allocation.aliased = tape.inputs[0].aliased
    tape.inputs[1:] = [allocation for allocation in tape.inputs[1:] if allocation.name == IMAGES]
    outputs = network(micro_batch(token, None, setup))
    del outputs, old
    if setup.num_beams > 1:
        _reorder(tape)


def _said(setup: InferenceSetup, engine: Engine) -> list[Assumption]:
    """What the engine takes for granted."""
    lines = list(engine.notes)
    if engine.attention is not None and "attention" in setup.model_fields_set:
        lines.append(
            Assumption(
                "attention_of_engine",
                f"--attention {setup.attention} is not used: {engine.name} has kernels of its own",
            )
        )
    if engine.attention is not None and setup.padding_mask:
        lines.append(
            Assumption(
                "padding_of_engine", f"--padding-mask is not used: {engine.name} packs sequences without padding"
            )
        )
    share = setup.gpu_memory_utilization or engine.utilization
    if share is not None:
        lines.append(
            Assumption(
                "gpu_memory_utilization",
                f"{engine.name} fills at most {share:.0%} of the GPU (--gpu-memory-utilization)",
            )
        )
    if engine.batched_tokens is not None and (setup.prefill_chunk_size, setup.max_num_batched_tokens) == (None, None):
        option = "max_num_batched_tokens" if engine.name == "vllm" else "prefill_chunk_size"
        text = f"{engine.name} prefills at most {engine.batched_tokens:,} tokens at once (--{option.replace('_', '-')})"
        lines.append(Assumption(option, text))
    return lines


def _cache(engine: Engine, form: CacheFormat | None, setup: InferenceSetup, first: int) -> Cache:
    """The cache that `engine` keeps; decoding begins after `first` tokens."""
    if engine.cache == "dynamic":
        return Cache() if form is None else QuantizedCache(form)
    return PooledCache(
        static_length=first + setup.max_new_tokens - 1 if engine.cache == "static" else None,
        absorbs_latent=engine.attention is not None,
    )


def _prefill(  # noqa: PLR0913 (what a prompt is run with)
    tape: Tape, network: Network, setup: InferenceSetup, engine: Engine, sequences: int, length: int, *, whole: bool
) -> None:
    """Run the prompt. In chunks, only the last one counts: the cache is longest then.

    With `whole` it is never cut: an encoder reads it, once for all beams. A serving engine batches no more tokens than
    it has configured, so its sequences may be prefilled one after another.
    """
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


def _as_released(engine: Engine, setup: InferenceSetup, gpu: Gpu | None, length: int) -> Engine:
    """vLLM with the defaults of its version for `gpu` and sequences of `length` tokens; SGLang with its own."""
    if engine.name == "sglang" and gpu is not None:
        found = sglang.defaults(gpu, setup.tensor_parallel_size)
        return replace(engine, batched_tokens=found.chunked_prefill_size, utilization=found.mem_fraction_static)
    if engine.name != "vllm":
        return engine
    from memcalc.tables import vllm

    rules = vllm.release(setup.engine_version, gpu)
    tokens = vllm.batched_tokens(rules, gpu, length + setup.max_new_tokens)
    return replace(
        engine, batched_tokens=setup.max_num_batched_tokens or tokens, utilization=rules.utilization, page=vllm.BLOCK
    )


def _cache_for(
    network: Network, cache: Cache, engine: Engine, form: CacheFormat | None
) -> Callable[[int, int], int] | None:
    """Bytes of the pool for so many sequences of so many tokens; None where there is no pool of pages.

    A layer with a window needs room for it and for the tokens of one pass, in one page more.
    """
    if not isinstance(cache, PooledCache) or engine.cache != "paged":
        return None
    copies = {id(module): module.copies for _, module in network.modules()}
    beyond = (engine.batched_tokens or 0) + engine.page - 1
    widths = [
        (width if width.window is None else replace(width, window=width.window + beyond), copies[layer])
        for layer, width in cache.widths.items()
    ]
    states = sum(sum(sizes.values()) * copies[layer] for layer, sizes in cache.state_bytes.items())

    def needed(sequences: int, tokens: int) -> int:
        pages = sum(pool_bytes(width, engine, form, sequences, tokens) * count for width, count in widths)
        return pages + states * sequences

    return needed


def _cache_bytes(
    network: Network, cache: Cache, engine: Engine, form: CacheFormat | None, sequences: int
) -> tuple[int, dict[str, int]]:
    """Bytes of keys and values before the last token, and what of the cache stands outside the tape, by name."""
    copies = {id(module): module.copies for _, module in network.modules()}
    grown = sum(nbytes * copies[layer] for layer, nbytes in cache.nbytes().items())
    if not isinstance(cache, PooledCache):
        return grown, {}
    tokens = cache.past or cache.length
    pool = sum(
        pool_bytes(width, engine, form, sequences, tokens) * copies[layer] for layer, width in cache.widths.items()
    )
    states = sum(sum(sizes.values()) * sequences * copies[layer] for layer, sizes in cache.state_bytes.items())
    return grown + pool, {"KV cache": pool, "recurrent states": states}


def _cache_by_card(
    network: Network, cache: Cache | None, engine: Engine, form: CacheFormat | None, sequences: int
) -> dict[int, int]:
    """Bytes of keys and values before the last token by the GPU of their layers."""
    if cache is None:
        return {}
    copies = {id(module): module.copies for _, module in network.modules()}
    tokens = cache.past or cache.length
    held = cache.nbytes()
    if isinstance(cache, PooledCache):
        held = {layer: pool_bytes(width, engine, form, sequences, tokens) for layer, width in cache.widths.items()}
    sizes: dict[int, int] = {}
    for layer, nbytes in held.items():
        card = cache.cards.get(layer, 0)
        sizes[card] = sizes.get(card, 0) + nbytes * copies[layer]
    return sizes


def _reorder(tape: Tape) -> None:
    """Beam search picks the surviving beams' keys and values: a copy of one tensor at a time."""
    cache = run_context(tape).cache
    assert cache is not None
    largest = max((tensor for kept in cache.key_values() for tensor in kept), key=lambda t: t.numel, default=None)
    if largest is not None:
        with tape.scoped("beam reorder copy"):
            tape.empty(largest.shape, largest.dtype)
