"""How far memcalc is from what others measured: python benchmarks/accuracy.py writes docs/accuracy.md.

Reads `tests/data/published/`: `models.json` (shapes), `*.jsonl` (a published measurement a line) and `left_out.json`
(what cannot be compared, and why). A row's options say what its source says; none is chosen so that a row fits.
"""

import json
from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path
from statistics import median
from typing import Any

from as_it_ran import as_it_ran

from memcalc import InferenceSetup, ModelSpec, TrainingSetup, find_gpu
from memcalc.breakdown.process_memory import ProcessMemory
from memcalc.estimation.job import Job
from memcalc.estimation.process import process_memory
from memcalc.models.spec import PipelineComponent

ROOT = Path(__file__).resolve().parent.parent
PUBLISHED = ROOT / "tests" / "data" / "published"
PAGE = ROOT / "docs" / "accuracy.md"

FAR = 0.10
"""A row whose error is larger needs a sentence that says why."""

FILES = ("a6000", "litgpt", "torchtune", "transformers", "ms-swift", "qwen2.5", "diffusers")

ALLOCATED = "training, tensors (allocated or active)"
RESERVED = "training, allocator (reserved)"
PROCESS = "training, process (nvidia-smi)"
TRAINING = "training, all of the above"
INFERENCE = "inference, tensors (allocated)"
PIPELINES = "diffusion pipelines, whatever was read"
GOALS = {ALLOCATED: 0.05, TRAINING: 0.05, INFERENCE: 0.03}
"""The largest median error that is good enough, by what was measured."""

HELD = (INFERENCE,)
"""The goal that is met by what memcalc says."""

HELD_AS_IT_RAN = (ALLOCATED, TRAINING, INFERENCE)
"""The goals that are met once older libraries and a project's own modules are told apart (`as_it_ran.py`)."""


@dataclass(frozen=True, slots=True)
class Compared:
    """One published measurement beside memcalc's answer, in bytes."""

    row: dict[str, Any]
    estimated: int
    as_it_ran: int
    """With what the row's own libraries and modules keep; the same as `estimated` where nothing is known to differ."""

    @property
    def error(self) -> float:
        """Relative error; negative where memcalc says less than was measured."""
        return self.estimated / int(self.row["bytes"]) - 1

    @property
    def error_as_it_ran(self) -> float:
        """The same, of `as_it_ran`."""
        return self.as_it_ran / int(self.row["bytes"]) - 1

    @property
    def job(self) -> str:
        """The job, whatever the counter."""
        if self.row["group"] == "diffusers":
            return PIPELINES
        return INFERENCE if self.row["mode"] == "inference" else TRAINING

    @property
    def kind(self) -> str:
        """What was measured: a job and a counter."""
        if self.row["group"] == "diffusers":
            return PIPELINES
        if self.row["mode"] == "inference":
            return INFERENCE
        return {"reserved": RESERVED, "nvidia-smi": PROCESS}.get(self.row["counter"], ALLOCATED)


def counted(memory: ProcessMemory, counter: str) -> int:
    """What the named counter would show. Active bytes are allocated ones that no stream still waits to free."""
    if counter == "reserved":
        return memory.reserved
    return memory.process if counter == "nvidia-smi" else memory.allocated


def _counted(row: dict[str, Any], config: dict[str, Any], options: dict[str, Any]) -> int:
    setup = (InferenceSetup if row["mode"] == "inference" else TrainingSetup)(**options)
    _, memory = process_memory(Job(_spec(config, row["model"]), setup, find_gpu(row["gpu"])))
    return counted(memory, row["counter"])


def _spec(config: dict[str, Any], name: str) -> ModelSpec:
    """The spec of a model, with the other models of its pipeline under `components`."""
    own = {key: value for key, value in config.items() if key != "components"}
    parts = tuple(
        PipelineComponent(name=part, class_name="", spec=ModelSpec.from_config(other, part))
        for part, other in config.get("components", {}).items()
    )
    return replace(ModelSpec.from_config(own, name), components=parts)


def compare() -> list[Compared]:
    """Every row of `tests/data/published/`, in the order of the document."""
    models: dict[str, dict[str, Any]] = json.loads((PUBLISHED / "models.json").read_text())
    results = []
    for name in FILES:
        for line in (PUBLISHED / f"{name}.jsonl").read_text().splitlines():
            row = json.loads(line)
            estimated = ran = _counted(row, models[row["model"]], row["options"])
            if "ran" in row:
                with as_it_ran(row["ran"]["parts"]):
                    config = models[row["ran"].get("model", row["model"])]
                    ran = _counted(row, config, row["options"] | row["ran"].get("options", {}))
            results.append(Compared(row, estimated, ran))
    return results


def median_error(results: Iterable[Compared], *, as_it_ran: bool = False) -> float:
    """Median of the errors' sizes."""
    return median(abs(result.error_as_it_ran if as_it_ran else result.error) for result in results)


def document(results: list[Compared]) -> str:
    """The whole page."""
    parts = [_HEAD, "\n".join(_summary(results))]
    for group, members in _by_group(results):
        parts.append("\n".join(_table(group, members)))
    parts.append("\n".join(_left_out()))
    return "\n\n".join(parts) + "\n"


_HEAD = """# Accuracy: memcalc against published measurements

Written by `python benchmarks/accuracy.py` from the rows of `tests/data/published/`; run it again after a change that
moves a number. `tests/test_accuracy.py` fails where this page is not what memcalc computes now.

A row is a measurement that its project published with a complete configuration. Its options are what the source says,
and nothing is adjusted to fit. *counter* says what was read: *allocated* is `torch.cuda.max_memory_allocated()`,
*active* its twin that includes memory waiting to be freed (compared with allocated), *reserved* is
`torch.cuda.max_memory_reserved()`, *nvidia-smi* the whole process. Sizes are GiB (2^30 bytes); an error below zero
means that memcalc says less than was measured. memcalc describes torch 2.14 and Transformers 5.24; most rows are from
older versions or from a project's own modules, so their errors are memcalc's and those of the distance together.

*As it ran* tells the two apart where the sources of that time say what they keep: the same job, computed by the same
rules, with the parts of `benchmarks/as_it_ran.py` in place of today's (the softmax of PyTorch before 1.11, the 4-bit
layer of bitsandbytes 0.41, LitGPT's adapters and loss)."""


def _summary(results: list[Compared]) -> Iterable[str]:
    yield "## Medians\n"
    within = "within 5 % | within 10 %"
    yield f"| what was measured | rows | goal | median error | {within} | as it ran | {within} |"
    yield "|---|---:|---:|---:|---:|---:|---:|---:|---:|"
    for kind in (ALLOCATED, RESERVED, PROCESS, TRAINING, INFERENCE, PIPELINES):
        members = [result for result in results if kind in (result.kind, result.job)]
        goal = _percent(GOALS[kind], "", 0) if kind in GOALS else ""
        cells = [cell for ran in (False, True) for cell in _errors(members, ran)]
        yield f"| {kind} | {len(members)} | {goal} | " + " | ".join(cells) + " |"
    yield (
        f"\nMissed: {_missed(results, as_it_ran=False)}. Missed as it ran: {_missed(results, as_it_ran=True)}. What an "
        "allocator reserves is\nsimulated for training on one GPU with batches of one length; these runs had "
        "batches of many lengths, which reserve more."
    )
    yield "\n| group | rows | median error | as it ran |\n|---|---:|---:|---:|"
    for group, members in _by_group(results):
        medians = (_percent(median_error(members, as_it_ran=ran)) for ran in (False, True))
        yield f"| {group} | {len(members)} | " + " | ".join(medians) + " |"


def _missed(results: list[Compared], *, as_it_ran: bool) -> str:
    """The goals that are missed."""
    of_kind = {kind: [result for result in results if kind in (result.kind, result.job)] for kind in GOALS}
    far = [kind for kind, members in of_kind.items() if median_error(members, as_it_ran=as_it_ran) > GOALS[kind]]
    return "; ".join(far) or "no goal"


def _errors(members: list[Compared], as_it_ran: bool) -> Iterable[str]:
    """Median, and how many rows are within 5 and 10 %."""
    errors = [abs(member.error_as_it_ran if as_it_ran else member.error) for member in members]
    yield _percent(median(errors))
    yield from (str(sum(error <= limit for error in errors)) for limit in (0.05, FAR))


def _percent(fraction: float, sign: str = "", digits: int = 2) -> str:
    return f"{100 * fraction:{sign}.{digits}f} %"


def _by_group(results: list[Compared]) -> list[tuple[str, list[Compared]]]:
    groups = {result.row["group"]: index for index, result in reversed(list(enumerate(results)))}
    ordered = sorted(results, key=lambda result: groups[result.row["group"]])
    return [(group, list(members)) for group, members in groupby(ordered, lambda result: result.row["group"])]


def _table(group: str, members: list[Compared]) -> Iterable[str]:
    sources = sorted({member.row["source"] for member in members})
    yield f"## {group}\n\nSource: {'; '.join(sources)}. Median error {_percent(median_error(members))}.\n"
    ran = any("ran" in member.row for member in members)
    yield "| row | model | setup | GPU | counter | measured | memcalc | error |" + (
        " as it ran | error |" if ran else ""
    )
    yield "|---|---|---|---|---|---:|---:|---:|" + ("---:|---:|" if ran else "")
    for member in members:
        row = member.row
        sizes = f"{row['bytes'] / 2**30:.2f} | {member.estimated / 2**30:.2f}"
        yield (
            f"| {row['id']} | {row['model']} | {_setup(row)} | {row['gpu']} | {row['counter']} | {sizes} | "
            f"{_percent(member.error, '+', 1)} |"
            + (f" {member.as_it_ran / 2**30:.2f} | {_percent(member.error_as_it_ran, '+', 1)} |" if ran else "")
        )
    yield from _remarks("Not stated, or different", [(member.row["id"], member.row["notes"]) for member in members])
    far = [(member.row["id"], member.row["cause"]) for member in members if abs(member.error) > FAR]
    yield from _remarks("Why more than 10 % off", far)


def _remarks(title: str, said: list[tuple[str, str]]) -> Iterable[str]:
    """Each different sentence once, with the rows that it is about."""
    about: dict[str, list[str]] = {}
    for name, sentence in said:
        if sentence:
            about.setdefault(sentence, []).append(name)
    if about:
        yield f"\n{title}:\n"
    for sentence, names in about.items():
        yield f"- {sentence.rstrip('.')} ({_names(names, len(said))})"


def _names(names: list[str], total: int) -> str:
    return "all of these rows" if len(names) == total > 1 else ", ".join(names)


def _setup(row: dict[str, Any]) -> str:
    """The options in a few words."""
    options = row["options"]
    sides = [options.get(key, options.get("resolution")) for key in ("height", "width")]
    size = options["seq_len"] if "seq_len" in options else f"{sides[0]} × {sides[1]} pixels"
    words = [f"{options.get('batch', 1)} × {size}"]
    words += [str(options[key]) for key in ("precision", "dtype", "quantization") if options.get(key, "none") != "none"]
    words += [options[key] for key in ("attention", "optimizer", "optimizer_impl") if key in options]
    labels = {
        "max_new_tokens": "{} new tokens",
        "lora_rank": "LoRA {}",
        "grad_accum": "accumulation {}",
        "activation_checkpointing": "{} checkpointing",
        "num_images_per_prompt": "{} pictures of a prompt",
        "cpu_offload": "{} offload",
    }
    words += [text.format(options[key]) for key, text in labels.items() if options.get(key) not in (None, "none", 1)]
    words += ["sliced decoding"] if options.get("vae_slicing") else []
    return ", ".join(words)


def _left_out() -> Iterable[str]:
    rows = json.loads((PUBLISHED / "left_out.json").read_text())
    yield f"## Left out\n\n{len(rows)} rows that memcalc cannot be compared with:\n"
    yield "| reason | rows |\n|---|---|"
    reasons: dict[str, list[str]] = {}
    for row in rows:
        reasons.setdefault(row["reason"], []).append(f"{row['id']} ({row['model']})")
    for reason, names in reasons.items():
        yield f"| {reason} | {', '.join(names)} |"


def main() -> None:
    """Write the page, and say the medians."""
    results = compare()
    PAGE.parent.mkdir(exist_ok=True)
    PAGE.write_text(document(results))
    print("\n".join(_summary(results)))


if __name__ == "__main__":
    main()
