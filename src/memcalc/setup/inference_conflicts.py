"""Options of one engine given to another, and those that exclude each other, each told in one sentence."""

from __future__ import annotations

from collections.abc import Iterator

from memcalc.setup.inference_options import InferenceOptions

OPTIONS_OF: dict[str, tuple[str, ...]] = {
    "vllm": ("max_num_batched_tokens", "max_num_seqs", "enforce_eager", "engine_version")
}
"""Options that only one engine has."""


def inference_conflicts(setup: InferenceOptions) -> Iterator[str]:
    """What is wrong with the options of an inference job, each by itself being fine."""
    for engine, names in OPTIONS_OF.items():
        for name in names:
            if name in setup.model_fields_set and setup.engine != engine:
                yield (
                    f"{_option(name)} belongs to --engine {engine}, but --engine is {setup.engine}; leave it out, or "
                    f"use --engine {engine}."
                )
    if setup.max_num_batched_tokens is not None and setup.prefill_chunk_size is not None:
        yield (
            "--prefill-chunk-size and --max-num-batched-tokens both say how many tokens vLLM takes at once; leave one "
            "of them out."
        )
    if setup.max_num_seqs is not None and setup.batch > setup.max_num_seqs:
        yield (
            f"--batch {setup.batch} is more than the {setup.max_num_seqs} sequences that --max-num-seqs lets vLLM run "
            "at once; raise it, or lower --batch."
        )


def _option(name: str) -> str:
    return f"--{name.replace('_', '-')}"
