"""Runs of Hugging Face Trainer and of TRL's trainers as test data, and how a case reads as options.

Every line of `data/trainers.jsonl` is one run of three steps of the library's own loop (transformers 5.24, accelerate
1.15, TRL 1.16) with PyTorch's CUDA allocator on a GPU whose kernels do nothing: `phase_rounded` is the most that was
alive in a phase of the second step, each tensor rounded to 512 bytes, cuBLAS workspaces included.
"""

import json
from collections.abc import Iterator
from typing import Any

from memcalc.breakdown import BREAKDOWN
from memcalc.models.spec import ModelSpec
from memcalc.peak.sweep import Sweep
from memcalc.setup.setup import TrainingSetup
from memcalc.training.step import trace
from support.paths import DATA

TASKS = {"cls": "sequence-classification", "mlm": "masked-lm", "seq2seq": "seq2seq-lm"}
OPTIMIZERS: dict[str, dict[str, Any]] = {
    "adamw_torch_fused": {},
    "adamw_torch": {"optimizer_impl": "foreach"},
    "adafactor": {"optimizer": "adafactor-hf"},
    "adamw_bnb_8bit": {"optimizer": "adamw-8bit"},
}
BETA = {"rloo": 0.05}
"""Weight of the reference where a case does not say (0 for GRPO)."""


def rows() -> Iterator[tuple[str, dict[str, Any]]]:
    """Every row with a name that says where it stands."""
    for number, line in enumerate((DATA / "trainers.jsonl").read_text().splitlines()):
        row = json.loads(line)
        yield f"{number}:{row['case']['trainer']}", row


def options(case: dict[str, Any]) -> dict[str, Any]:
    """The options of memcalc that a case stands for."""
    arguments, loop = case.get("args", {}), case["trainer"]
    found: dict[str, Any] = {
        "trainer": "hf" if loop == "hf" else "trl",
        "batch": case["batch"],
        "seq_len": case["seq"],
        "target_len": case.get("target_seq"),
        "padding_mask": case.get("padding", False),
        "grad_accum": arguments.get("gradient_accumulation_steps", 1),
        "label_smoothing": arguments.get("label_smoothing_factor", 0.0),
        "max_grad_norm": arguments.get("max_grad_norm"),
        "activation_offloading": arguments.get("activation_offloading", False),
        "max_completion_length": case.get("completion") if loop != "hf" else None,
        "checkpoint_reentrant": arguments.get("gradient_checkpointing_kwargs", {}).get("use_reentrant", False),
        "activation_checkpointing": "full" if arguments.get("gradient_checkpointing", loop != "hf") else "none",
    }
    found |= OPTIMIZERS[arguments.get("optim", "adamw_torch_fused")] | _precision(case, arguments, loop)
    if arguments.get("use_liger_kernel"):
        found |= {"kernels": "liger", "loss_implementation": "liger" if loop == "hf" else "eager"}
    if lora := case.get("lora"):
        targets = lora["target_modules"]
        found |= {"lora_rank": lora["r"], "lora_targets": targets if isinstance(targets, str) else ",".join(targets)}
    if loop not in ("hf", "sft"):
        found |= {"objective": loop} | _reference(case, arguments, loop)
    return found


def _precision(case: dict[str, Any], arguments: dict[str, Any], loop: str) -> dict[str, Any]:
    fp16 = arguments.get("fp16", False)
    bf16 = arguments.get("bf16", loop not in ("hf", "distillation") and not fp16)
    if case.get("dtype") == "bf16":
        return {"precision": "bf16", "autocast": "bf16" if bf16 else None}
    return {"precision": "mixed-bf16" if bf16 else "mixed-fp16" if fp16 else "fp32"}


def _reference(case: dict[str, Any], arguments: dict[str, Any], loop: str) -> dict[str, Any]:
    if arguments.get("precompute_ref_log_probs"):
        return {"reference_model": "precomputed"}
    if loop not in ("grpo", "rloo"):
        return {}
    count = arguments["num_generations"]
    kind = "shared" if "lora" in case else "copy"
    beta = arguments.get("beta", BETA.get(loop, 0.0))
    return {"batch": case["batch"] // count, "num_generations": count, "reference_model": kind if beta else "none"}


def answer(case: dict[str, Any], **more: Any) -> dict[str, int]:
    """Bytes alive at the peak of each phase, inputs included and workspaces not; with `more` options."""
    spec = ModelSpec.from_config(case["config"])
    if "head" in case:
        spec = spec.with_head(TASKS[case["head"]])
    teacher = ModelSpec.from_config(case["teacher"]) if "teacher" in case else None
    step = trace(spec, TrainingSetup(**{**options(case), **more}), teacher=teacher)
    found, _ = Sweep(step.tape).peaks()
    return {
        phase: (found[phase][0] if phase in found else 0)
        + sum(nbytes for parts in BREAKDOWN.values() for _, nbytes in parts(step, phase))
        + step.input_bytes
        for phase in step.phases
    }
