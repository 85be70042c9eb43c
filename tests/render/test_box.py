"""The box, letter by letter, and what holds for every box: exact widths, one scale, harmless names."""

import re

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.reports import GIB, component, inference_report, rebuilt, training_report

from memcalc import ModelSpec, TrainingSetup, canonical_spec, estimate
from memcalc.common.assumption import Assumption
from memcalc.render import json_report, markdown
from memcalc.render.box import render
from memcalc.render.captions import assumption_lines
from memcalc.render.styles import coloured, plain
from memcalc.render.terminal_text import cells, clip, visible, wrap
from memcalc.report.gpu_schema import GpuFit
from memcalc.report.schema import Report
from memcalc.units import counted

AT_80 = """\
┌─ TENSORS ───────────── Llama-like, 4.05B parameters · batch 16 × 256 tokens ─┐
│ MODEL WEIGHTS     ████████████████████████▊         22.5 GiB  6 bytes/param  │
│ (mixed-bf16)      ├── fp32 weights                  15.0 GiB                 │
│                   └── bf16 copies                    7.5 GiB                 │
│ OPTIMIZER STATES  █████████████████████████████████ 30.0 GiB  8 bytes/param  │
│ (adamw)           ├── fp32 momentum                 15.0 GiB                 │
│                   └── fp32 variance                 15.0 GiB                 │
│ GRADIENTS         ▍░░░░░░░░░░░░░░░                   0.4 GiB  4 bytes/param  │
│                                                               up to 15.0 GiB │
│                   └── fp32 gradients                 0.4 GiB                 │
│ ACTIVATIONS       ████████████████████████▏         22.0 GiB  5.5 MiB/token  │
│                   ├── 34 blocks                     20.0 GiB                 │
│                   └── head                           2.0 GiB                 │
│ TEMPORARY TENSORS █░                                 1.0 GiB  up to 2.0 GiB  │
│                   └── logits and loss                1.0 GiB                 │
│ OTHER OVERHEAD    ██▍                                2.2 GiB                 │
│                   ├── CUDA context                   0.7 GiB                 │
│                   ├── allocator reserve              1.5 GiB                 │
│                   └── 2 smaller                     16.1 MiB                 │
├──────────────────────────────────────────────────────────────────────────────┤
│ PEAK     75.9 GiB (81.5 GB) allocated: backward of the loss                  │
│          77.4 GiB (83.1 GB) reserved by the allocator                        │
│          78.1 GiB (83.8 GB) process, in nvidia-smi                           │
│ PHASES   forward 75.0 GiB · backward 76.0 GiB · step 61.0 GiB                │
│ GPU      H100-80GB: fits, 1.1 GiB of 79.2 GiB free at 256 tokens             │
└────────────────────────────────── █ at the peak  ░ at the row's own maximum ─┘
Assumptions:
 · sequence length 256 (default)
 · shape: hidden 3072, 34 blocks, 24 heads, vocabulary 32,000
"""

AT_60 = """\
┌─ TENSORS ──── Llama-like, 4.05B · batch 16 × 256 tokens ─┐
│ MODEL WEIGHTS     █████████████████████▊        22.5 GiB │
│ (mixed-bf16)      ├── fp32 weights              15.0 GiB │
│ 6 bytes/param     └── bf16 copies                7.5 GiB │
│ OPTIMIZER STATES  █████████████████████████████ 30.0 GiB │
│ (adamw)           ├── fp32 momentum             15.0 GiB │
│ 8 bytes/param     └── fp32 variance             15.0 GiB │
│ GRADIENTS         ▎░░░░░░░░░░░░░                 0.4 GiB │
│ 4 bytes/param     └── fp32 gradients             0.4 GiB │
│ up to 15.0 GiB                                           │
│ ACTIVATIONS       █████████████████████▎        22.0 GiB │
│ 5.5 MiB/token     ├── 34 blocks                 20.0 GiB │
│                   └── head                       2.0 GiB │
│ TEMPORARY TENSORS ▉                              1.0 GiB │
│ up to 2.0 GiB     └── logits and loss            1.0 GiB │
│ OTHER OVERHEAD    ██▏                            2.2 GiB │
│                   ├── CUDA context               0.7 GiB │
│                   ├── allocator reserve          1.5 GiB │
│                   └── 2 smaller                 16.1 MiB │
├──────────────────────────────────────────────────────────┤
│ PEAK     75.9 GiB (81.5 GB) allocated: backward of the   │
│          loss                                            │
│          77.4 GiB (83.1 GB) reserved by the allocator    │
│          78.1 GiB (83.8 GB) process, in nvidia-smi       │
│ PHASES   forward 75.0 GiB · backward 76.0 GiB · step     │
│          61.0 GiB                                        │
│ GPU      H100-80GB: fits, 1.1 GiB of 79.2 GiB free at    │
│          256 tokens                                      │
└────────────── █ at the peak  ░ at the row's own maximum ─┘
Assumptions:
 · sequence length 256 (default)
 · shape: hidden 3072, 34 blocks, 24 heads, vocabulary
   32,000
"""

ASCII_AT_80_IN_GB = """\
+- TENSORS ------------- Llama-like, 4.05B parameters - batch 16 x 256 tokens -+
| MODEL WEIGHTS     ##########################          24.2 GB  6 bytes/param |
| (mixed-bf16)      |-- fp32 weights                    16.1 GB                |
|                   `-- bf16 copies                      8.1 GB                |
| OPTIMIZER STATES  ################################### 32.2 GB  8 bytes/param |
| (adamw)           |-- fp32 momentum                   16.1 GB                |
|                   `-- fp32 variance                   16.1 GB                |
| GRADIENTS         #................                    0.4 GB  4 bytes/param |
|                                                                up to 16.1 GB |
|                   `-- fp32 gradients                   0.4 GB                |
| ACTIVATIONS       #########################           23.6 GB  5.8 MB/token  |
|                   |-- 34 blocks                       21.5 GB                |
|                   `-- head                             2.1 GB                |
| TEMPORARY TENSORS #.                                   1.1 GB  up to 2.1 GB  |
|                   `-- logits and loss                  1.1 GB                |
| OTHER OVERHEAD    ##                                   2.4 GB                |
|                   |-- CUDA context                     0.7 GB                |
|                   |-- allocator reserve                1.6 GB                |
|                   `-- 2 smaller                       16.8 MB                |
+------------------------------------------------------------------------------+
| PEAK     81.5 GB (75.9 GiB) allocated: backward of the loss                  |
|          83.1 GB (77.4 GiB) reserved by the allocator                        |
|          83.8 GB (78.1 GiB) process, in nvidia-smi                           |
| PHASES   forward 80.5 GB - backward 81.6 GB - step 65.5 GB                   |
| GPU      H100-80GB: fits, 1.2 GB of 85.0 GB free at 256 tokens               |
+---------------------------------- # at the peak  . at the row's own maximum -+
Assumptions:
 - sequence length 256 (default)
 - shape: hidden 3072, 34 blocks, 24 heads, vocabulary 32,000
"""

INFERENCE_AT_78 = """\
┌─ TENSORS ─────────── Llama-like, 4.05B parameters · batch 1 × 8192 tokens ─┐
│ MODEL WEIGHTS     ████████████████████████████████ 16.0 GiB  2 bytes/param │
│ (bf16)            └── bf16 weights                 16.0 GiB                │
│ OPTIMIZER STATES                                        0 B                │
│ GRADIENTS                                               0 B                │
│ ACTIVATIONS                                             0 B                │
│ TEMPORARY TENSORS ▌                                 0.2 GiB                │
│                   └── logits                        0.2 GiB                │
│ OTHER OVERHEAD    ███▍                              1.7 GiB                │
│                   ├── CUDA context                  0.7 GiB                │
│                   ├── KV cache                      1.0 GiB                │
│                   └── cuBLAS workspace              8.0 MiB                │
├────────────────────────────────────────────────────────────────────────────┤
│ PEAK     17.3 GiB (18.5 GB) allocated: the logits                          │
│          17.3 GiB (18.5 GB) reserved by the allocator                      │
│          17.9 GiB (19.3 GB) process, in nvidia-smi                         │
│ PHASES   prefill 17.0 GiB · decode 17.0 GiB                                │
│ KV CACHE 1.0 GiB                                                           │
└────────────────────────────────────────────────────────────────────────────┘
"""


def test_the_box_at_80_columns() -> None:
    assert plain(render(training_report(), 80)) == AT_80


def test_the_box_at_60_columns() -> None:
    assert plain(render(training_report(), 60)) == AT_60
    assert plain(render(training_report(), 10)) == AT_60


def test_the_box_in_ascii_and_gb() -> None:
    text = plain(render(training_report(), 80, "GB", unicode=False))
    assert text == ASCII_AT_80_IN_GB
    assert text.isascii()


def test_the_box_of_inference() -> None:
    assert plain(render(inference_report(), 78)) == INFERENCE_AT_78


def box_lines(text: str) -> list[str]:
    """The lines of the frame, without the assumptions below."""
    lines = text.splitlines()
    ends = [index for index, line in enumerate(lines) if line.startswith(("└", "+-"))]
    return lines[: ends[-1] + 1]


@pytest.mark.parametrize("width", [60, 61, 77, 78, 80, 99, 120, 200, 500])
@pytest.mark.parametrize("unicode", [True, False])
@pytest.mark.parametrize("report", [training_report(), inference_report()])
def test_every_line_is_as_wide_as_asked(report: Report, width: int, unicode: bool) -> None:
    text = plain(render(report, width, unicode=unicode))
    assert {cells(line) for line in box_lines(text)} == {width}
    assert all(cells(line) <= width for line in text.splitlines())


names = st.text(st.characters(), max_size=120) | st.sampled_from(
    [
        "\x1b[2J\x1b[31mred",
        "[bold red]x[/]",
        "模型" * 40,
        "a\nb\tc\rd",
        "e\u0301" * 30,
        "\u202eevil",
        "\x9b31m",
        "🧠" * 9,
        "",
    ]
)


# The first draw builds a table of all characters, which takes seconds on a busy machine.
@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(names, names, names, st.integers(60, 200), st.booleans())
def test_no_name_breaks_the_frame_or_reaches_the_terminal(
    name: str, part: str, assumption: str, width: int, unicode: bool
) -> None:
    report = training_report()
    parts = component({part: GIB, "x" + part: 2 * GIB})
    old = report.components.other_overhead
    components = rebuilt(report.components, activations=parts)
    missing = report.components.activations.peak_bytes - parts.peak_bytes
    peak = rebuilt(
        report.peak,
        moment=assumption,
        allocated_bytes=report.peak.allocated_bytes - missing,
        reserved_bytes=report.peak.reserved_bytes - missing,
        process_bytes=report.peak.process_bytes - missing,
    )
    report = rebuilt(
        report,
        components=rebuilt(components, other_overhead=old),
        model=rebuilt(report.model, name=name),
        setup=report.setup | {"precision": name, "optimizer": part},
        peak=peak,
        gpu=GpuFit(name=name, total_bytes=GIB, usable_bytes=GIB, fits=False, free_bytes=-GIB),
        assumptions=(Assumption("code", assumption),),
    )
    text = plain(render(report, width, unicode=unicode))
    assert all(cells(line) == width for line in box_lines(text))
    assert all(character == "\n" or character.isprintable() for character in text)
    assert unicode or text.isascii()
    assert re.fullmatch(r"[^\x00-\x08\x0b-\x1f\x7f-\x9f]*", markdown.render(report))
    assert json_report.render(report).isascii()


def bar_lengths(text: str) -> list[int]:
    return [line.count("█") for line in text.splitlines() if re.match(r"│ [A-Z]{4,}[A-Z ]* [█▏▎▍▌▋▊▉░]", line)]


def test_bars_share_one_scale() -> None:
    weights, states, _, activations, temporary, overhead = bar_lengths(plain(render(training_report(), 120)))
    assert states > weights > activations > overhead >= temporary
    assert abs(weights / states - 22.5 / 30) < 0.03
    assert abs(activations / states - 22 / 30) < 0.03


def test_own_maximum_is_pale_and_explained() -> None:
    text = plain(render(training_report(), 80))
    assert "░░░" in text
    assert "up to 15.0 GiB" in text
    assert "░ at the row's own maximum" in text
    assert "own maximum" not in plain(render(inference_report(), 80))


def test_many_parts_are_summed() -> None:
    report = inference_report()
    shares = {f"part {index}": GIB for index in range(16)}
    components = rebuilt(report.components, model_weights=component(shares, ratio=2.0))
    text = plain(render(rebuilt(report, components=components), 80))
    assert text.count("part ") == 7
    assert re.search(r"└── 9 more +9.0 GiB ", text)


def test_a_job_that_does_not_fit() -> None:
    report = training_report()
    total = report.peak.process_bytes - 5 * GIB
    gpu = GpuFit(name="A100-40GB", total_bytes=total, usable_bytes=total, fits=False, free_bytes=-5 * GIB)
    text = plain(render(rebuilt(report, gpu=gpu), 80))
    assert "GPU      A100-40GB: does not fit, 5.0 GiB more than its 73.1 GiB" in text


def test_a_long_name_gives_way_to_the_job() -> None:
    report = training_report()
    text = plain(render(rebuilt(report, model=rebuilt(report.model, name="organisation/model-" + "x" * 90)), 80))
    assert text.splitlines()[0].endswith("model-xxxxxxxxxxx…, 4.05B · batch 16 × 256 tokens ─┐")


def test_colours_change_nothing_but_colours() -> None:
    lines = render(training_report(), 80)
    text = coloured(lines)
    assert "\x1b[" in text
    assert re.sub(r"\x1b\[[0-9;]*m", "", text) == plain(lines)


def test_markdown() -> None:
    text = markdown.render(training_report())
    assert "| optimizer states | 30.0 GiB | 30.0 GiB | 8.00 |" in text
    assert "| gradients | 0.4 GiB | 15.0 GiB | 4.00 |" in text
    assert "H100-80GB: fits, 1.1 GiB free." in text
    report = rebuilt(training_report(), assumptions=(Assumption("code", "a | b <i> *c*"),))
    assert r"- a \| b \<i\> \*c\*" in markdown.render(report)


def test_text_helpers() -> None:
    assert visible("a\x1b[0m\nb") == r"a\x1b[0m\nb"
    assert visible("3 × é", unicode=False) == r"3 x \xe9"
    assert cells("模型") == 4
    assert cells("e\u0301") == 1
    assert clip("模型模型", 5) == "模型…"
    assert clip("abcdef", 4, unicode=False) == "a..."
    assert wrap("one two three", 7) == ["one two", "three"]
    assert wrap("abcdefghij k", 4) == ["abcd", "efgh", "ij k"]
    assert wrap("", 4) == [""]


def test_a_report_that_does_not_add_up_is_refused() -> None:
    report = training_report()
    with pytest.raises(ValueError, match="rows sum to"):
        rebuilt(report, peak=rebuilt(report.peak, process_bytes=1))
    with pytest.raises(ValueError, match="reserved_bytes"):
        rebuilt(report, peak=rebuilt(report.peak, reserved_bytes=1))
    with pytest.raises(ValueError, match="allocated_bytes"):
        rebuilt(report, peak=rebuilt(report.peak, allocated_bytes=1))
    with pytest.raises(ValueError, match="below peak_bytes"):
        component({"a": 2}, most=1)
    with pytest.raises(ValueError, match="do not sum"):
        rebuilt(component({"a": 2}), peak_bytes=1, max_bytes=1)


def test_active_parameters_and_how_experts_run_are_said() -> None:
    config = {
        "model_type": "mixtral",
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_hidden_layers": 2,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "vocab_size": 1000,
        "num_local_experts": 4,
    }
    report = estimate(ModelSpec.from_config(config, "mix"), TrainingSetup(batch=2, seq_len=64))
    lines = plain(render(report)).splitlines()
    assert lines[0] == "┌─ TENSORS ──────── mix, 4.05M parameters, 2.48M active · batch 2 × 64 tokens ─┐"
    assert "grouped matmuls" in " ".join(map(str, report.assumptions))


def test_labels_are_whole_where_there_is_room() -> None:
    setup = TrainingSetup(optimizer="paged-adamw-8bit", lora_rank=8, activation_checkpointing="full")
    report = estimate(canonical_spec(8 * 10**9)[0], setup)
    assert "(paged-adamw-8bit)" in plain(render(report, 120))
    for width in (90, 120, 200):
        assert "inputs of checkpointed blocks" in plain(render(report, width))


def test_what_every_run_assumes_is_one_line_after_what_this_one_does() -> None:
    report = estimate(canonical_spec(10**9)[0], TrainingSetup())
    *own, always = assumption_lines(report.assumptions)
    assert own[0].startswith("sequence length 256")
    assert always.startswith("as always: no sequence is padded")
    assert "CUDA context 710.2 MiB" in always
    assert len(own) + 4 == len(report.assumptions)
    below = plain(render(report, 80)).split("Assumptions:\n")[1].splitlines()
    assert len(below) < 14


def test_one_is_not_several() -> None:
    assert counted(1, "head") == "1 head"
    assert counted(2000, "head") == "2,000 heads"
    report = training_report()
    components = rebuilt(report.components, gradients=rebuilt(report.components.gradients, bytes_per_parameter=1.0))
    assert "1 byte/param " in plain(render(rebuilt(report, components=components), 80))
