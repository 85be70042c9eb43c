"""Options of training that an engine cannot be beside, or that have nothing to act on in a layout."""

from __future__ import annotations

from collections.abc import Iterator

from memcalc.parallel.setup import Parallel
from memcalc.setup.conflicts import GRADIENT_PROJECTING
from memcalc.setup.setup import TrainingSetup
from memcalc.tables.optimizers import spelled

_OF_MATRICES = ("muon", *GRADIENT_PROJECTING)
"""Optimizers that multiply or factor whole matrices."""


def beside_engine(setup: TrainingSetup, engine: Parallel) -> Iterator[str]:
    """What is wrong with options of training beside `engine`, a sentence each."""
    if engine not in ("none", "ddp") and spelled(setup.optimizer).row in _OF_MATRICES:
        yield (
            f"--optimizer {setup.optimizer} works on whole matrices, and --parallel {engine} gives each rank parts of "
            "weights; use --parallel ddp, or another --optimizer."
        )
    if engine not in ("none", "ddp") and setup.float8_recipe != "none":
        yield (
            f"--float8-recipe is described where every rank has whole weights, not beside --parallel {engine}; leave "
            "it out, or use --parallel ddp."
        )
    if "expert_imbalance" in setup.model_fields_set and setup.expert_parallel_size == 1:
        yield (
            "--expert-imbalance is about GPUs that experts are spread over, but there is one; add "
            "--expert-parallel-size, or leave it out."
        )
    if setup.pipeline_parallel_size > 1:
        if setup.keep_logits:
            yield (
                "--keep-logits is about a loop without a pipeline; with one, --pipeline-keep-outputs says whether the "
                "last stage keeps the logits: leave --keep-logits out."
            )
    elif setup.sync_every_micro_step and setup.grad_accum == 1:
        yield (
            "--sync-every-micro-step is about several micro-batches, but there is one; add --grad-accum, or leave it "
            "out."
        )
