"""Measured rows as test data: what PyTorch's own memory trackers counted, and how a case reads as options.

Every line of `measured/*.jsonl` is one run of the real Transformers model on shape-only CUDA tensors (torch 2.14.1,
transformers 5.24.0, peft 0.21.2): `case` says what was run, `measured` what `torch.distributed._tools.MemTracker`
counted in the second optimizer step, or in prefill and decode; an encoder-decoder encodes first and then reads a
start token, as `generate` has it. A `bare` case was measured without the hooks that it
puts on modules (`mod_tracker.register_multi_grad_hook`), which keep some tensors alive themselves. Where a model reads
values, which shape-only tensors do not have, the case says what was read: `tolist` (lengths, by the function that
asks), `masked` (how many elements a mask chooses), `bool` (an answer to yes or no).

A `hollow` case was run with PyTorch's real allocator on a device that computes nothing: its phases are what was alive,
each tensor rounded to 512 bytes, less the batch and cuBLAS's workspaces.
"""

import json
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from memcalc.breakdown import BREAKDOWN
from memcalc.common.sizes import rounded
from memcalc.inference.generate import generate
from memcalc.models.spec import ModelSpec
from memcalc.peak.sweep import Sweep
from memcalc.setup.setup import InferenceSetup, TrainingSetup
from memcalc.training.step import trace
from memcalc.training.traced_step import Step, Tracing
from support.module_hooks import as_tracked, dropped, kept_leaves
from support.paths import DATA
from support.tape_events import DEVICES

FOLDER = DATA / "measured"

PRECISIONS = {"fp32": "fp32", "bf16": "bf16", "fp16": "fp16", "bf16-mixed": "mixed-bf16", "fp16-mixed": "mixed-fp16"}
OPTIMIZERS = {"sgdm": "sgd-momentum"}


def rows(folder: Path = FOLDER) -> Iterator[tuple[str, dict[str, Any]]]:
    """Every row with a name that says where it stands."""
    for path in sorted(folder.glob("*.jsonl")):
        for number, line in enumerate(path.read_text().splitlines()):
            yield f"{path.stem}:{number}", json.loads(line)


def training_setup(case: dict[str, Any]) -> TrainingSetup:
    """The options of a training case."""
    options: dict[str, Any] = {
        "batch": case.get("batch", 1),
        "seq_len": case.get("seq", 128),
        "precision": PRECISIONS[case.get("recipe", "bf16")],
        "attention": case.get("attn") or "sdpa",
        "padding_mask": case.get("padding", False),
        "activation_checkpointing": "full" if case.get("ckpt") else "none",
        "optimizer": OPTIMIZERS.get(case.get("optimizer", "adamw"), case.get("optimizer", "adamw")),
        "optimizer_impl": "fused" if case.get("fused") else "for-loop" if case.get("foreach") is False else "foreach",
        "grad_accum": case.get("accum", 1),
        "target_len": case.get("target_seq"),
        "keep_logits": case.get("hold_outputs", False),
    }
    if objective := case.get("objective"):
        options |= {
            "objective": objective,
            "trainer": "plain",
            "reference_model": case.get("reference"),
            "max_completion_length": case.get("completion"),
        }
    if lora := case.get("lora"):
        options |= lora_options(lora)
    return TrainingSetup(**options | case.get("options", {}))


def inference_setup(case: dict[str, Any]) -> InferenceSetup:
    """The options of an inference case."""
    return InferenceSetup(
        batch=case["batch"],
        seq_len=case["seq"],
        attention=case.get("attn") or "sdpa",
        dtype=PRECISIONS[case.get("recipe", "bf16")],  # type: ignore[arg-type]
        **case.get("options", {}),
    )


def lora_options(lora: dict[str, Any]) -> dict[str, Any]:
    """PEFT's LoraConfig as options."""
    targets = lora["target_modules"]
    saved = lora.get("modules_to_save") or (["classifier", "score"] if lora.get("task_type") == "SEQ_CLS" else [])
    return {
        "lora_rank": lora["r"],
        "lora_targets": targets if isinstance(targets, str) else ",".join(targets),
        "lora_dropout": lora.get("lora_dropout", 0.0),
        "lora_bias": "adapter" if lora.get("lora_bias") else lora.get("bias", "none").replace("_", "-"),
        "dora": lora.get("use_dora", False),
        "modules_to_save": ",".join(saved) or None,
    }


def standing(step: Step, phase: str) -> int:
    """Bytes of everything that stands in a phase outside the tape."""
    return sum(nbytes for parts in BREAKDOWN.values() for _, nbytes in parts(step, phase))


def answer(case: dict[str, Any], *, like_tracker: bool = True) -> dict[str, Any]:
    """What memcalc says of a case, under the names of the measured row."""
    spec = ModelSpec.from_config(case["config"])
    if case.get("mode") == "infer":
        step = generate(spec, inference_setup(case))
        found, _ = Sweep(step.tape).peaks()
        peaks = {phase: found[phase][0] + standing(step, phase) for phase in ("prefill", "decode")}
        if case.get("hollow"):
            seen = aliased_inputs(step)
            return {"params": parameters(step)} | {f"{phase}_peak": peak - seen for phase, peak in peaks.items()}
        if not step.tape.inputs[0].aliased:  # the next token is cut out of the prompt, which counts from then on
            peaks["decode"] += rounded(8 * case["batch"] * case["seq"])
        return {
            "params": parameters(step),
            "kv_cache": step.cache_bytes,
            "prefill_peak": peaks["prefill"],
            "decode_peak": peaks["decode"],
        }
    like_tracker = like_tracker and not case.get("hollow")
    hooked = like_tracker and not case.get("bare")
    teacher = ModelSpec.from_config(case["teacher"]) if "teacher" in case else None
    packs = hooked and not case.get("count_kept")
    with as_tracked(hooked=hooked, packs=packs) if like_tracker else nullcontext():
        tracing = Tracing(DEVICES["h100"] if case.get("hollow") else None, like_tracker=like_tracker)
        step = trace(spec, training_setup(case), tracing=tracing, teacher=teacher)
    sweep = Sweep(step.tape)
    found, _ = sweep.peaks()
    peaks = {phase: found[phase][0] + standing(step, phase) for phase in ("forward", "backward")}
    peaks["step"] = standing(step, "step")
    if case.get("hollow"):
        return {"phase_peak": {phase: peak - aliased_inputs(step) for phase, peak in peaks.items()}}
    if hooked:
        for phase, nbytes in kept_leaves(step).items():
            peaks[phase] += nbytes
    return {
        "params": parameters(step),
        "trainable": sum(p.numel * p.copies for _, p in step.parameters if p.trainable),
        # Rows that "count_kept" or are bare were measured by what is still alive; others by all that was ever packed.
        "saved_for_backward": sweep.saved_for_backward(step.forward_end)
        + (dropped(step) if hooked and not case.get("count_kept") else 0),
        "phase_peak": peaks,
    }


def aliased_inputs(step: Step) -> int:
    """Bytes of the batch that a tracker of tensors counts, as something is a view of it."""
    return sum(rounded(batch.nbytes) for batch in step.tape.inputs if batch.aliased)


def parameters(step: Step) -> int:
    """Elements of the unique parameters, as torch counts them: two packed 4-bit weights are one."""
    return sum(parameter.numel * parameter.copies for _, parameter in step.parameters)
